"""Files that describe adapters: which of them counts, what is refused, and a base that has changed since."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2 import infer
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.store import HASH, read_marker, write_marker
from fsdp2.options.errors import ConfigError
from fsdp2_tools.checkpoint.__main__ import main as checkpoint_command
from tests.harness import Ranks, main_in_ranks
from tests.hostile.common import change_values
from tests.test_lora import LLAMA, peft
from tests.test_lora import adapters as adapters
from tests.test_lora import base as base
from tests.test_lora import trained as trained

CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "a scale of its own": (
        {"lora_alpha": 9.0},
        "says lora_alpha 9.0, and COMMIT.json of the checkpoint 8.0",
    ),
    "a rank of its own": ({"r": 8}, "of its run says r 8, and COMMIT.json of the checkpoint 4"),
    "turned over": ({"fan_in_fan_out": True}, "says fan_in_fan_out True, and COMMIT.json of the checkpoint False"),
    "a scale of 1e30": ({"lora_alpha": 1e30}, "lora_alpha is no number above 0, and up to 1000000"),
    "no number": ({"lora_alpha": float("nan")}, "lora_alpha is no number above 0"),
    "endless": ({"lora_alpha": float("inf")}, "lora_alpha is no number above 0"),
    "negative": ({"lora_alpha": -8.0}, "lora_alpha is no number above 0"),
    "true": ({"lora_alpha": True}, "lora_alpha is no number above 0"),
    "text": ({"lora_alpha": "8"}, "lora_alpha is no number above 0"),
    "no rank": ({"r": 0}, "r is no whole number from 1 to 1000000"),
    "half a rank": ({"r": 0.5}, "r is no whole number from 1 to 1000000"),
    "a base that is no text": ({"base_model_name_or_path": "\ud800"}, "base_model_name_or_path is no name"),
    "a task that peft has for no language": ({"task_type": "SEQ_CLS"}, "task_type is none of CAUSAL_LM, SEQ_2_SEQ_LM"),
    "a base with a NUL": ({"base_model_name_or_path": "a\0b"}, "base_model_name_or_path is no name"),
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("earlier", [False, True])
def test_adapters_count_as_their_checkpoint_says(
    adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, earlier: bool
) -> None:
    changed, reason = CHANGES[kind]
    if earlier and kind == "turned over":
        return  # the flags, which are all that such a marker has, don't say it
    run = Path(shutil.copytree(adapters, tmp_path / "run"))
    if earlier:
        _as_before(run)
    file = run / "model" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    for form in ("hf", "peft", "pt"):
        assert checkpoint_command(["export", str(run), str(tmp_path / "out"), f"--format={form}"]) == 2
        out, line = capsys.readouterr()
        assert (out, line.count("\n"), reason in line) == ("", 1, True), line
        assert not (tmp_path / "out").exists()


def test_a_task_that_peft_reads_is_no_other_meaning(adapters: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(adapters, tmp_path / "run"))
    file = run / "model" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "task_type": "CAUSAL_LM"}))
    assert checkpoint_command(["export", str(run), str(tmp_path / "out"), "--format=pt"]) == 0


def test_a_base_at_a_url_is_opened_only_by_name(
    adapters: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(adapters, tmp_path / "run"))
    file = run / "model" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "s3://a-place/of/theirs"}))
    words = ["export", str(run), str(tmp_path / "out"), "--format=hf"]
    assert checkpoint_command(words) == 2
    assert capsys.readouterr().err.endswith("if you trust that, add --base s3://a-place/of/theirs\n")
    assert checkpoint_command([*words, f"--base={base}"]) == 0


def _as_before(run: Path) -> None:
    """A marker of the version that kept the flags alone."""
    for folder in (run / "checkpoints").iterdir():
        marker = read_marker(LocalFiles(folder))
        assert marker.pop("adapters")["lora_alpha"] == 8.0
        write_marker(LocalFiles(folder), {key: value for key, value in marker.items() if key != HASH})


def _settings() -> dict[str, Any]:
    """Each setting that peft has for adapters beside those of a run, with a value that it hasn't by default."""
    others = {bool: True, float: 0.5, int: 8, dict: {"q_proj": 2}, type(None): [0]}
    own = {"base_model_name_or_path", "fan_in_fan_out", "r", "lora_alpha", "inference_mode", "peft_version"}
    own |= {"lora_dropout"}  # which no merged weight depends on
    found = {key: others.get(type(value), "x") for key, value in peft.LoraConfig().to_dict().items() if key not in own}
    more = {"layers_to_transform": 0, "target_modules": "all-linear", "layers_pattern": "layers", "bias": "lora_only"}
    return {**found, **more, "init_lora_weights": "pissa", "lora_dropout": 1.0}


