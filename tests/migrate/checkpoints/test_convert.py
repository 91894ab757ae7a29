"""Checkpoints that real FSDP1 wrote, converted: FSDP2 goes on from them with the losses of FSDP1, bit for bit."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.sources.opening import opened
from fsdp2.checkpoint.store import read_marker, verify
from fsdp2_tools.checkpoint import dcp_write
from fsdp2_tools.checkpoint.__main__ import main as checkpoint_main
from tests.commands.common import change_metadata, read_all
from tests.harness import Ranks, of_kind, same
from tests.migrate.checkpoints.conftest import Cli, Saved
from tests.migrate.checkpoints.fsdp1 import STEPS, resume_fsdp2

Train = Callable[..., Any]


@pytest.mark.parametrize("trained", ["flat", "orig"])
@pytest.mark.parametrize("source", ["full.pt", "ids.pt", "two", "sharded", "app"])
def test_fsdp2_goes_on_bit_for_bit(
    ranks: Ranks, request: pytest.FixtureRequest, cli: Cli, tmp_path: Path, trained: str, source: str
) -> None:
    saved: Saved = request.getfixturevalue(trained)
    out = tmp_path / "out"
    status, printed = cli(saved.folder / source, out)
    assert status == 0, printed
    assert printed.splitlines()[-1].startswith("proven: 32 tensors of the model (")
    assert ", 96 of the optimizer and " in printed
    verify(LocalFiles(out))
    assert read_marker(LocalFiles(out))["step"] == STEPS
    (losses, facts, step), _ = ranks.run(resume_fsdp2, str(out), saved.groups)
    assert losses == saved.losses
    assert step == STEPS
    # The trap: each parameter has its own count of steps, also where FSDP1 had one for all of a unit.
    assert set(facts["steps"].values()) == {float(STEPS)}
    assert facts["own"] == len(facts["steps"]) == 32
    if saved.groups == 2:
        one, other = facts["groups"]
        assert (one["lr"], one["weight_decay"], other["lr"], other["weight_decay"]) == (1e-3, 0.01, 2e-3, 0)
        assert one["betas"] == other["betas"] == (0.8, 0.99)


def test_the_shared_step_is_there_to_be_trapped_by(flat: Saved) -> None:
    state = torch.load(flat.folder / "full.pt", weights_only=True)["optimizer"]["state"]
    assert len({entry["step"].data_ptr() for entry in state.values()}) < len(state)


def test_a_run_goes_on_with_another_number_of_ranks(
    orig: Saved, flat: Saved, cli: Cli, tmp_path: Path, train: Train
) -> None:
    out = tmp_path / "new" / "checkpoints" / f"step-{STEPS:08d}"
    status, printed = cli(flat.folder / "sharded", out)
    assert "in a script of your own: dcp.load({'app': state}" in printed
    assert (status, f"next: torchrun --nproc_per_node 2 -m fsdp2.train --run-dir {tmp_path / 'new'}\n" in printed) == (
        0,
        True,
    )
    events = train(run="new", steps=STEPS + 2, n=3)
    resumed = of_kind(events, "resume")[0]
    assert (resumed["step"], resumed["checkpoint"]) == (STEPS, str(out))
    assert [event["step"] for event in of_kind(events, "train")] == [STEPS + 1, STEPS + 2]
    # Elsewhere, and without an optimizer: a step that nobody knows is 0.
    assert cli(orig.folder / "two" / "model.pt", tmp_path / "weights")[0] == 0
    events = train(f"--resume={tmp_path / 'weights'}", run="other", steps=1)
    assert [event["step"] for event in of_kind(events, "train")] == [1]


def test_what_the_source_lacks_is_said(orig: Saved, cli: Cli, tmp_path: Path) -> None:
    _, printed = cli(orig.folder / "full.pt", tmp_path / "one")
    assert "left out: epoch, 1 entries" in printed
    assert "starts fresh: learning rate schedule, place in the data, random state, scaler" in printed
    assert f"step {STEPS}, as the optimizer counts" in printed
    _, printed = cli(orig.folder / "two" / "model.pt", tmp_path / "two")
    assert "no optimizer is in it: it starts fresh" in printed
    assert "taken out of names: _orig_mod. module." in printed
    assert "step 0, since the optimizer starts fresh" in printed
    _, printed = cli(orig.folder / "ids.pt", tmp_path / "three", "--no-optimizer")
    assert "step 0, since the optimizer starts fresh" in printed, "and not of global_step, which is 7"
    assert "left out: optimizer_states, " in printed


@pytest.mark.parametrize(("key", "step"), [("global_step", 7), ("epoch", None), ("step", True), ("iter_num", -1)])
def test_an_optimizer_that_does_not_count(cli: Cli, tmp_path: Path, key: str, step: int | None) -> None:
    net = nn.Linear(2, 2)
    state = {"model": net.state_dict(), "optimizer": torch.optim.SGD(net.parameters(), lr=0.1).state_dict(), key: step}
    torch.save(state, tmp_path / "m.pt")
    _, printed = cli(tmp_path / "m.pt", tmp_path / "out")
    says = "step 7, as global_step says" if step == 7 else "step 0, since nothing says which"
    assert f"optimizer state of 0 parameters in 1 group; {says}" in printed
    assert read_marker(LocalFiles(tmp_path / "out"))["step"] == (7 if step == 7 else 0)


def test_the_optimizer_can_lie_elsewhere_or_be_numbered_otherwise(orig: Saved, cli: Cli, tmp_path: Path) -> None:
    shutil.copy(orig.folder / "two" / "model.pt", tmp_path / "model.pt")
    assert cli(tmp_path / "model.pt", tmp_path / "one", "--optimizer", orig.folder / "two" / "optim.pt")[0] == 0
    assert cli(orig.folder / "two", tmp_path / "two")[0] == 0
    assert same(read_all(tmp_path / "one"), read_all(tmp_path / "two"))
    assert cli(orig.folder, tmp_path / "three", "--model-key", "full.pt")[0] == 2
    state = torch.load(orig.folder / "full.pt", weights_only=True)
    names = [name for group in state["optimizer"]["param_groups"] for name in group["params"]]
    numbered = {
        "state": {n: state["optimizer"]["state"][name] for n, name in enumerate(names)},
        "param_groups": [
            {**group, "params": [names.index(name) for name in group["params"]]}
            for group in state["optimizer"]["param_groups"]
        ],
    }
    torch.save({"model": state["model"], "optimizer": numbered}, tmp_path / "numbered.pt")
    assert "over 2 groups that share shapes" in cli(tmp_path / "numbered.pt", tmp_path / "four")[1]
    (tmp_path / "names.json").write_text(json.dumps(names))
    listed = ["--optimizer-names", tmp_path / "names.json"]
    assert cli(tmp_path / "numbered.pt", tmp_path / "four", *listed)[0] == 0
    assert same(read_all(tmp_path / "four"), read_all(tmp_path / "two"))


@pytest.mark.parametrize("has_paths", [True, False])
def test_settings_and_steps_of_older_torch_are_taken(cli: Cli, tmp_path: Path, has_paths: bool) -> None:
    """Before torch 2.4 DCP saved a list as one value, before 2.3 its metadata had another class, and where the state
    dict isn't flattened by DCP it notes no paths. Before 1.12 a step was a number."""
    linear = nn.Linear(3, 2)
    shapes = {name: tensor.shape for name, tensor in linear.state_dict().items()}
    optimizer = {f"state.{name}.exp_avg": torch.ones(shape) for name, shape in shapes.items()}
    groups = [{"lr": 0.5, "params": list(shapes)}]
    flat: dict[str, Any] = {f"model.{name}": tensor for name, tensor in linear.state_dict().items()}
    flat |= {f"optim.{name}": tensor for name, tensor in optimizer.items()}
    flat |= {f"optim.state.{name}.step": 5 for name in shapes} | {"optim.param_groups": groups}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(flat, checkpoint_id=tmp_path / "old", planner=planner, no_dist=True)

    def age(metadata: Metadata) -> None:
        paths: dict[str, Any] = {name: tuple(name.split(".", 1)) for name in flat if name.startswith("model.")}
        paths |= {name: ("optim", "state", *name.split(".")[2:]) for name in flat if name.startswith("optim.state.")}
        metadata.planner_data = has_paths and paths | {"optim.param_groups": ("optim", "param_groups")}
        for entry in metadata.state_dict_metadata.values():
            if isinstance(entry, TensorStorageMetadata):
                entry.properties = TensorProperties(dtype=entry.properties.dtype)  # type: ignore[assignment]

    change_metadata(tmp_path / "old", age)
    assert b"sharded_tensor.metadata" in (tmp_path / "old" / ".metadata").read_bytes()
    status, printed = cli(tmp_path / "old", tmp_path / "out")
    assert status == 0, printed
    state = read_all(tmp_path / "out", "app.optim.state.")
    assert {name: tensor.tolist() for name, tensor in state.items() if name.endswith("step")} == {
        "weight.step": 5.0,
        "bias.step": 5.0,
    }
    with opened(str(tmp_path / "out")) as source:
        assert source.read("app.optim.param_groups.0.lr") == 0.5
        assert source.read("app.progress.step") == 5


