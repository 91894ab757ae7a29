"""`--eval-dataset`: a set of one's own is evaluated, and all of `--dataset` is trained on; `--eval-every` steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F

from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.options.own_model import code_flags, require_named
from fsdp2.run.dataset import open_data
from fsdp2.run.preflight import check_data
from fsdp2_tools.data import __main__ as command
from tests.harness import Ranks, losses, main_in_ranks, of_kind, refusal_in_ranks
from tests.test_chat import PLAIN, make_tokenizer, talk
from tests.test_text import LLAMA, documents

LENGTH = 8


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Documents to train on, of which some would be in the test split, and one to evaluate."""
    train, test = tmp_path / "train.jsonl", tmp_path / "test.txt"
    train.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents(60)))
    test.write_text("To be, or not to be: that is the question. " * 9)
    return train, test


def flags_of(files: tuple[Path, Path]) -> list[str]:
    return [*LLAMA, f"--dataset=text:{files[0]}", f"--eval-dataset=text:{files[1]}", "--batch-size=3"]


def _by_hand(weights: Path, file: Path) -> dict[str, Any]:
    """The evaluation in plain torch: a window at a time, of bytes that are cut here."""
    model = parse(LLAMA).spec.build("debug")
    model.load_state_dict(torch.load(weights, weights_only=True))
    tokens = torch.tensor(list(file.read_bytes()))
    count, loss, right = (len(tokens) - 1) // LENGTH, 0.0, 0
    with torch.no_grad():
        for start in range(0, count * LENGTH, LENGTH):
            logits, wanted = model(tokens[None, start : start + LENGTH])[0], tokens[start + 1 : start + LENGTH + 1]
            loss += float(F.cross_entropy(logits.double(), wanted, reduction="sum"))
            right += int((logits.argmax(-1) == wanted).sum())
    return {"loss": loss / (count * LENGTH), "accuracy": right / (count * LENGTH), "count": count * LENGTH}


def test_two_ranks_evaluate_as_a_plain_loop(ranks: Ranks, files: tuple[Path, Path], tmp_path: Path) -> None:
    events = ranks.run(main_in_ranks, [*flags_of(files), f"--run-dir={tmp_path}/run"])[0]
    (found,) = of_kind(events, "eval")
    wanted = _by_hand(tmp_path / "run" / "full_model" / "full-model.pt", files[1])
    assert found["count"] == wanted["count"]
    assert found["accuracy"] == wanted["accuracy"]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-6)  # sums of fp32 logits in another order
    header = of_kind(events, "start")[0]["header"]
    assert any(
        line.startswith(f"evaluation: {wanted['count'] // LENGTH} sequences of text:{files[1]}") for line in header
    )


def test_all_of_the_training_set_is_trained_on(files: tuple[Path, Path]) -> None:
    config = parse(flags_of(files))
    split: Any = open_data(config).train
    # Each document but for what is left at the end of the two parts that are kept apart on the disk.
    kept = "".join(bytes(split[row][0]["input_ids"].tolist()).decode() for row in range(len(split)))
    whole = sum(len(one) for one in documents(60))
    assert whole - 2 * (LENGTH + 1) < len(kept) <= whole
    alone = parse([one for one in flags_of(files) if not one.startswith("--eval-dataset")])
    assert len(split) > len(open_data(alone).train) + 3


