"""`python -m fsdp2.checkpoint`: look at checkpoints, and take them to other formats and back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from fsdp2 import models
from fsdp2.checkpoint import state
from fsdp2.checkpoint.__main__ import main
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.save import restore
from fsdp2.checkpoint.state import RandomState
from fsdp2.parallel.engine import Engine
from tests.harness import (
    Ranks,
    full_files,
    loss_of,
    losses,
    main_in_ranks,
    make_engine,
    of_kind,
    python_environment,
    same,
)

Events = list[tuple[str, dict[str, Any]]]
Train = Callable[..., Events]


@pytest.fixture(scope="module")
def finished(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("commands") / "run"
    flags = ["--model-size=tiny", f"--run-dir={run}", "--batch-size=16", "--max-steps=6", "--threads=1", "--device=cpu"]
    ranks.run(main_in_ranks, [*flags, "--checkpoint-every=2"])
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def _damage(run: Path) -> None:
    checkpoints = run / "checkpoints"
    (checkpoints / "step-00000002" / "COMMIT.json").unlink()
    shard = checkpoints / "step-00000004" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    shutil.copytree(checkpoints / "step-00000006", checkpoints / "superseded-1-step-00000006")


def test_list_says_what_is_there_and_sound(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _damage(run)
    main(["list", str(run)])
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "dead" in rows["step-00000002"]
    assert "__1_0.distcp has another content than was committed" in rows["step-00000004"]
    assert rows["step-00000006"].endswith("ok")
    assert rows["superseded-1-step-00000006"].endswith("ok")
    main(["list", str(run), "--quick"])
    assert "another content" not in capsys.readouterr().out, "--quick compares sizes alone"


def test_verify_fails_with_the_names_of_what_is_bad(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run)]) == 0
    _damage(run)
    capsys.readouterr()
    assert main(["verify", str(run)]) == 1
    output = capsys.readouterr()
    assert "step-00000004" in output.err
    assert "__1_0.distcp" in output.err
    assert "step-00000006" in output.out
    assert main(["verify", str(run / "checkpoints" / "step-00000006")]) == 0
    (run / "empty").mkdir()
    assert main(["verify", str(run / "empty")]) != 0


def test_show_lists_tensors_and_values(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run / "checkpoints" / "step-00000006")]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert rows["app.model.class_token"][1:] == ["[1,", "1,", "32]", "float32", "128"]
    assert "app.optim.state.class_token.exp_avg" in rows
    assert rows["app.progress.step"] == ["app.progress.step", "=", "6"]


def test_diff_names_what_differs_and_by_how_much(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [str(run / "checkpoints" / f"step-0000000{n}") for n in (4, 6)]
    assert main(["diff", steps[1], steps[1]]) == 0
    assert main(["diff", *steps]) == 1
    assert "app.progress.step" in capsys.readouterr().out
    # The same weights in another form.
    assert main(["diff", steps[1], str(run / "full_model" / "full-model.pt")]) == 0
    weights = full_files(run)[0]
    weights["class_token"] += 0.25
    torch.save(weights, tmp_path / "other.pt")
    capsys.readouterr()
    assert main(["diff", steps[1], str(tmp_path / "other.pt")]) == 1
    output = capsys.readouterr().out
    assert "class_token" in output
    assert "0.25" in output
    assert "conv_proj.weight" not in output


def _read(out: Path, form: str) -> dict[str, torch.Tensor]:
    if form == "pt":
        loaded: dict[str, torch.Tensor] = torch.load(out, weights_only=True)
        return loaded
    if form == "dcp":
        loaded = models.get("vit").build("tiny").state_dict()
        dcp.load(loaded, checkpoint_id=str(out), no_dist=True)
        return loaded
    return {name: tensor for file in sorted(out.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("form", ["pt", "safetensors", "dcp"])
def test_export_has_the_weights_of_the_full_model(run: Path, tmp_path: Path, form: str) -> None:
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--format", form]) == 0
    expected = full_files(run)[0]
    assert same(_read(out, form), expected)
    assert main(["export", str(run), str(out), "--format", form]) == 2, "overwritten"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_export_casts_floating_point(run: Path, tmp_path: Path, form: str) -> None:
    assert main(["export", str(run), str(tmp_path / "out"), "--format", form, "--dtype", "bf16"]) == 0
    expected = {name: tensor.bfloat16() for name, tensor in full_files(run)[0].items()}
    assert same(_read(tmp_path / "out", form), expected)


def test_export_in_several_shards_has_hugging_faces_index(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--format", "safetensors", "--max-shard-size", "20KB"]) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    expected = full_files(run)[0]
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 2
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert {name: load_file(out / file)[name].shape for name, file in index["weight_map"].items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    assert same(_read(out, "safetensors"), expected)


def test_a_damaged_checkpoint_is_not_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _damage(run)
    damaged = run / "checkpoints" / "step-00000004"
    assert main(["export", str(damaged), str(tmp_path / "out"), "--format", "pt"]) == 2
    assert "__1_0.distcp has another content than was committed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["pt", "safetensors", "dcp"])
def test_what_was_exported_is_imported_and_trained_on(run: Path, tmp_path: Path, train: Train, form: str) -> None:
    out, checkpoint = tmp_path / "out", tmp_path / "imported"
    assert main(["export", str(run), str(out), "--format", form]) == 0
    assert main(["import", str(out), str(checkpoint)]) == 0
    assert main(["verify", str(checkpoint)]) == 0
    assert main(["diff", str(checkpoint), str(run / "full_model" / "full-model.pt")]) == 0
    file = run / "full_model" / "full-model.pt"
    expected = losses(train(f"--init-from={file}", run="expected", steps=2))
    assert losses(train(f"--resume={checkpoint}", run="new", steps=2)) == expected
    assert losses(train(f"--resume={checkpoint}", "--resume-partial", run="partial", steps=2)) == expected


class AppState(Stateful):
    """As in the DCP tutorial."""

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model_state_dict, optimizer_state_dict = get_state_dict(self.model, self.optimizer)
        return {"model": model_state_dict, "optim": optimizer_state_dict}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


def _step(engine: Engine) -> float:
    engine.begin_step()
    loss = loss_of(engine)
    engine.backward(loss, last_microbatch=True)
    engine.clip(None)
    engine.step()
    return float(loss)


def _save_as_the_tutorial_does(folder: str) -> list[float]:
    """Two steps, a checkpoint, and the next two losses."""
    engine = make_engine()
    _step(engine)
    _step(engine)
    dcp.save({"app": AppState(engine.model, engine.optimizer)}, checkpoint_id=folder)
    return [_step(engine), _step(engine)]


def _go_on(place: str) -> list[float]:
    engine = make_engine()
    torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=1)  # notes the first learning rate in the optimizer
    parts: dict[str, Any] = {"rng": RandomState(dist.get_rank(), torch.device("cpu"))}
    restore(LocalFiles(place), state.AppState(engine.model, engine.optimizer, parts))
    return [_step(engine), _step(engine)]


def test_checkpoints_of_the_tutorials_come_in_with_their_optimizer(ranks: Ranks, tmp_path: Path, train: Train) -> None:
    expected = ranks.run(_save_as_the_tutorial_does, str(tmp_path / "tutorial"))
    assert main(["import", str(tmp_path / "tutorial"), str(tmp_path / "imported")]) == 0
    assert ranks.run(_go_on, str(tmp_path / "imported")) == expected
    # And a run goes on from it, at step 0.
    events = train(f"--resume={tmp_path / 'imported'}", steps=2)
    assert of_kind(events, "resume")[0]["step"] == 0
    assert [event["step"] for event in of_kind(events, "train")] == [1, 2]


def test_a_hostile_source_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"weight": Payload()}, tmp_path / "evil.pt")
    for command in (["show", str(tmp_path / "evil.pt")], ["import", str(tmp_path / "evil.pt"), str(tmp_path / "out")]):
        assert main(command) == 2
        assert "weights_only refuses it" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["pt", "safetensors", "dcp"])
def test_memory_is_bounded_by_a_tensor_and_not_by_the_model(tmp_path: Path, form: str) -> None:
    """256 MB in 64 tensors are exported with less than 64 MB more than the program itself takes."""
    source = tmp_path / "source.pt"
    torch.save({f"layer{n}.weight": torch.full((1024, 1024), float(n)) for n in range(64)}, source)
    script = textwrap.dedent(
        """
        import sys, threading
        from fsdp2.checkpoint.__main__ import main

        def anonymous():
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

        import torch.distributed.checkpoint  # imported late otherwise
        before, peak, stop = anonymous(), [0], threading.Event()

        def watch():
            while not stop.wait(0.005):
                peak[0] = max(peak[0], anonymous())

        thread = threading.Thread(target=watch)
        thread.start()
        status = main(sys.argv[1:])
        stop.set()
        thread.join()
        print("peak", peak[0] - before, status)
        """
    )
    command = [sys.executable, "-c", script, "export", str(source), str(tmp_path / "out"), "--format", form]
    result = subprocess.run(command, capture_output=True, text=True, env=python_environment(), timeout=240)
    assert result.returncode == 0, result.stderr
    kilobytes, status = map(int, result.stdout.splitlines()[-1].split()[1:])
    assert status == 0
    assert kilobytes < 64 * 1024


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (["list", "nowhere"], "nowhere"),
        (["show", "nowhere.pt"], "nowhere.pt"),
        (["export", "nowhere", "out", "--format", "zip"], "--format"),
        (["export", "nowhere", "s3://bucket/out", "--format", "pt"], "s3://bucket/out"),
        (["import", "nowhere", "out"], "nowhere"),
        ([], "COMMAND"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_line(
    command: list[str], part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
