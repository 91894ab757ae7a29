"""Full state dicts, optimizer state dicts, resume in a second model."""
import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.distributed.fsdp as fsdp
from torch.distributed.fsdp import StateDictType, FullStateDictConfig, FullOptimStateDictConfig
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from functools import partial


class MLP(nn.Module):
    def __init__(self): 
        super().__init__()
        self.fc = nn.Linear(12, 12)

    def forward(self, x):
        return torch.tanh(self.fc(x))


def build():
    return nn.Sequential(MLP(), MLP(), nn.Linear(12, 3))


def shard(module):
    return fsdp.FullyShardedDataParallel(
        module,
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls=(MLP,)),
        device_id=torch.device("cpu"),
        use_orig_params=True)


def save(model, optim, path):
    full = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    full_optim = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with fsdp.FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, full, full_optim):
        model_state = model.state_dict()
        optim_state = fsdp.FullyShardedDataParallel.optim_state_dict(model, optim)
    if dist.get_rank() == 0:
        torch.save({"model": model_state, "optim": optim_state}, path)
    dist.barrier()


def load(model, optim, path):
    ckpt = torch.load(path, weights_only=False)
    with fsdp.FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(ckpt["model"])
        flattened = fsdp.FullyShardedDataParallel.optim_state_dict_to_load(model, optim, ckpt["optim"])
        optim.load_state_dict(flattened)


def steps(model, optim, n, seed):
    torch.manual_seed(seed * 10 + dist.get_rank())
    for _ in range(n):
        x = torch.randn(6, 12)
        loss = model(x).pow(2).sum()
        loss.backward()
        optim.step()
        optim.zero_grad()
        if dist.get_rank() == 0:
            print(loss.item())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = shard(build())
    optim = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    steps(model, optim, 3, 1)
    path = os.path.join(os.environ["SCRATCH"], "full.pt")
    save(model, optim, path)
    steps(model, optim, 2, 2)
    torch.manual_seed(5)
    other = shard(build())
    other_optim = torch.optim.SGD(other.parameters(), lr=1e-2, momentum=0.9)
    load(other, other_optim, path)
    steps(other, other_optim, 2, 2)
    print(isinstance(other, fsdp.FullyShardedDataParallel)) if dist.get_rank() == 0 else None
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