@pytest.mark.parametrize("by", ["file", "marker", "both"])
def test_a_setting_by_which_adapters_mean_something_else_is_refused(
    adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    """peft would take them otherwise, and nothing else tells which was meant: no hash covers the file."""
    run = Path(shutil.copytree(adapters, tmp_path / "run"))
    file, folder = run / "model" / "adapter_config.json", LocalFiles(run / "checkpoints" / "step-00000006")
    was, marker = json.loads(file.read_text()), {k: v for k, v in read_marker(folder).items() if k != HASH}
    assert len(_settings()) > 20
    for key, value in _settings().items():
        if by != "marker":
            file.write_text(json.dumps({**was, key: value}))
        elif key != "target_modules":  # which then differs
            file.write_text(json.dumps({name: one for name, one in was.items() if name != key}))
        if by != "file":
            write_marker(folder, {**marker, "adapters": {**was, key: value}})
        for form in ("hf", "peft", "pt"):
            assert checkpoint_command(["export", str(run), str(tmp_path / "out"), f"--format={form}"]) == 2, key
            out, line = capsys.readouterr()
            assert (out, line.count("\n"), f" {key}" in line) == ("", 1, True), line
    assert not (tmp_path / "out").exists()


def _of(name: str, half: str) -> bool:
    return name.startswith("app.model.") and half in name


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "gone": (Path.unlink, ""),
    "a pipe": (lambda path: [make(path) for make in (Path.unlink, os.mkfifo)], "is not a regular file"),
    "terabytes": (lambda path: os.truncate(path, 2 << 40), "has more than 16 MiB"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_description_that_is_gone_is_the_markers(
    adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """The adapters alone were exported as the model's weights."""
    run = Path(shutil.copytree(adapters, tmp_path / "run"))
    change, reason = FILES[kind]
    change(run / "model" / "adapter_config.json")
    checkpoint = run / "checkpoints" / "step-00000006"
    for form in ("pt", "peft"):
        for source, out in ((adapters, tmp_path / form), (run, tmp_path / f"{form}-changed")):
            status = checkpoint_command(["export", str(source), str(out), f"--format={form}"])
            line = capsys.readouterr().err
            assert (status, out.exists()) == ((2, False) if reason and source == run else (0, True))
            assert reason in line or source == adapters
    if kind == "gone":
        assert torch.load(tmp_path / "pt").keys() == torch.load(tmp_path / "pt-changed").keys()
        description = [(tmp_path / name / "adapter_config.json").read_bytes() for name in ("peft", "peft-changed")]
        assert json.loads(description[0]) == json.loads(description[1])
        (checkpoint / "COMMIT.json").unlink()
        checkpoint.rename(tmp_path / "alone")
        assert checkpoint_command(["export", str(tmp_path / "alone"), str(tmp_path / "out"), "--format=pt"]) == 2
        assert "holds adapters, and no adapter_config.json of a run beside it" in capsys.readouterr().err


TENSORS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another rank": (lambda s: s.update({n: one[:2] for n, one in s.items() if _of(n, "lora_A")}), "and r is 4"),
    "one half": (lambda s: s.pop(next(n for n in s if _of(n, "lora_B"))), "and r is 4"),
    "a whole weight": (lambda s: s.update({"app.model.lm_head.weight": torch.ones(2, 2)}), "lm_head.weight is no half"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_the_description_does_not_name_are_refused(
    adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    run = Path(shutil.copytree(adapters, tmp_path / "run"))
    change, reason = TENSORS[kind]
    change_values(LocalFiles(run / "checkpoints" / "step-00000006"), change)
    for form in ("peft", "pt"):
        assert checkpoint_command(["export", str(run), str(tmp_path / "out"), f"--format={form}"]) == 2
        line = capsys.readouterr().err
        assert "its tensors aren't the adapters that adapter_config.json describes: " in line
        assert reason in line


def test_a_base_that_has_changed_since_is_neither_merged_nor_used(
    ranks: Ranks, base: Path, adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it does where the run that it is of goes on."""
    place, run = Path(shutil.copytree(base, tmp_path / "base")), Path(shutil.copytree(adapters, tmp_path / "run"))
    for file in (run / "config.json", run / "model" / "adapter_config.json"):
        file.write_text(file.read_text().replace(str(base), str(place)))
    assert checkpoint_command(["export", str(run), str(tmp_path / "before"), "--format=pt"]) == 0
    assert infer.main(run)["count"] > 0
    ranks.run(main_in_ranks, [*LLAMA, f"--run-dir={place}", "--max-steps=4"])
    assert checkpoint_command(["export", str(run), str(tmp_path / "after"), "--format=pt"]) == 2
    assert f"its adapters go beside the weights that {place}" in capsys.readouterr().err
    assert checkpoint_command(["export", str(run), str(tmp_path / "peft"), "--format=peft"]) == 0
    with pytest.raises(ConfigError, match="its adapters go beside the weights of"):
        infer.main(run)


def test_inference_refuses_another_scale_than_the_checkpoints(adapters: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(adapters, tmp_path / "run"))
    content = json.loads((run / "config.json").read_text())
    content["flags"]["lora-alpha"] = 1000.0
    (run / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"was made with --lora-alpha None, and the run's config\.json says 1000\.0"):
        infer.main(run)
