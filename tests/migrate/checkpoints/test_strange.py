"""Files that no writer of FSDP1 leaves, or that don't belong together: refused, and never taken in part."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from fsdp2.checkpoint.pickles import Unread
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.sources.opening import opened
from migration.checkpoints.rank_files import SHARDED, _whole
from migration.checkpoints.tree import Entry
from tests.commands.common import read_all
from tests.harness import Ranks
from tests.migrate.checkpoints import fsdp1
from tests.migrate.checkpoints.conftest import Cli
from tests.migrate.checkpoints.test_refusals import named, trained


def _a_name_twice(place: Path) -> list[Any]:
    weights, optimizer = trained(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    torch.save({"model": weights, "optim": optimizer}, place / "m.pt")
    (place / "names.json").write_text(json.dumps(["0.weight", "0.bias", "0.weight", "0.bias"]))
    return [place / "m.pt", "--optimizer-names", place / "names.json"]


def _ranks_of_two_saves(place: Path) -> list[Any]:
    for rank in range(2):
        weights, optimizer = trained()
        optimizer["state"][1]["step"] += rank
        torch.save({"model": weights, "optim": named(optimizer, list(weights))}, place / f"m_rank{rank}.pt")
    return [place]


def _a_rank_far_away(place: Path) -> list[Any]:
    for rank in (0, 10**12):
        torch.save(trained()[0], place / f"m_rank{rank}.pt")
    return [place]


def _a_rank_twice(place: Path) -> list[Any]:
    for rank in ("0", "1", "01"):
        torch.save(trained()[0], place / f"m_rank{rank}.pt")
    return [place]


def _a_pipe(place: Path) -> list[Any]:
    os.mkfifo(place / "m.pt")
    return [place / "m.pt"]


def _many_numbers(place: Path) -> list[Any]:
    """Comparing each with each takes minutes, and gigabytes."""
    names = [f"p{number}" for number in range(20_000)]
    groups = [{"lr": 0.1, "params": list(range(len(names) - 1))}]
    optimizer = {"state": {}, "param_groups": groups}
    torch.save({"model": {name: torch.zeros(0) for name in names}, "optim": optimizer}, place / "m.pt")
    return [place / "m.pt"]


def _sparse(place: Path) -> list[Any]:
    torch.save({"model": {"a.weight": torch.ones(2, 2), "b.weight": torch.eye(2).to_sparse()}}, place / "m.pt")
    return [place / "m.pt"]


def _changed(change: Callable[[Any], Any]) -> Callable[[Path], list[Any]]:
    """A plain optimizer of which something was changed."""

    def make(place: Path) -> list[Any]:
        weights, optimizer = trained()
        change(optimizer)
        torch.save({"model": weights, "optim": optimizer}, place / "m.pt")
        return [place / "m.pt"]

    return make


def _step(value: Any) -> Callable[[Path], list[Any]]:
    return _changed(lambda optimizer: optimizer["state"][1].update(step=value))


def _moments(dtype: torch.dtype) -> Callable[[Path], list[Any]]:
    return _changed(lambda optimizer: optimizer["state"][1].update(exp_avg=optimizer["state"][1]["exp_avg"].to(dtype)))


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (_a_name_twice, "--optimizer-names: has 2 names for 4"),
        (
            _ranks_of_two_saves,
            "optim.state.0.bias.step differs between the ranks; the files are of",
        ),
        (_a_rank_far_away, "m_rank*.pt of rank 1 is missing"),
        (_a_rank_twice, "m_rank*.pt of rank 1 is there twice"),
        (_a_pipe, "m.pt is a pipe and no file"),
        (_sparse, "model.b.weight is a tensor without plain data"),
        (_many_numbers, "the model has 20000 tensors that may be those"),
        (_changed(lambda optimizer: optimizer.update(param_groups={"a": {"lr": 1}})), "is not something that a torch"),
        (_changed(lambda optimizer: optimizer["param_groups"].append({"params": ["x"]})), "not numbered from 0 on"),
        (_step(torch.tensor(math.nan)), "optim.state.1.step is nan and no number of steps"),
        (_step(torch.tensor(-3.0)), "optim.state.1.step is -3.0 and no number of steps"),
        (_step(torch.tensor(2.5)), "optim.state.1.step is 2.5 and no number of steps"),
        (_step(torch.ones(2)), "and no number of steps"),
        (_step(10**400), "and no number of steps"),
        (
            _moments(torch.int64),
            "optim.state.1.exp_avg is torch.int64, with which no optimizer computes; save it again",
        ),
        (_moments(torch.bool), "optim.state.1.exp_avg is torch.bool, with which"),
    ],
)
def test_what_is_strange_is_refused_in_one_line(
    cli: Cli, tmp_path: Path, make: Callable[[Path], list[Any]], part: str
) -> None:
    place = tmp_path / "source"
    place.mkdir()
    arguments = make(place)
    before = sorted(os.listdir(place))
    status, line = cli(*arguments, tmp_path / "out")
    assert status == 2
    assert part in line
    assert (sorted(os.listdir(place)), (tmp_path / "out").exists()) == (before, False)


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_what_is_not_fp32_is_said_and_no_resume_advised(cli: Cli, tmp_path: Path, what: str) -> None:
    weights, optimizer = trained()
    if what == "model":
        weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
    else:
        optimizer["state"][1]["exp_avg"] = optimizer["state"][1]["exp_avg"].half()
    torch.save({"model": weights, "optim": optimizer}, tmp_path / "m.pt")
    status, printed = cli(tmp_path / "m.pt", tmp_path / "out")
    assert status == 0, printed
    assert "are not fp32, which training here keeps: --init-from takes the weights" in printed
    assert f"fsdp2.train --init-from {tmp_path / 'out'}" in printed


@pytest.mark.parametrize("step", [torch.tensor(3), torch.tensor([3.0])])
def test_steps_that_are_counted_in_another_form_are_taken(cli: Cli, tmp_path: Path, step: torch.Tensor) -> None:
    weights, optimizer = trained()
    for state in optimizer["state"].values():
        state["step"] = step
    torch.save({"model": weights, "optim": optimizer}, tmp_path / "m.pt")
    status, printed = cli(tmp_path / "m.pt", tmp_path / "out")
    assert status == 0, printed
    assert "fp32" not in printed
    steps = [tensor for name, tensor in read_all(tmp_path / "out", "app.optim.state.").items() if name.endswith("step")]
    assert [(one.dtype, one.shape, float(one)) for one in steps] == [(torch.float32, (), 3.0)] * len(steps)


def test_shards_of_one_place_that_differ_are_of_several_saves() -> None:
    """Replicas save the same shard each; the last one read would win."""

    def entry(value: float) -> dict[Any, Entry]:
        place = Unread("ShardMetadata", (), {"shard_offsets": [0]})
        shard = Unread("Shard", (), {"metadata": place, "tensor": torch.tensor([value, math.nan])})
        whole = Unread(SHARDED, (), ([shard], Unread("ShardedTensorMetadata", (), {"size": [2]})))
        return {("weight",): Entry(None, lambda: whole, "m_rank0.pt: weight")}

    assert _whole(("weight",), [entry(1), entry(1)]).read()[0] == 1
    with pytest.raises(Refused, match=r"^m_rank0\.pt: weight: two ranks' shards of one place differ; the files are of"):
        _whole(("weight",), [entry(1), entry(2)]).read()


def test_what_rprop_keeps_of_each_value_is_put_together(ranks: Ranks, cli: Cli, tmp_path: Path) -> None:
    ranks.run(_save_rprop, tmp_path)
    line = ["--model", "vit", "--model-size", "tiny", "--wrap", "EncoderBlock"]
    status, printed = cli(tmp_path / "local", tmp_path / "out", *line)
    assert (status, "optimizer state of 32 parameters" in printed) == (0, True), printed
    with opened(str(tmp_path / "out")) as source:
        for name, whole in torch.load(tmp_path / "full.pt", weights_only=True)["state"].items():
            assert torch.equal(source.read(f"app.optim.state.{name}.step_size"), whole["step_size"])


def _save_rprop(folder: Path) -> None:
    model = fsdp1.wrapped(fsdp1.plain_model(), orig=False)
    optimizer = torch.optim.Rprop(model.parameters())
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().sin()
        optimizer.step()
    (folder / "local").mkdir(exist_ok=True)
    with fsdp1.full(model):
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        weights: Any = model.state_dict()
    rank = dist.get_rank()
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, folder / "local" / f"m_rank{rank}.pt")
    if rank == 0:
        torch.save(state, folder / "full.pt")
