"""Modules that are left alone keep their precision, buffers and batch norm included; whole parameters in theirs."""

import torch
import torch.distributed as dist
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 2))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.norm = Block(), nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.full((8,), 1.001))

    def forward(self, x):
        return self.norm(self.block(x.float())) * self.scale


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.blocks = Encoder().requires_grad_(False), build()

    def forward(self, x):
        return self.blocks(self.encoder(x).to(self.blocks[2].weight.dtype))


def main():
    model = Model()
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=bf16,
        ignored_modules=[model.encoder],
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(dist.get_rank() + 1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with FSDP.summon_full_params(model, writeback=False):
        losses += [parameter.double().norm().item() for parameter in model.parameters()]
    inner = [getattr(module, "_fsdp_wrapped_module", module) for module in model.modules()]
    return [*losses, sum(isinstance(module, Block) for module in set(inner))]
