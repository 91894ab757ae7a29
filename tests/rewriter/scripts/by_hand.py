"""Wrapping by hand, in the constructor of the model and outside; optimizer first; NO_SHARD beside."""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy, MixedPrecision

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = FSDP(nn.Linear(5, 7), device_id=CPU, use_orig_params=True)
        self.b = nn.Linear(7, 7)
        self.layers = nn.ModuleList([FSDP(nn.Linear(7, 7), device_id=CPU, use_orig_params=True) for _ in range(2)])

    def forward(self, x):
        x = self.b(torch.relu(self.a(x)))
        for l in self.layers:
            x = torch.relu(l(x))
        return x


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    for i, layer in enumerate(net.layers):
        net.layers[i] = layer
    opt_group = dist.group.WORLD
    net = FSDP(net, process_group=opt_group, device_id=CPU, use_orig_params=True,
               mixed_precision=MixedPrecision(reduce_dtype=torch.float32))
    small = FSDP(nn.Linear(7, 1), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=CPU)
    opt = torch.optim.SGD([*net.parameters(), *small.parameters()], lr=0.05)
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        loss = small(net(torch.randn(4, 5))).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        if dist.get_rank() == 0:
            print(loss.item())
    dist.destroy_process_group()


main()
