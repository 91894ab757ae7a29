"""Modules that are left alone keep their precision, buffers and batch norm included; whole parameters in theirs."""

import contextlib
import dataclasses
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


@contextlib.contextmanager
def full_params(model):
    """Whole parameters in their own dtype while this is open, on every rank, to be read: what is written is lost."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # evaluation leaves groups gathered, in the dtype of mixed precision
    sharded = [(module, *item) for module in model.modules() for item in module.named_parameters(recurse=False)]
    parameters = {id(p): p for _, _, p in sharded if hasattr(p, "full_tensor")}
    whole = {key: torch.nn.Parameter(p.full_tensor(), p.requires_grad) for key, p in parameters.items()}
    for module, name, parameter in sharded:
        setattr(module, name, whole.get(id(parameter), parameter))
    try:
        yield
    finally:
        for module, name, parameter in sharded:
            setattr(module, name, parameter)


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
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    fsdp_ignored_modules = {m for ignored in [model.encoder] for m in ignored.modules()}
    ignored_params = {p for ignored in fsdp_ignored_modules for p in ignored.parameters()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in list(model.modules()):  # FSDP1 left batch norm in full precision
        if module not in fsdp_ignored_modules and isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=bf16.param_dtype),
                ignored_params=ignored_params,
            )
    for module in reversed(list(model.modules())[1:]):
        if module not in fsdp_ignored_modules and isinstance(module, Block):
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=dataclasses.replace(bf16, cast_forward_inputs=False),
                ignored_params=ignored_params,
            )
    fully_shard(model, mesh=mesh, mp_policy=bf16, ignored_params=ignored_params)
    for module in model.modules():  # FSDP1's buffer_dtype, which left batch norm alone
        if not isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module not in fsdp_ignored_modules:
            for buffer in module.buffers(recurse=False):
                if buffer.is_floating_point():
                    buffer.data = buffer.to(bf16.param_dtype)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(dist.get_rank() + 1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with full_params(model):
        losses += [parameter.double().norm().item() for parameter in model.parameters()]
    inner = [module for module in model.modules()]
    return [*losses, sum(isinstance(module, Block) for module in set(inner))]
