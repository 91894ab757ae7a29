import functools
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + torch.sin(self.drop(self.lin(x)))


class Wrapper:
    def __init__(self, model, layer_cls):
        self.layer_cls = layer_cls
        self.model = FSDP(
            model,
            auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={self.layer_cls}),
            device_id=torch.device("cpu"),
        )
        apply_activation_checkpointing(
            self.model,
            checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
            check_fn=lambda m: isinstance(m, Block),
        )

    def state(self):
        return {k: float(v.double().sum()) for k, v in self.model.state_dict().items()}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    w = Wrapper(nn.Sequential(Block(), Block(), Block()), Block)
    opt = torch.optim.Adam(w.model.parameters())
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        loss = w.model(torch.randn(4, 6)).square().sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        if dist.get_rank() == 0:
            print(loss.item())
    state = w.state()
    if dist.get_rank() == 0:
        print(state)
    dist.destroy_process_group()


main()
