"""Optimizer state, loading and saving: docs/upstream.md, "Optimizer and checkpoints"."""

from __future__ import annotations

import copy
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.harness import Ranks
from tests.upstream.common import error_of, frozen_copy, fully_shard, gone, new_group, still


def _stepped(model: nn.Module, called: nn.Module | None = None) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(model.parameters())
    (called or model)(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_the_state_of_a_frozen_parameter_is_dropped_at_loading() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = _stepped(model)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    frozen = frozen_copy(model)
    again = torch.optim.Adam(frozen.parameters())
    set_optimizer_state_dict(frozen, again, saved)
    assert len(optimizer.state) == 4
    still(len(again.state) == 2, "pytorch/pytorch#192202")


def test_where_some_parameters_have_state_that_of_others_is_not_made() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = _stepped(model, called=model[0])
    still(len(get_optimizer_state_dict(model, optimizer)["state"]) == 2, "pytorch/pytorch#192202")


def test_asking_for_state_before_the_first_step_counts_as_one() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    get_optimizer_state_dict(model, optimizer)
    still({float(state["step"]) for state in optimizer.state.values()} == {1.0}, "pytorch/pytorch#164929")


def test_what_only_the_checkpoint_has_is_left_out_without_a_word(tmp_path: Path) -> None:
    dcp.save({"weight": torch.ones(2), "step": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    state = {"weight": torch.zeros(2)}
    told: Any = dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    still(told is None and list(state) == ["weight"], "pytorch/pytorch#126881")


def test_a_partial_load_leaves_out_the_optimizer_without_a_word(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    dcp.save({"model": {"weight": torch.ones(2)}}, checkpoint_id=tmp_path, no_dist=True)
    state = {"model": {"weight": torch.zeros(2)}, "optimizer": {"exp_avg": torch.zeros(2)}}
    told: Any = dcp.load(
        state, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True), no_dist=True
    )
    assert torch.equal(state["model"]["weight"], torch.ones(2))
    warned = [str(one.message) for one in recwarn if "exp_avg" in str(one.message)]
    still(told is None and not warned and not state["optimizer"]["exp_avg"].any(), "pytorch/torchtitan#4010")


def _of_each_rank(folder: Path) -> float:
    dcp.save({"random": torch.full((2,), float(dist.get_rank()))}, checkpoint_id=folder)
    state = {"random": torch.full((2,), -1.0)}
    dcp.load(state, checkpoint_id=folder)
    return float(state["random"][0])


def test_of_a_value_that_each_rank_has_one_is_saved(ranks: Ranks, tmp_path: Path) -> None:
    still(len(set(ranks.run(_of_each_rank, tmp_path))) == 1, "pytorch/pytorch#146566")


def test_loading_an_optimizer_changes_the_loss_scale(tmp_path: Path, accelerator: Any) -> None:
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import fsdp_utils

    process = accelerator()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")

    def made() -> tuple[nn.Module, Any, torch.amp.GradScaler]:
        model, scaler = nn.Linear(2, 2), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        scaler.scale(torch.ones(1))
        return model, AcceleratedOptimizer(torch.optim.Adam(model.parameters()), scaler=scaler), scaler

    model, optimizer, scaler = made()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    fsdp_utils.save_fsdp_optimizer(plugin, process, optimizer, model, str(tmp_path))
    other, its_optimizer, its_scaler = made()
    its_scaler.load_state_dict(scaler.state_dict())
    assert its_scaler.get_scale() == scaler.get_scale() == 2048
    fsdp_utils.load_fsdp_optimizer(plugin, process, its_optimizer, other, str(tmp_path))
    still(its_scaler.get_scale() == 4096, "huggingface/accelerate#4289")


def _loaded_where_it_was_saved(version: int, folder: str) -> str:
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import fsdp_utils

    PartialState(cpu=True)  # for its logger
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "False")
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type="SHARDED_STATE_DICT")
    layer, process = nn.Linear(2, 2), _Process()
    process.is_fsdp2 = version == 2
    model: nn.Module = layer
    if version == 2:
        fully_shard(layer)
    else:
        model = FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
    optimizer = _stepped(model)
    fsdp_utils.save_fsdp_model(plugin, process, model, folder)
    fsdp_utils.save_fsdp_optimizer(plugin, process, optimizer, model, folder)

    def load() -> None:
        fsdp_utils.load_fsdp_model(plugin, process, model, folder)
        fsdp_utils.load_fsdp_optimizer(plugin, process, optimizer, model, folder)

    return error_of(load)


class _Process:
    """What accelerate's functions ask of its Accelerator, which itself shards on no CPU."""

    is_fsdp2 = True

    def __init__(self) -> None:
        self.num_processes, self.process_index = dist.get_world_size(), dist.get_rank()
        self.is_main_process = self.process_index == 0

    def wait_for_everyone(self) -> None:
        dist.barrier()


@pytest.mark.parametrize("version", [1, 2])
def test_what_was_saved_loads_in_the_same_process(ranks: Ranks, tmp_path: Path, version: int) -> None:
    gone(any(ranks.run(_loaded_where_it_was_saved, version, str(tmp_path))), "huggingface/accelerate#3896")


def _rank_0_is_busy() -> str:
    group = new_group(timeout=timedelta(seconds=0.5))
    if dist.get_rank() == 0:
        time.sleep(1.5)  # writes what it has gathered
    return error_of(lambda: dist.all_reduce(torch.ones(1), group=group))


def test_ranks_that_wait_longer_than_a_collective_may_end(ranks: Ranks) -> None:
    still(bool(ranks.run(_rank_0_is_busy)[1]), "pytorch/pytorch#143536")