def test_conversations_and_mixtures(
    tmp_path: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    make_tokenizer(tmp_path / "tokenizer", PLAIN)
    few, others = tmp_path / "few.jsonl", tmp_path / "others.jsonl"
    few.write_text(json.dumps(talk("a question", "yes")) + "\n")  # one is enough where none is held out
    others.write_text("".join(json.dumps({"q": f"who is {n}", "a": "me" * n}) + "\n" for n in range(1, 9)))
    line = ["--model=llama", "--seq-len=48", f"--tokenizer={tmp_path}/tokenizer"]
    line += [f"--dataset=chat:{few}@1,text:{files[0]}@1", f"--eval-dataset=chat:{others}"]
    for wrong in ([], ["--chat-fields=prompt=q,completion=a"]):
        with pytest.raises(ConfigError, match="each source's between semicolons, the evaluated one's last"):
            check_data(parse([*line, *wrong]))
    config = parse([*line, "--chat-fields=;;prompt=q,completion=a"])
    check_data(config)
    data: Any = open_data(config)
    assert sum(int((data.test[row][1] >= 0).sum()) for row in range(len(data.test))) == data.test.target_count(
        numpy.arange(len(data.test))
    )
    assert command.cli(["show", *line, "--chat-fields=;;prompt=q,completion=a", "--samples=1"]) == 0
    printed = capsys.readouterr().out
    assert f"evaluation: {len(data.test)} sequences of chat:{others}" in printed
    assert "read: prompt as question" in printed
    mixed = [*line[:-1], f"--eval-dataset=chat:{others}@1,text:{files[1]}@3", "--chat-fields=;;prompt=q,completion=a;"]
    assert command.cli(["show", *mixed, "--samples=1"]) == 0
    evaluated = capsys.readouterr().out.partition("evaluation: ")[2]
    assert "conversations: 8 of " in evaluated
    assert "in an epoch" not in evaluated  # of which the shares are: an evaluation reads each sequence once
    with pytest.raises(ConfigError, match=r'--eval-dataset chat:.*others.jsonl: .*line 1: has no "messages"'):
        check_data(parse(line))


def test_evaluations_within_an_epoch_change_nothing(ranks: Ranks, files: tuple[Path, Path], tmp_path: Path) -> None:
    common = ["--model=transformer", *LLAMA[1:3], "--max-steps=5", *LLAMA[3:], *flags_of(files)[-3:]]
    common = [one for one in common if one != "--max-steps=4"]
    plain, often = (
        ranks.run(main_in_ranks, [*common, *more, f"--run-dir={tmp_path}/{name}"])[0]
        for name, more in (("plain", []), ("often", ["--eval-every=2", "--checkpoint-every=2"]))
    )
    assert losses(often) == losses(plain)  # the model has dropout
    assert [one["step"] for one in of_kind(often, "eval")] == [2, 4, 5]
    assert of_kind(often, "eval")[-1]["loss"] == of_kind(plain, "eval")[-1]["loss"]
    rest = [f"--resume={tmp_path}/often/checkpoints/step-00000002", f"--run-dir={tmp_path}/rest", "--eval-every=2"]
    again = ranks.run(main_in_ranks, [*common, *rest])[0]
    assert [one["loss"] for one in of_kind(again, "eval")] == [one["loss"] for one in of_kind(often, "eval")[1:]]
    without = [one for one in common if not one.startswith("--eval-dataset")]
    (line, _) = ranks.run(refusal_in_ranks, [*without, *rest[:1], f"--run-dir={tmp_path}/b"])
    assert "--dataset: the checkpoint's data has size" in line


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            "--model=vit --eval-dataset=text:{file}",
            "--eval-dataset with --dataset digits: it has a test set of its own",
        ),
        ("--model=llama --eval-dataset=text:{file}", "--eval-dataset with --dataset source-text: it has a test set"),
        ("--model=llama --dataset=text:{file} --eval-dataset=digits", "--eval-dataset digits: must be one of"),
        ("--model=llama --dataset=text:{file} --eval-dataset={file}", "is a place; give chat:"),
        ("--model=llama --dataset=text:{file} --eval-dataset=text:{file}.no", "there is no file of text"),
        ("--model=llama --dataset=text:{file} --eval-dataset=text:{file} --seq-len=9000", "fill no sequence of 9000"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(files: tuple[Path, Path], words: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        check_data(parse(words.format(file=files[1]).split()))


def test_a_run_names_no_set_elsewhere() -> None:
    with pytest.raises(ConfigError, match=r"its eval-dataset is at a URL, .* add --eval-dataset"):
        require_named({"eval-dataset": "datasets:owner/name"}, {}, "config.json")
    config = parse(["--model=llama", "--dataset=text:a", "--eval-dataset=datasets:owner/name"])
    assert code_flags(config) == ["--eval-dataset", "datasets:hf://datasets/owner/name"]
