"""README.md beside exported weights: what it says is of this run, and nothing of the machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fsdp2_tools.checkpoint import card
from tests.commands.common import Cli, checkpoint
from tests.harness import Ranks, main_in_ranks, small
from tests.test_resume import metrics_of

pytest.importorskip("transformers", reason="needs the extra hf")


@pytest.fixture(scope="module")
def llama(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("secret-folder")
    (place / "notes.txt").write_text("To be, or not to be. " * 200)
    flags = ["--model=llama", "--model-size=debug", f"--dataset=text:{place}/notes.txt", "--tokenizer=bytes"]
    flags += ["--seq-len=32", "--max-steps=4", "--checkpoint-every=1", "--lr=0.01", "--batch-size=2"]
    flags += ["--ema=0.9", "--keep=9"]
    ranks.run(main_in_ranks, [*small(place / "run"), *flags])
    return place / "run"


def rows_of(text: str) -> dict[str, str]:
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1].strip("`") for row in cells}


@pytest.mark.parametrize("step", [2, 3, None])
def test_it_says_steps_losses_flags_and_versions(llama: Path, tmp_path: Path, cli: Cli, step: int | None) -> None:
    place = llama if step is None else checkpoint(llama, step)
    status, *_ = cli("export", place, tmp_path / "out", "--format", "hf")
    assert status == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n# run\n")
    rows, records = rows_of(text), metrics_of(llama)
    (loss,) = (one["loss"] for one in records if one["kind"] == "train" and one["step"] == (step or 4))
    assert (rows["step"], rows["train loss"]) == (str(step or 4), f"{loss:.4g}")
    evaluated = [one for one in records if one["kind"] == "eval" and one["step"] == (step or 4)]
    assert ("eval perplexity" in rows) == bool(evaluated)
    assert (rows["model"], rows["lr"], rows["dataset"]) == ("llama", "0.01", "text:notes.txt")
    assert rows["torch"] == json.loads((llama / "config.json").read_bytes())["environment"]["torch"]
    assert "seed" not in rows, "what is as by default isn't listed"
    assert "secret" not in text


def test_figures_are_of_the_exported_weights_alone(llama: Path, tmp_path: Path, cli: Cli) -> None:
    """An evaluation before them is of others, as are all of those that an average is made of."""
    lines = [json.loads(line) for line in (llama / "metrics.jsonl").read_text().splitlines()]
    (evaluated,) = [one for one in lines if one["kind"] == "eval"][-1:]
    run = Path(shutil.copytree(llama, tmp_path / "run"))
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [*lines, {**evaluated, "step": 1}]))
    for step, flags, wanted in ((1, [], True), (2, [], False), (1, ["--ema"], False)):
        out = tmp_path / f"{step}{wanted}"
        assert cli("export", checkpoint(run, step), out, "--format", "hf", *flags)[0] == 0
        rows = rows_of((out / "README.md").read_text())
        assert (rows["step"], "eval loss" in rows, "train loss" in rows) == (str(step), wanted, not flags)
        assert rows.get("weights") == ("their moving average" if flags else None)


def test_a_record_that_no_run_writes_is_passed_over(llama: Path, tmp_path: Path, cli: Cli) -> None:
    run = Path(shutil.copytree(llama, tmp_path / "run"))
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "eval"}\n{"kind": "train", "step": 4, "loss": 1' + "0" * 400 + "}\n")
    assert cli("export", run, tmp_path / "out", "--format", "hf")[0] == 0
    rows = rows_of((tmp_path / "out" / "README.md").read_text())
    assert (rows["step"], "train loss" in rows) == ("4", False)


@pytest.mark.parametrize(
    ("flags", "base"),
    [
        ({"model": "hf:owner/na-me.1"}, "owner/na-me.1"),
        ({"model": "hf:owner/name", "init-from": "runs/a"}, None),
        ({"model": "hf:/models/name"}, None),
        ({"model": "hf:a/b\n---\nlicense: mit"}, None),
        ({"model": ["hf:a/b"]}, None),
        ({"model": "llama"}, None),
    ],
)
def test_a_base_is_named_as_the_hub_knows_it(tmp_path: Path, flags: dict[str, Any], base: str | None) -> None:
    for library, relation in (("peft", "adapter"), ("transformers", "finetune")):
        text = card.card(tmp_path, {"flags": flags}, 1, library, "image").decode()
        lines = text.partition("---\n")[2].partition("\n---")[0].splitlines()
        facts = [f"library_name: {library}", "pipeline_tag: image-classification"]
        assert lines == facts + ([f"base_model: {base}", f"base_model_relation: {relation}"] if base else [])


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("hf:/home/me/model/", "hf:model/"),
        ("text:~/a b/notes.txt,../../me/more.txt", "text:notes.txt,more.txt"),
        ("hf:owner/name", "hf:owner/name"),
        ("datasets:https://me:secret@host/a.parquet?Signature=secret", "datasets:https://host/a.parquet"),
        (["/home/me/a"], '["a"]'),
    ],
)
def test_a_path_has_its_last_name_and_a_url_no_secret(given: Any, shown: str) -> None:
    assert card._text(given) == f"`{shown}`"


def test_a_strangers_run_puts_no_markup_into_it(llama: Path, tmp_path: Path, cli: Cli) -> None:
    run = Path(shutil.copytree(llama, tmp_path / "run"))
    said = json.loads((run / "config.json").read_bytes())
    said["flags"]["run-name"] = "a`|<b>\n---\n![](https://there/a.png)" + "x" * 500
    said["environment"] = {"`<i>\n": "of no run", "torch": None, "git": [["<i>`"]] * 1000}
    (run / "config.json").write_text(json.dumps(said))
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 4, "loss": "<b>"}\nno record\n' + "x" * (2 << 20))
    status, *_ = cli("export", run, tmp_path / "out", "--format", "hf")
    assert status == 0
    lines = (tmp_path / "out" / "README.md").read_text().splitlines()
    (named,) = (line for line in lines if "run-name" in line)
    assert named.startswith("| `run-name` | `a'/<b>")
    assert named.count("`") == 4
    assert named.endswith("…` |")
    assert max(map(len, lines)) < 250
    assert lines.count("---") == 2
    assert not any("of no run" in line for line in lines)
    assert not any("train loss" in line for line in lines)
