import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy, CPUOffload, BackwardPrefetch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import always_wrap_policy
from torch.nn.parallel import DistributedDataParallel as DDP

MODE = os.environ.get("MODE", "fsdp")


def prepare(model: nn.Module):
    if MODE == "fsdp":
        model = FSDP(model, auto_wrap_policy=always_wrap_policy, device_id=torch.device("cpu"),
                     backward_prefetch=BackwardPrefetch.BACKWARD_POST, forward_prefetch=True,
                     cpu_offload=CPUOffload(False), limit_all_gathers=False)
    elif MODE == "ddp":
        model = DDP(model)
    return model


dist.init_process_group(backend="gloo")
torch.manual_seed(0)
model = prepare(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
scaler = ShardedGradScaler(device="cpu", enabled=True, init_scale=1024.0)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for i in range(6):
    if i % 2 == 0:
        with model.no_sync():
            scaler.scale(model(torch.randn(3, 4)).sum()).backward()
        continue
    loss = model(torch.randn(3, 4)).sum()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    if isinstance(model, FSDP):
        grad_norm = model.clip_grad_norm_(1e5)
    else:
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e5)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    if dist.get_rank() == 0:
        print(loss.item(), round(grad_norm.item(), 3), scaler.get_scale())
dist.destroy_process_group()
