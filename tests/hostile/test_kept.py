"""What decides what weights mean is hashed beside them: a changed config.json or tokenizer is never used in silence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fsdp2 import infer, models
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.store import HASH, read_marker, write_marker
from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.run.directory.rundir import RunDir, read_config
from fsdp2.train import main as train
from fsdp2_tools.checkpoint.__main__ import main as checkpoint
from tests.harness import of_kind
from tests.others.common import flags, save

pytest.importorskip("transformers")


def _line(model: str, run: Path, steps: int, *more: str) -> list[str]:
    return [*flags(model, run, "--dataset=random-tokens", "--strategy=none", f"--max-steps={steps}"), *more]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a run of it, `model` and `run`, that tests copy."""
    place = tmp_path_factory.mktemp("kept")
    model = save("llama", place / "model", use_cache=True)
    (place / "model" / "tokenizer_config.json").write_text("{}")
    train(parse(_line(model, place / "run", 1)))
    return place


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished / "run", tmp_path / "run"))


def _change(run: Path) -> None:
    file = run / "model" / "config.json"
    content = json.loads(file.read_text())
    content["rms_norm_eps"] = 0.5  # of the same shapes
    file.write_text(json.dumps(content))


def _add(run: Path) -> None:
    (run / "model" / "chat_template.jinja").write_text("{{ messages }}")


def _remove(run: Path) -> None:
    (run / "model" / "tokenizer_config.json").unlink()


# In save's model four heads of 8 numbers ask two; here two heads of 16 ask one, by weights of the same shapes.
HALF_THE_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
CHANGES = {"config.json": _change, "chat_template.jinja": _add, "tokenizer_config.json": _remove}


def test_a_run_whose_model_was_changed_is_neither_exported_nor_used(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "unchanged"
    assert checkpoint(["export", str(run), str(out), "--format", "hf"]) == 0
    # Generating needs the keys and values that training is without.
    for file in out.glob("*config.json"):
        assert json.loads(file.read_text()).get("use_cache", True) is True
    for name, change in CHANGES.items():
        changed = Path(shutil.copytree(run, tmp_path / name))
        change(changed)
        for place in (changed, changed / "full_model" / "full-model.pt"):
            assert checkpoint(["export", str(place), str(changed / "out"), "--format", "hf"]) == 2
            assert f"model/{name}: isn't as it was when the weights were saved" in capsys.readouterr().err
            assert not (changed / "out").exists()
        with pytest.raises(ConfigError, match=rf"model/{name}: isn't as it was when the weights were saved"):
            infer.main(changed)


def test_a_run_of_before_has_no_such_hashes(run: Path) -> None:
    for folder in (LocalFiles(run / "full_model"), LocalFiles(run / "checkpoints" / "step-00000001")):
        marker = {key: value for key, value in read_marker(folder).items() if key not in (HASH, "kept")}
        write_marker(folder, marker)
        assert "kept" not in read_marker(folder)
    _change(run)
    assert checkpoint(["export", str(run), str(run / "out"), "--format", "hf"]) == 0


def test_a_resume_says_what_has_changed(finished: Path, run: Path) -> None:
    model = Path(shutil.copytree(finished / "model", run.parent / "model"))

    def note(steps: int) -> Any:
        events: list[tuple[str, dict[str, Any]]] = []
        train(parse(_line(f"hf:{model}", run, steps)), lambda kind, data: events.append((kind, data)))
        return of_kind(events, "resume")[0]["note"]

    assert note(2) is None  # the same files, wherever they lie
    (model / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    assert note(3) == f"since the checkpoint tokenizer_config.json of hf:{model} changed"


def test_equal_shapes_of_another_meaning_are_not_trained_on(finished: Path, run: Path) -> None:
    model = Path(shutil.copytree(finished / "model", run.parent / "model"))
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | HALF_THE_HEADS))
    with pytest.raises(ConfigError, match=r"config.json of --model .* isn't as it was for .*heads.*--init-from"):
        train(parse(_line(f"hf:{model}", run, 2)))
    notes: list[Any] = []
    for weights in (finished / "model", run / "checkpoints" / "step-00000001"):
        line = _line(f"hf:{model}", run.parent / f"from-{weights.name}", 1, f"--init-from={weights}")
        train(parse(line), lambda kind, data: notes.append((kind, data)))
    assert str(notes).count("config.json there isn't the model's") == 2


def test_inference_reads_the_description_that_the_run_keeps(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so asks neither a folder that may have changed since nor a hub."""
    content = json.loads((run / "config.json").read_text())
    content["flags"]["model"] = "hf:nobody/nothing"
    (run / "config.json").write_text(json.dumps(content))
    assert read_config(RunDir(run)).model == f"hf:{run}/model"
    assert infer.main(run)["count"] > 0
    # Training reads weights, which the run doesn't keep there, and asks the hub for them if it is named.
    with pytest.raises(ConfigError, match=r"its model is on a hub, hf:nobody/nothing, .* add --model hf:nobody/noth"):
        parse([f"--config={run}/config.json"])
    asked: list[str] = []
    monkeypatch.setattr(models, "get", lambda name, **_: asked.append(name))
    with pytest.raises(Exception):  # noqa: B017, PT011  (there is no model)
        parse([f"--config={run}/config.json", "--model=hf:nobody/nothing"])
    assert asked[0] == "hf:nobody/nothing"


def test_a_file_that_a_link_leads_out_to_is_not_kept(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("secret")
    model = Path(shutil.copytree(finished / "model", tmp_path / "model"))
    (model / "vocab_more").symlink_to(tmp_path / "private")
    with pytest.raises(ConfigError, match=r"vocab_more: is a link out of the folder, and each run keeps it; put its"):
        parse([f"--model=hf:{model}"])
    # What the hub's cache has is links into its own folder beside.
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(finished.glob("model/*"))):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", str(number)))
    assert "config.json" in parse([f"--model=hf:{snapshot}"]).spec.files("own")
