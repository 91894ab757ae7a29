"""import: what other programs and earlier exports have written goes into training."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from fsdp2 import models, train
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.full_dtensor import full_model_state, full_optimizer_state
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.restore import restore
from fsdp2.checkpoint.state import AppState as OurState
from fsdp2.checkpoint.state import RandomState
from fsdp2.checkpoint.store import HASH, DamagedCheckpoint, fingerprint, read_marker
from fsdp2.config import parse
from fsdp2_tools.checkpoint import import_ as module
from fsdp2_tools.checkpoint.__main__ import main
from fsdp2_tools.checkpoint.import_ import import_
from tests.commands.common import FORMATS, State, checkpoint, read_all, write
from tests.harness import FROM_NOTHING, Ranks, losses, make_engine, of_kind, one_step, same, small
from tests.hostile.common import change_values, resume

Events = list[tuple[str, dict[str, Any]]]
Train = Callable[..., Events]


@pytest.mark.parametrize("form", [*FORMATS, "full-model.pt", "nested", "nested dcp", "checkpoint"])
def test_weights_come_in_from_every_format(finished: Path, full: State, tmp_path: Path, form: str) -> None:
    source = tmp_path / "source"
    if form in FORMATS:
        write(finished, source, form)
    elif form == "full-model.pt":
        source = finished / "full_model" / form
    elif form == "nested":
        torch.save({"model": full, "epoch": 3}, source)
    elif form == "nested dcp":
        dcp.save({"model": full, "epoch": 3}, checkpoint_id=source)
    else:
        source = checkpoint(finished)
    out = tmp_path / "run" / "checkpoints" / "step-00000000"
    lines = import_(str(source), str(out))
    assert ("left out: epoch, 1 entries" in lines) == form.startswith("nested")
    assert ("left out: app.rng, 10 entries" in lines) == (form == "checkpoint")
    files = LocalFiles(out)
    marker = read_marker(files)
    assert {
        "step": 0,
        "world_size": 1,
        "mesh": {"replicate": 1, "shard": 1},
        "imported": True,
        "config": {},
    }.items() <= (marker.items())
    assert marker["source"] == source.name
    assert marker["model"] == {name: list(tensor.shape) for name, tensor in full.items()}
    assert marker["environment"] == {"torch": torch.__version__}
    assert marker["files"] == {name: fingerprint(files, name) for name in (".metadata", "__0_0.distcp")}
    assert main(["verify", str(out.parent.parent)]) == 0
    state = read_all(out, "app.model.")
    assert same({name: state[name] for name in full}, full)
    has_optimizer = any(name.startswith("app.optim.") for name in state)
    assert has_optimizer == (form == "checkpoint")


class AppState(Stateful):
    """The tutorials' own, as they have it."""

    def __init__(self, model: Any, optimizer: Any = None, epoch: Any = None) -> None:
        self.model = model
        self.optimizer = optimizer
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        model_state_dict, optimizer_state_dict = get_state_dict(self.model, self.optimizer)
        return {"model": model_state_dict, "optim": optimizer_state_dict, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def _tutorial(folder: str) -> tuple[State, dict[str, Any]]:
    """Train three steps as the tutorials do and save as they do; full model and optimizer on rank 0."""
    torch.manual_seed(7)
    spec = models.get("vit")
    model = spec.build("tiny")
    for block in spec.blocks(model):
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for _ in range(3):
        nn.functional.cross_entropy(model(torch.randn(8, 1, 28, 28)), torch.arange(8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save({"app": AppState(model, optimizer, epoch=2)}, checkpoint_id=folder)
    return full_model_state(model), full_optimizer_state(model, optimizer)


@pytest.fixture(scope="module")
def tutorial(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tutorial") / "checkpoint_000000"
    return folder, *ranks.run(_tutorial, str(folder))[0]


def _started(flags: list[str]) -> tuple[Events, State, dict[str, Any]]:
    """Train; the events, and the full model and optimizer as they were before the first step, on rank 0."""
    states: list[Any] = []
    real = train.resume

    def spy(job: Any, app: Any, average: Any, *, hashes: bool = True) -> Any:
        result = real(job, app, average, hashes=hashes)
        # What isn't sharded is in there itself, and would change.
        states.extend(copy.deepcopy([full_model_state(app.model), full_optimizer_state(app.model, app.optimizer)]))
        return result

    events: Events = []
    train.resume = spy
    try:
        train.main(parse(flags), lambda kind, data: events.append((kind, data)))
    finally:
        train.resume = real
    model, optimizer = states
    return events, model, optimizer


@pytest.mark.parametrize("where", ["elsewhere", "in the run"])
def test_training_starts_from_a_tutorials_checkpoint(
    ranks: Ranks, tutorial: tuple[Path, State, dict[str, Any]], tmp_path: Path, where: str
) -> None:
    folder, model, optimizer = tutorial
    run = tmp_path / "run"
    out = run / "checkpoints" / "step-00000000" if where == "in the run" else tmp_path / "imported"
    lines = import_(str(folder), str(out))
    assert lines[0] == f"wrote {out}: 32 tensors of a model and its optimizer"
    assert lines[2:] == ["left out: app.epoch, 1 entries"]
    resume = [] if where == "in the run" else [f"--resume={out}"]
    events, started, start_optimizer = ranks.run(_started, small(run, "--max-steps=1", *resume))[0]
    assert of_kind(events, "resume")[0]["checkpoint"] == str(out)
    assert of_kind(events, "end")[0]["step"] == 1
    assert same(started, model)
    assert same(start_optimizer["state"], optimizer["state"])
    assert float(start_optimizer["state"]["class_token"]["step"]) == 3
    ours, theirs = start_optimizer["param_groups"][0], optimizer["param_groups"][0]
    # How it computes is this machine's; its scheduler's first rate is the one it came with.
    assert {**ours, "foreach": theirs["foreach"]} == {**theirs, "initial_lr": 0.005}


def test_weights_alone_start_with_a_fresh_optimizer(ranks: Ranks, finished: Path, full: State, tmp_path: Path) -> None:
    out = tmp_path / "imported"
    import_(str(finished / "full_model" / "full-model.pt"), str(out))
    _, started, optimizer = ranks.run(_started, small(tmp_path / "run", "--max-steps=1", f"--resume={out}"))[0]
    assert same(started, full)
    assert {float(state["step"]) for state in optimizer["state"].values()} == {0.0}


def test_a_partial_resume_takes_the_tutorials_weights(
    ranks: Ranks, tutorial: tuple[Path, State, dict[str, Any]], tmp_path: Path
) -> None:
    folder, model, _ = tutorial
    out = tmp_path / "imported"
    import_(str(folder), str(out))
    line = small(tmp_path / "run", "--max-steps=1", f"--resume={out}", "--resume-partial")
    events, started, optimizer = ranks.run(_started, line)[0]
    start = of_kind(events, "start")[0]
    assert start["loaded"] == 32
    assert [text.split(":")[0] for text in start["left_out"]] == ["optim"]
    assert same(started, model)
    assert {float(state["step"]) for state in optimizer["state"].values()} == {0.0}


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (lambda opt: opt.state_dict(), "optimizer has state of '0', which names no weight"),
        (lambda opt: {"lr": 0.1}, "optimizer is not as get_state_dict gives it: lr is in it"),
    ],
)
def test_an_optimizer_without_names_is_left_out_and_said(
    tmp_path: Path, optimizer: Callable[[torch.optim.Optimizer], Any], reason: str
) -> None:
    model = nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    adam.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer(adam)}, tmp_path / "m.pt")
    lines = import_(str(tmp_path / "m.pt"), str(tmp_path / "out"))
    assert lines[0].endswith("2 tensors of a model")
    assert lines[2].startswith(f"left out: {reason}")
    assert lines[3].startswith("left out: optimizer, ")
    assert read_all(tmp_path / "out").keys() == {"app.model.weight", "app.model.bias"}


