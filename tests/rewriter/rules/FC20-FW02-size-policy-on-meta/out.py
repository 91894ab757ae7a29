"""Units chosen by size, each of which gets its values before it is sharded."""


import torch
from torch import nn
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def shard_by_size(module, min_num_params, first=None, is_root=True, **options):
    """Shard what FSDP1's size_based_auto_wrap_policy chose; returns how many parameters are in groups."""
    numel = sum(parameter.numel() for parameter in module.parameters())
    if numel < min_num_params or isinstance(module, torch.nn.MultiheadAttention):
        return 0
    taken = sum(shard_by_size(child, min_num_params, first, False, **options) for child in module.children())
    if is_root or numel - taken < min_num_params or isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        return taken
    if first is not None:
        first(module)
    fully_shard(module, **options)
    return numel


@torch.no_grad()
def initialise(group, device, init=None, sync=False):
    """Memory and values for what is on the meta device in a group that is to be sharded, as FSDP1 gave them; with
    `sync`, FSDP1's sync_module_states, every rank then gets the values of rank 0."""
    modules = [group]
    for module in modules:
        modules += [c for c in module.children() if not isinstance(c, FSDPModule) and c not in modules]
    tensors = {m: [*m.parameters(recurse=False), *m.buffers(recurse=False)] for m in modules}
    if any(tensor.is_meta for own in tensors.values() for tensor in own):
        for module in modules:
            if init is not None:
                init(module)
            elif tensors[module]:
                module.to_empty(device=device, recurse=False)
                module.reset_parameters()
    for module in modules if sync else ():
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            tensor.data = tensor.data.to(device)
            torch.distributed.broadcast(tensor, src=0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def train(model, optimizer, steps=3):
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block(), nn.LayerNorm(8), nn.Linear(8, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard_by_size(model, 60, lambda module: initialise(module, torch.device("cpu")), mesh=mesh)
    initialise(model, torch.device("cpu"))
    fully_shard(model, mesh=mesh)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))
