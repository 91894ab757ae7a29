"""Back to FSDP1: what `--to fsdp1-full` writes is what its own functions load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.state import AppState, Progress, RandomState, SchedulerState
from fsdp2.checkpoint.store import Store
from tests.harness import Ranks, make_engine, one_step, save
from tests.migrate.checkpoints.conftest import Cli, Saved
from tests.migrate.checkpoints.fsdp1 import FURTHER, STEPS, grouped, resume_fsdp1


def _train_fsdp2(run: Path, groups: int) -> list[float]:
    engine = grouped(make_engine(), groups)
    for _ in range(STEPS):
        one_step(engine)
    parts: dict[str, Any] = {"progress": Progress(STEPS), "rng": RandomState(dist.get_rank(), torch.device("cpu"))}
    if groups > 1:
        parts["scheduler"] = SchedulerState(torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, gamma=1.0))
    save(Store(LocalFiles(run / "checkpoints")), AppState(engine.model, engine.optimizer, parts), STEPS)
    return [one_step(engine) for _ in range(FURTHER)]


@pytest.mark.parametrize("orig", [False, True])
def test_fsdp1_goes_on_bit_for_bit_from_fsdp2(ranks: Ranks, cli: Cli, tmp_path: Path, orig: bool) -> None:
    expected = ranks.run(_train_fsdp2, tmp_path / "run", 2 if orig else 1)[0]
    status, printed = cli(tmp_path / "run", tmp_path / "back.pt", "--to", "fsdp1-full")
    assert status == 0, printed
    assert printed.splitlines()[-1].startswith(
        "proven: 32 tensors of the model (19,658 values), 96 of the optimizer and"
    )
    assert "left out: app.rng, 10 entries" in printed
    assert "optim_state_dict_to_load(model, optimizer, state['optimizer'])" in printed
    losses = ranks.run(_resume, str(tmp_path / "back.pt"), orig)[0]
    assert losses == expected
    state = torch.load(tmp_path / "back.pt", weights_only=True)
    assert state["step"] == STEPS
    assert ["initial_lr" in group for group in state["optimizer"]["param_groups"]] == ([True] * 2 if orig else [False])
    steps = [entry["step"] for entry in state["optimizer"]["state"].values()]
    assert len({step.untyped_storage().data_ptr() for step in steps}) == len(steps) == 32


def test_there_and_back_is_what_it_was(orig: Saved, cli: Cli, tmp_path: Path) -> None:
    assert cli(orig.folder / "full.pt", tmp_path / "out")[0] == 0
    assert cli(tmp_path / "out", tmp_path / "back.pt", "--to", "fsdp1-full")[0] == 0
    before, after = (torch.load(path, weights_only=True) for path in (orig.folder / "full.pt", tmp_path / "back.pt"))
    for name, tensor in before["model"].items():
        assert torch.equal(tensor, after["model"][name])
    for name, entries in before["optimizer"]["state"].items():
        for key, tensor in entries.items():
            assert torch.equal(tensor, after["optimizer"]["state"][name][key])
    for group, again in zip(before["optimizer"]["param_groups"], after["optimizer"]["param_groups"], strict=True):
        assert again == group  # not even initial_lr, which the conversion adds, and by which a load would fail


@pytest.mark.parametrize("kind", ["full.pt", "sharded"])
@pytest.mark.parametrize("flags", [(), ("--no-optimizer",)])
def test_what_fsdp1_left_becomes_a_full_state_dict(
    flat: Saved, cli: Cli, tmp_path: Path, kind: str, flags: tuple[str, ...]
) -> None:
    """Of which each parameter has a step of its own, in one file, as a script reads it."""
    status, printed = cli(flat.folder / kind, tmp_path / "own.pt", "--to", "fsdp1-full", *flags)
    assert status == 0, printed
    before, after = (torch.load(path, weights_only=True) for path in (flat.folder / "full.pt", tmp_path / "own.pt"))
    assert all(torch.equal(tensor, after["model"][name]) for name, tensor in before["model"].items())
    places = [
        [one["step"].untyped_storage().data_ptr() for one in state.get("optimizer", {"state": {}})["state"].values()]
        for state in (before, after)
    ]
    assert len(set(places[0])) < len(places[0])
    assert len(set(places[1])) == len(places[1]) == (0 if flags else len(places[0]))
    assert kind == "sharded" or "left out: epoch" in printed


def test_weights_alone_go_back(orig: Saved, cli: Cli, tmp_path: Path) -> None:
    assert cli(orig.folder / "full.pt", tmp_path / "out", "--no-optimizer")[0] == 0
    status, printed = cli(tmp_path / "out", tmp_path / "back.pt", "--to", "fsdp1-full")
    assert (status, "optimizer" in printed) == (0, False)
    assert torch.load(tmp_path / "back.pt", weights_only=True).keys() == {"model"}


def test_what_cannot_go_back_is_refused(orig: Saved, cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "back.pt"
    assert "holds no checkpoint that is known" in cli(tmp_path, out, "--to", "fsdp1-full")[1]
    assert list(tmp_path.iterdir()) == []
    assert cli(orig.folder / "full.pt", tmp_path / "out")[0] == 0
    line = cli(tmp_path / "out", out, "--to", "fsdp1-full", "--no-optimizer")[1]
    assert "--no-optimizer with --to fsdp1-full" in line
    assert "--wrap with --to" in cli(orig.folder / "full.pt", out, "--to", "fsdp1-full", "--wrap", "Block")[1]
    given = ("--to", "fsdp1-full", "--optimizer", tmp_path / "optim.pt")
    assert "--optimizer with --to fsdp1-full: has no effect there" in cli("memory://a/b", out, *given)[1]
    shard = tmp_path / "out" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert "differs from what was committed" in cli(tmp_path / "out", out, "--to", "fsdp1-full")[1]
    assert not out.exists()


def _resume(file: str, orig: bool) -> list[float]:
    return resume_fsdp1(file, orig=orig)
