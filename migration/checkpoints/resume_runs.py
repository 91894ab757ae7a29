"""`--prove N`: real FSDP1 goes on from the source, FSDP2 from the result, and their losses are compared."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.restore import restore
from fsdp2.checkpoint.safe_reader import SafeReader
from fsdp2.checkpoint.state import AppState, Progress
from migration.checkpoints.code import HERE, Code
from migration.checkpoints.origin import Choice, Origin, opened_origin
from migration.checkpoints.prove import Differs

RANKS = 2  # sums of two have one order, so that FSDP1 and FSDP2 are bit-equal


@dataclass(frozen=True)
class Task:
    """The task of the ranks of both sides."""

    code: Code
    optimizer: str
    groups: list[dict[str, Any]]  # settings, with names under `params`
    steps: int
    source: Path
    choice: Choice
    result: Path


def compare_runs(task: Task) -> list[float]:
    """The losses of rank 0, the same from both sides on each rank. Raises Differs, or Refused where a rank fails."""
    try:
        before, after = _on_ranks(resume_fsdp1, task), _on_ranks(resume_fsdp2, task)
    except mp.ProcessRaisedException as error:
        first, *behind = str(error).rpartition('  File "')[2].splitlines()
        told = " ".join(one.strip() for one in behind if not one.startswith("    ")).strip()  # what is indented is code
        path, _, number = first.partition('", line ')
        why = f"--prove: {told}, at {path}:{number.partition(',')[0]}"
        raise Refused(f"{why}; {task.result} is converted, and its losses aren't compared") from None
    for step in range(task.steps):
        for rank in range(RANKS):
            one, other = before[rank][step], after[rank][step]
            if one != other:
                raise Differs(
                    f"the losses from step {step + 1} on: rank {rank} has {one!r} with FSDP1 from the source and "
                    f"{other!r} with FSDP2 from the result, which is kept for inspection"
                )
    return before[0]


Side = Callable[[Task], list[float]]


def _on_ranks(side: Side, task: Task) -> list[list[float]]:
    """Each rank's losses. The processes are new: in some versions of torch FSDP1 on a CPU ends its process."""
    with tempfile.TemporaryDirectory(prefix="fsdp2-") as folder:
        mp.spawn(_rank, args=(side, task, folder), nprocs=RANKS)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]


def _rank(rank: int, side: Side, task: Task, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    losses = side(task)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(losses))  # repr, so nothing is rounded
    dist.destroy_process_group()


def _train(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for group in optimizer.param_groups:
        group.update({key: value for key, value in HERE.items() if key in group})
    for step in range(task.steps):
        loss = task.code.loss_of(model, step, dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _optimizer(task: Task, named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {**{k: v for k, v in group.items() if k not in HERE}, "params": [named[name] for name in group["params"]]}
        for group in task.groups
    ]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, task.optimizer)(groups)
    return optimizer


def _spoil(model: nn.Module) -> None:
    """Values that no checkpoint has: what isn't loaded shows."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(0.5 if tensor.is_floating_point() else 1)


def resume_fsdp2(task: Task) -> list[float]:
    """From the result, as training here restores it."""
    model = task.code.build()
    for unit in task.code.units(model):
        fully_shard(unit)
    fully_shard(model)
    _spoil(model)
    optimizer = _optimizer(task, dict(model.named_parameters()))
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    restore(LocalFiles(task.result), AppState(model, optimizer, {"progress": Progress()}))
    return _train(task, model, optimizer)


def resume_fsdp1(task: Task) -> list[float]:
    """From the source, by FSDP1's own functions: DCP's loading into sharded tensors, or whole state dicts."""
    model = task.code.build()
    units = set(task.code.units(model))
    _spoil(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its deprecation
        sharded = FullyShardedDataParallel(
            model,
            auto_wrap_policy=CustomPolicy(lambda module: module in units),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        named = {name.replace("_fsdp_wrapped_module.", ""): one for name, one in sharded.named_parameters()}
        optimizer = _optimizer(task, named)
        with opened_origin(task.source, task.choice) as origin:
            if all(entry.dcp for entry in origin.entries.values() if entry.meta is not None):
                _load_sharded(sharded, optimizer, origin)
            else:
                _load_full(sharded, optimizer, origin)
        return _train(task, sharded, optimizer)


def _load_full(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, origin: Origin) -> None:
    state: dict[str, dict[str, Any]] = {}
    for path, entry in origin.optimizer().items():
        if path[0] == "state":
            # Each its own: FSDP1's files share one `step` between the parameters of a unit.
            state.setdefault(str(path[1]), {})[str(path[2])] = entry.read().clone()
    full = FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *full):
        model.load_state_dict({name: entry.read() for name, entry in origin.model().items()})
        if state:
            saved = {"state": state, "param_groups": origin.groups()}
            optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved))


def _load_sharded(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, origin: Origin) -> None:
    for parameter in model.parameters():  # so that there is a state to load into
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        weights = model.state_dict()
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        targets: dict[str, dict[str, Any]] = {}
        for path, entry in origin.entries.items():
            if entry.dcp is not None and entry.meta is not None:
                of_model = path[1] == "model"
                target = weights[str(path[2])] if of_model else state["state"][str(path[3])][str(path[4])]
                targets.setdefault(entry.dcp[0], {})[entry.dcp[1]] = target
        for folder, tensors in targets.items():
            dcp.load(tensors, storage_reader=SafeReader(LocalFiles(folder)), planner=DefaultLoadPlanner())
        model.load_state_dict(weights)
        state = {**state, "param_groups": origin.groups()}
        optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state))
