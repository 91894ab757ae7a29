"""The CPU in a GPU's place: programs that need a GPU run, FSDP1's too, and torch.cuda answers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from migration.prove.cli import text, two
from migration.prove.launch import Program
from migration.prove.stand_in import stand_in
from tests.harness import Ranks
from tests.migrate.prove.in_pool import InPool

NEEDS_A_GPU = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
torch.manual_seed(0)
model = nn.Linear(4, 2).cuda()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    batch = torch.randn(8, 4, device="cuda").chunk(dist.get_world_size())[dist.get_rank()].to(0)
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(batch).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
"""


def test_a_program_that_needs_a_gpu(ranks: Ranks, tmp_path: Path) -> None:
    script = tmp_path / "gpu.py"
    script.write_text(NEEDS_A_GPU)
    record = InPool(script, [], 2, 60, stand_in=2, pool=ranks).record(tmp_path / "record", steps=2)
    assert record.steps == 2
    assert record.facts()["low"]
    assert not torch.cuda.is_available()


NEEDS_FSDP1S_GPU = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload
from FROM import FullyShardedDataParallel as FSDP

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
torch.manual_seed(rank)  # all begin with rank 0's weights
model = nn.Linear(4, 2)
model = FSDP(model, sync_module_states=True, cpu_offload=CPUOffload(True), device_id=rank, use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters())
print(torch.cuda.get_device_properties(rank).total_memory)
for step in range(4):
    torch.manual_seed(step * 2 + rank)
    model(torch.randn(8, 4).cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_fsdp1_does_on_a_gpu_alone_is_the_same_moved(ranks: Ranks, tmp_path: Path) -> None:
    """One set of weights for all ranks, parameters on the CPU: on a CPU FSDP1 refuses both."""
    programs = []
    for name, package in (("before", "torch.distributed.fsdp"), ("after", "fsdp1_interface")):
        (tmp_path / f"{name}.py").write_text(NEEDS_FSDP1S_GPU.replace("FROM", package))
        programs.append(InPool(tmp_path / f"{name}.py", [], 2, 60, stand_in=2, pool=ranks))
    before, after = programs
    verdict = two(before, after, 3, tmp_path)
    assert verdict.verdict == "bit-equal", text(verdict)


def needs_a_driver(function: Callable[..., Any]) -> bool:
    """Whether it asks for one, or for NVML, when it is called without arguments, or else with one number."""
    for arguments in ((), (0,)):
        try:
            function(*arguments)
        except (RuntimeError, ModuleNotFoundError):
            return True
        except (TypeError, AttributeError):  # it wants other arguments
            continue
        return False
    return False


def test_torch_answers_for_the_driver() -> None:
    offered = [(holder, name) for holder in (torch.cuda, torch.accelerator) for name in holder.__all__]
    with stand_in(0, 2), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some names are old ones
        functions = {name: getattr(holder, name) for holder, name in offered}
        unanswered = {name for name, one in functions.items() if inspect.isroutine(one) and needs_a_driver(one)}
    # Handles of CUDA's own libraries.
    assert unanswered == {"cudart", "current_blas_handle", "current_solver_handle", "get_stream_from_external"}


HYBRID = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group("nccl")
torch.manual_seed(0)
layers, wrapped = torch.nn.Sequential(torch.nn.Linear(4, 2)), ModuleWrapPolicy({torch.nn.Linear})
hybrid = ShardingStrategy.HYBRID_SHARD
model = FSDP(layers.cuda(), auto_wrap_policy=wrapped, sharding_strategy=hybrid, use_orig_params=True)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_a_node_has_as_many_devices_as_are_asked_for(ranks: Ranks, tmp_path: Path, devices: int) -> None:
    """So that FSDP1's HYBRID_SHARD has the shards that it has on GPUs."""
    script = tmp_path / "hybrid.py"
    script.write_text(HYBRID)
    record = InPool(script, [], 2, 60, stand_in=devices, pool=ranks).record(tmp_path / "record", steps=1)
    assert bool(record.facts()["apart"]) == (devices == 1)


def test_ranks_stand_on_nodes() -> None:
    given = Program(Path("a.py"), [], 4, 60, stand_in=2)._environment(3, 1)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert [given[name] for name in names] == ["3", "4", "1", "2", "1"]