def test_other_precisions_come_in_with_a_hint(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2, dtype=torch.bfloat16), "n": torch.zeros(1, dtype=torch.int64)}, tmp_path / "m.pt")
    lines = import_(str(tmp_path / "m.pt"), str(tmp_path / "out"))
    assert any(line.startswith("1 tensors are torch.bfloat16") and "export --dtype fp32" in line for line in lines)


def test_a_source_that_is_damaged_or_taken_is_refused(finished: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(checkpoint(finished), tmp_path / "copy"))
    (damaged / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(DamagedCheckpoint, match="has 0 bytes and not"):
        import_(str(damaged), str(tmp_path / "out"))
    with pytest.raises(Refused, match="exists; nothing is overwritten"):
        import_(str(finished), str(damaged))
    assert sorted(os.listdir(tmp_path)) == ["copy"]
    assert HASH in read_marker(LocalFiles(checkpoint(finished)))


def test_what_comes_to_the_place_before_an_import_writes_stays(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, out = module.write_imported, tmp_path / "out"

    def meanwhile(target: Path, *arguments: Any, **more: Any) -> Any:
        target.mkdir()
        (target / "mine").touch()
        return real(target, *arguments, **more)

    monkeypatch.setattr(module, "write_imported", meanwhile)
    with pytest.raises(Refused, match=r"out: exists; another process is writing there"):
        import_(str(finished), str(out))
    assert os.listdir(out) == ["mine"]


def test_what_was_exported_is_imported_and_trained_on(finished: Path, tmp_path: Path, train: Train) -> None:
    imported = tmp_path / "imported"
    import_(str(write(finished, tmp_path / "out", "sharded")), str(imported))
    weights = f"--init-from={finished / 'full_model' / 'full-model.pt'}"
    expected = losses(train("--optimizer=adam", *FROM_NOTHING, weights, run="expected", steps=2))
    assert losses(train(f"--resume={imported}", run="new", steps=2)) == expected
    assert losses(train(f"--resume={imported}", "--resume-partial", run="partial", steps=2)) == expected


@pytest.mark.parametrize(
    ("setting", "value", "part"),
    [
        ("betas", (2.0, -1.0), "an optimizer with its settings can't be made (Invalid beta parameter at index 0: 2.0)"),
        ("weight_decay", 10**400, "an optimizer with its settings can't be made (int too large to convert to float)"),
        ("amsgrad", True, "its optimizer has amsgrad True, and no state for that"),
        ("capturable", True, None),  # for a GPU alone
        ("differentiable", True, None),
    ],
)
def test_settings_of_an_import_with_which_no_step_is_made(
    ranks: Ranks, tmp_path: Path, setting: str, value: Any, part: str | None
) -> None:
    ranks.run(_save_as_the_tutorial_does, str(tmp_path / "tutorial"))
    imported = tmp_path / "run" / "checkpoints" / "step-00000000"
    assert main(["import", str(tmp_path / "tutorial"), str(imported)]) == 0
    change_values(
        LocalFiles(imported),
        lambda state: state.update({name: value for name in state if name.endswith(f".{setting}")}),
    )
    for (answer,) in ranks.run(resume, str(tmp_path / "run")):
        assert (
            answer == "resumed" if part is None else (answer.startswith("ConfigError: --resume: ") and part in answer)
        )


def _save_as_the_tutorial_does(folder: str) -> list[float]:
    """Two steps, a checkpoint, and the next two losses."""
    engine = make_engine()
    one_step(engine)
    one_step(engine)
    dcp.save({"app": AppState(engine.model, engine.optimizer)}, checkpoint_id=folder)
    return [one_step(engine), one_step(engine)]


def _go_on(place: str) -> list[float]:
    engine = make_engine()
    torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=1)  # notes the first learning rate in the optimizer
    parts: dict[str, Any] = {"rng": RandomState(dist.get_rank(), torch.device("cpu"))}
    restore(LocalFiles(place), OurState(engine.model, engine.optimizer, parts))
    return [one_step(engine), one_step(engine)]


def test_checkpoints_of_the_tutorials_come_in_with_their_optimizer(ranks: Ranks, tmp_path: Path, train: Train) -> None:
    expected = ranks.run(_save_as_the_tutorial_does, str(tmp_path / "tutorial"))
    assert main(["import", str(tmp_path / "tutorial"), str(tmp_path / "imported")]) == 0
    assert ranks.run(_go_on, str(tmp_path / "imported")) == expected
    # And a run goes on from it, at step 0. What it has of the optimizer counts, and that is said.
    assert of_kind(train(f"--resume={tmp_path / 'imported'}", steps=1, run="same"), "resume")[0]["note"] is None
    events = train(f"--resume={tmp_path / 'imported'}", "--lr=0.5", "--betas=0.5,0.6", steps=2)
    (begun,) = of_kind(events, "resume")
    assert begun["step"] == 0
    assert "import's settings of the optimizer count, not the flags': betas [0.9, 0.999]" in begun["note"]
    assert "--schedule step goes on from the checkpoint's learning rate 0.001" in begun["note"]
    assert [event["step"] for event in of_kind(events, "train")] == [1, 2]
    # That run's own checkpoints have them too, so it goes on as if it hadn't ended.
    flags = "--lr=0.5", "--betas=0.5,0.6", "--global-batch-size=128"
    whole = losses(train(f"--resume={tmp_path / 'imported'}", *flags, steps=3, run="whole"))
    train(f"--resume={tmp_path / 'imported'}", *flags, steps=2, run="parts")
    on = train(*flags, steps=3, run="parts")
    assert "not the flags': betas [0.9, 0.999]" in of_kind(on, "resume")[0]["note"]
    assert losses(on) == whole[2:]


@pytest.mark.parametrize(
    "names",
    [
        ["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "model.layers.0.q.lora_B.weight"],
        ["base_model.model.model.layers.0.mlp.down_proj.ia3_l"],
        ["model.layers.0.mlp.down_proj.ia3_l.default", "model.layers.0.mlp.down_proj.base_layer.weight"],
    ],
    ids=["lora", "ia3", "ia3 in its model"],
)
def test_adapters_are_refused(names: list[str], tmp_path: Path) -> None:
    """No run could resume from them: it takes adapters from its own checkpoints, which know their base."""
    torch.save({name: torch.zeros(2, 8) for name in names}, tmp_path / "adapters.pt")
    with pytest.raises(Refused, match=r"adapters\.pt: holds adapters, .*merge them with peft"):
        import_(str(tmp_path / "adapters.pt"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
