"""Sharded checkpoints through DCP; set_state_dict_type."""
import os
import shutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel as FSDP,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

DIR = os.environ["SCRATCH"] + "/dcp"


def get_model():
    torch.manual_seed(7)
    m = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    m[0] = FSDP(m[0], device_id=torch.device("cpu"))
    return FSDP(m, device_id=torch.device("cpu"), sharding_strategy=None)


def run(model, opt, n):
    for i in range(n):
        torch.manual_seed(100 * dist.get_rank() + i)
        loss = (model(torch.randn(3, 8)) - 1).abs().mean()
        loss.backward()
        opt.step(); opt.zero_grad()
        if dist.get_rank() == 0:
            print(f"{loss.item()!r}")


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        shutil.rmtree(DIR, ignore_errors=True)
    dist.barrier()
    model = get_model()
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    run(model, opt, 3)
    FSDP.set_state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=True),
        ShardedOptimStateDictConfig(offload_to_cpu=True),
    )
    state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, opt)}
    dcp.save(state, checkpoint_id=DIR)
    model2 = get_model()
    opt2 = torch.optim.Adam(model2.parameters(), 1e-2)
    run(model2, opt2, 1)
    with FSDP.state_dict_type(model2, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model2.state_dict(), "optim": FSDP.optim_state_dict(model2, opt2)}
        dcp.load(state, checkpoint_id=DIR)
        model2.load_state_dict(state["model"])
        opt2.load_state_dict(FSDP.optim_state_dict_to_load(model2, opt2, state["optim"]))
    run(model, opt, 2)
    run(model2, opt2, 2)
    dist.destroy_process_group()


main()
