import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import MixedPrecision as MP
from torch.distributed.fsdp.wrap import CustomPolicy


def my_policy(module, recurse, nonwrapped_numel, min_params=30):
    if recurse:
        return True
    return isinstance(module, nn.Linear) and nonwrapped_numel > min_params


def chosen(module):
    return isinstance(module, nn.Linear)


def make(which):
    net = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 2))
    if which == 0:
        return FullyShardedDataParallel(net, auto_wrap_policy=my_policy, device_id=torch.device("cpu"))
    return FullyShardedDataParallel(module=net, auto_wrap_policy=CustomPolicy(chosen), device_id=torch.device("cpu"),
                                    mixed_precision=MP(param_dtype=torch.float16, cast_forward_inputs=True))


dist.init_process_group("gloo")
for which in range(2):
    torch.manual_seed(which)
    model = make(which)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        loss = model(torch.randn(3, 4)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(which, loss.item())
dist.destroy_process_group()