def test_what_was_written_wrongly_is_found_and_removed(
    orig: Saved, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof reads what lies on disk, and not what it believes to have written."""
    real = dcp_write.spool

    def faulty(tensors: Any, read: Any, folder: Path) -> Any:
        spooled = real(tensors, read, folder)
        spooled["app.optim.state.class_token.exp_avg"][0] += 1
        return spooled

    monkeypatch.setattr(dcp_write, "spool", faulty)
    status, printed = cli(orig.folder / "full.pt", tmp_path / "out")
    assert (status, printed) == (1, "differs: app.optim.state.class_token.exp_avg differs\n")
    assert list(tmp_path.iterdir()) == []


def test_settings_that_an_older_torch_did_not_have_are_the_runs_own(
    orig: Saved, cli: Cli, tmp_path: Path, train: Train
) -> None:
    """Torch's own `load_state_dict` fills them in likewise. A learning rate that is missing is no such setting."""
    state = torch.load(orig.folder / "full.pt", weights_only=True)
    one, other = state["optimizer"]["param_groups"]
    group = {**one, "params": one["params"] + other["params"]}
    for key in ("decoupled_weight_decay", "fused"):
        del group[key]
    state["optimizer"]["param_groups"] = [group]
    torch.save(state, tmp_path / "older.pt")
    assert cli(tmp_path / "older.pt", tmp_path / "out")[0] == 0
    events = train(f"--resume={tmp_path / 'out'}", steps=STEPS + 1)
    assert [event["step"] for event in of_kind(events, "train")] == [STEPS + 1]
    del group["lr"]
    torch.save(state, tmp_path / "without.pt")
    assert cli(tmp_path / "without.pt", tmp_path / "without")[0] == 0
    message = ranks_message(train, f"--resume={tmp_path / 'without'}")
    assert "app.optim.param_groups.0.lr: not in the checkpoint" in message


def ranks_message(train: Train, *flags: str) -> str:
    """What a run fails with."""
    with pytest.raises(pytest.fail.Exception) as caught:
        train(*flags, run="failing", steps=STEPS + 1)
    return str(caught.value)


def test_what_lies_beside_a_model_is_told_apart(orig: Saved, cli: Cli, tmp_path: Path) -> None:
    """A trainer's folder: its arguments are an object, its random state has tensors, and rank 0's file is whole."""
    source = tmp_path / "checkpoint-3"
    source.mkdir()
    shutil.copy(orig.folder / "full.pt", source / "ep1-ba3-rank0.pt")
    torch.save(argparse.Namespace(lr=1), source / "training_args.bin")
    torch.save({"python": (3, (1, 2), None), "cpu": torch.get_rng_state()}, source / "rng_state_0.pth")
    torch.save({"last_epoch": 3}, source / "scheduler.pt")
    (source / "trainer_state.json").write_text("{}")
    status, printed = cli(source, tmp_path / "out")
    assert status == 0, printed
    for line in ("training_args.bin", "trainer_state.json", "rng_state_0.pth: cpu, 1 entries"):
        assert f"left out: {line}\n" in printed
    assert cli(source / "ep1-ba3-rank0.pt", tmp_path / "again")[0] == 0
    assert same(read_all(tmp_path / "out"), read_all(tmp_path / "again"))
    # A file that can't be read may be the one that matters.
    (source / "optimizer.pt").write_bytes((source / "ep1-ba3-rank0.pt").read_bytes()[:5000])
    assert "optimizer.pt: can't be loaded" in cli(source, tmp_path / "third")[1]


def test_numbers_are_said_to_be_taken_in_order(flat: Saved, cli: Cli, tmp_path: Path) -> None:
    _, printed = cli(flat.folder / "ids.pt", tmp_path / "out")
    assert (
        "the optimizer's numbers were taken in the order of model.parameters(), with which all shapes agree" in printed
    )
    assert "the optimizer's numbers" not in cli(flat.folder / "full.pt", tmp_path / "named")[1]


@pytest.mark.parametrize("size", ["4GB", "30kB"])
def test_safetensors_beside_an_optimizer(orig: Saved, cli: Cli, tmp_path: Path, size: str) -> None:
    source = tmp_path / "source"
    exported = ["export", str(orig.folder / "two" / "model.pt"), str(source), "--format=safetensors"]
    assert checkpoint_main([*exported, f"--max-shard-size={size}"]) == 0
    assert (len(list(source.glob("*.safetensors"))) > 1) == (size != "4GB")
    shutil.copy(orig.folder / "two" / "optim.pt", source / "optimizer.bin")
    status, printed = cli(source, tmp_path / "out")
    assert status == 0, printed
    assert cli(orig.folder / "two", tmp_path / "expected")[0] == 0
    assert same(read_all(tmp_path / "out"), read_all(tmp_path / "expected"))
