"""`--dataset "chat:A@0.7,text:B@0.3"`: each source has its share, in one order at every world size."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fsdp2.config import parse
from fsdp2.data.errors import UnusableText
from fsdp2.data.loader import Batches
from fsdp2.data.splits import Dataset
from fsdp2.options.errors import ConfigError
from fsdp2.options.own_model import require_named
from fsdp2.run.preflight import check_data
from fsdp2_extra.text import mixture
from fsdp2_tools.data import __main__ as command
from tests.harness import Ranks, losses, main_in_ranks, of_kind, refusal_in_ranks
from tests.test_chat import PLAIN, make_tokenizer
from tests.test_text import LLAMA, documents

LENGTH = 8


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """One of many sequences, and one of few."""
    many, few = tmp_path / "many.txt", tmp_path / "few.txt"
    many.write_text("\n".join(documents(400)))
    few.write_text("ABCDEFGHIJKLMNOPQRSTUVWXYZ" * 6)
    return many, few


def load(name: str, *, apart: bool = True) -> Dataset:
    return mixture.load(name, LENGTH, 256, {}, apart=apart)


def batches(dataset: Dataset, rank: int, world_size: int) -> Batches:
    place = {"rank": rank, "world_size": world_size, "device": torch.device("cpu")}
    return Batches(dataset.train, global_batch=12, accumulation=1, seed=3, **place)  # type: ignore[arg-type]


def tokens_of(inputs: Any) -> list[list[int]]:
    return (inputs["input_ids"] if isinstance(inputs, dict) else inputs).tolist()


@pytest.mark.parametrize("apart", [True, False])
def test_an_epoch_has_each_sequence_and_the_sources_their_shares(files: tuple[Path, Path], apart: bool) -> None:
    many, few = files
    alone = [load(f"text:{file}", apart=apart).train for file in files]
    lengths = [len(split) for split in alone]
    assert lengths[0] > 5 * lengths[1] > 75
    mixed = load(f"text:{many}@3,text:{few}@1", apart=apart)
    # All of the one with many, and a third as many of the other.
    assert len(mixed.train) == lengths[0] + round(lengths[0] / 3)
    wanted = [tokens_of(split[row][0]) for split, count in ((alone[0], lengths[0]), (alone[1], round(lengths[0] / 3)))
              for row in (numpy.arange(count) % len(split)).tolist()]  # fmt: skip
    order = torch.randperm(len(wanted), generator=torch.Generator().manual_seed(3 * 1_000_003)).tolist()
    steps = [
        [tokens_of(next(step).inputs) for step in batches(mixed, rank, world_size)]
        for world_size in (1, 2, 3)
        for rank in range(world_size)
    ]
    whole = [row for step in steps[0] for row in step]
    assert whole == [wanted[row] for row in order]
    for ranks in (steps[1:3], steps[3:6]):
        assert [row for parts in zip(*ranks, strict=True) for part in parts for row in part] == whole


def test_the_targets_of_a_batch_are_counted_over_its_sources(files: tuple[Path, Path]) -> None:
    mixed = load(f"text:{files[0]}@0.5,text:{files[1]}@0.5").train
    rows = [0, len(mixed) - 1, 5, len(mixed) - 7, 0]
    inputs, targets = mixed.__getitems__(rows)
    assert int((targets != -100).sum()) == mixed.target_count(rows)  # type: ignore[attr-defined]
    for at, row in enumerate(rows):
        one, target = mixed[row]
        assert torch.equal(target, targets[at])
        assert all(torch.equal(one[name], inputs[name][at]) for name in one)


def test_the_test_split_has_each_sequence_once(files: tuple[Path, Path]) -> None:
    test = load(f"text:{files[0]}@1,text:{files[1]}@9").test
    alone = [load(f"text:{file}").test for file in files]
    rows = [tokens_of(split[row][0]) for split in alone for row in range(len(split))]
    assert [tokens_of(test[row][0]) for row in range(len(test))] == rows


def _conversations(file: Path) -> Path:
    texts = [{"messages": [{"role": "user", "content": "a" * n}, {"role": "assistant", "content": "b" * n}]}
             for n in range(2, 14)]  # fmt: skip
    file.write_text("".join(json.dumps(one) + "\n" for one in texts))
    return file


def _run(flags: list[str]) -> tuple[list[float], list[str]]:
    events = main_in_ranks(flags)
    return losses(events), of_kind(events, "start")[0]["header"]


def test_text_and_conversations_are_trained_and_resumed_on_another_number_of_ranks(
    ranks: Ranks, files: tuple[Path, Path], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    chat, tokenizer = _conversations(tmp_path / "chat.jsonl"), make_tokenizer(tmp_path / "tokenizer", PLAIN)
    data = [f"--tokenizer={tokenizer}", "--seq-len=64"]
    name = f"--dataset=chat:{chat}@0.7,text:{files[0]}@0.3"
    common = [*LLAMA, *data, "--batch-size=2", "--checkpoint-every=2"]
    whole, header = ranks.run(_run, [*common, name, f"--run-dir={tmp_path}/whole"])[0]
    assert len(whole) == 4
    assert any(line.startswith("mixture: ") for line in header)
    rest = [f"--resume={tmp_path}/whole/checkpoints/step-00000002", "--grad-accumulation=2", *LLAMA, *data]
    rest.append("--batch-size=2")
    (alone,) = ranks.run(main_in_ranks, [*rest, name, f"--run-dir={tmp_path}/rest"], ranks=1)
    assert losses(alone) == whole[2:]
    for line in ranks.run(
        refusal_in_ranks, [*rest, name.replace("0.7", "0.9"), f"--run-dir={tmp_path}/other"], ranks=1
    ):
        assert "samples would be repeated or left out" in line


def test_what_is_shown_is_each_source(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"text:{files[0]}@0.5,text:{files[1]}@0.5"
    line = ["show", "--model=llama", f"--dataset={name}", "--tokenizer=bytes", "--seq-len=8", "--samples=1"]
    assert command.cli(line) == 0
    printed = capsys.readouterr().out.splitlines()
    assert f"  50.0% of text:{files[0]}, each once" in printed
    assert [line for line in printed if line.startswith("sequence 1 of ")] != []
    assert any("BCDEFGHI" in line for line in printed)
    often = f"    warning: an epoch has each sequence of text:{files[1]} "
    assert [line.startswith(often) for line in printed].count(True) == 1
    line[2] = f"--dataset=text:{files[0]},text:{files[1]}"
    assert command.cli(line) == 0
    assert "warning" not in capsys.readouterr().out


def test_all_that_is_trained_on_is_counted_where_others_evaluate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "many.jsonl"  # of whose documents one in ten would be for evaluation
    file.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents(400)))
    flags = [f"--dataset=text:{file}", f"--eval-dataset=text:{file}", "--tokenizer=bytes", "--seq-len=8"]
    assert command.cli(["show", "--model=llama", *flags, "--samples=1"]) == 0
    printed = capsys.readouterr().out
    said, shown = re.search(r"tokens in (\S+) sequences", printed), re.search(r"sequence 1 of (\S+)", printed)
    assert said is not None
    assert shown is not None
    assert said[1] == shown[1]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("text:a@0.5,text:b", "text:b has no share"),
        ("text:a,text:b@1", "text:a has no share"),
        ("text:a@0,text:b@1", "text:a@0 has no share"),
        ("text:a@nan,chat:b@1", "text:a@nan has no share"),
        ("text:a@inf,chat:b@1", "text:a@inf has no share"),
        ("text:a@0.5,text:@0.5", "names no file"),
    ],
)
def test_what_is_no_mixture_is_refused(name: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        parse(["--model=llama", f"--dataset={name}"])


def test_the_names_of_sources_are_absolute_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = parse(["--model=llama", "--dataset=text:a,b@0.30,datasets:owner/name:train@2"]).dataset
    assert name == f"text:{tmp_path}/a,{tmp_path}/b@0.3,datasets:hf://datasets/owner/name:train@2.0"
    assert parse(["--model=llama", f"--dataset={name}"]).dataset == name
    (tmp_path / "a@1,text:b@1").touch()
    assert parse(["--model=llama", "--dataset=text:a@1,text:b@1"]).dataset == f"text:{tmp_path}/a@1,text:b@1"


def test_without_shares_an_epoch_has_each_sequence_once(files: tuple[Path, Path]) -> None:
    alone = [load(f"text:{file}").train for file in files]
    together = load(",".join(f"text:{file}" for file in files))
    assert len(together.train) == sum(map(len, alone))
    rows = [tokens_of(split[i][0]) for split in (*alone, together.train) for i in range(len(split))]
    assert rows[: len(together.train)] == rows[len(together.train) :]
    name = parse(["--model=llama", f"--dataset=text:{files[0]},text:{files[1]}"]).dataset
    assert parse(["--model=llama", f"--dataset={name}"]).dataset == name == f"text:{files[0]},text:{files[1]}"
    mail = f"text:{files[0].parent}/a@b.txt"  # which is no share
    assert parse(["--model=llama", f"--dataset={mail},text:{files[1]}"]).dataset == f"{mail},text:{files[1]}"


@pytest.mark.parametrize(
    "name",
    ["text:a@1,datasets:owner/name@1", "text:a@1,datasets:https://there/a.csv@1", "text:a,datasets:owner/name"],
)
def test_a_run_names_no_source_elsewhere(name: str) -> None:
    with pytest.raises(ConfigError, match=r"its dataset is at a URL, .* add --dataset"):
        require_named({"dataset": name}, {}, "config.json")


@pytest.mark.parametrize(("small", "large"), [("0.001", "0.999"), ("1e-320", "1"), ("1e-308", "1e308")])
def test_a_share_that_makes_no_epoch_is_refused(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, small: str, large: str
) -> None:
    monkeypatch.setattr(mixture, "MOST", 10**4)
    with pytest.raises(UnusableText, match=rf"text:{files[1]}: its share makes an epoch of [\d,]+ sequences"):
        load(f"text:{files[0]}@{small},text:{files[1]}@{large}")


def test_a_mixture_of_conversations_has_no_token_before_a_document(tmp_path: Path) -> None:
    chat = _conversations(tmp_path / "a.jsonl")
    pytest.importorskip("transformers")
    tokenizer = make_tokenizer(tmp_path / "tokenizer", PLAIN)
    name = f"chat:{chat}@1,chat:{chat}@1"
    with pytest.raises(ConfigError, match=r"--bos always .*the chat template begins a conversation"):
        check_data(parse(["--model=llama", f"--dataset={name}", "--bos=always", f"--tokenizer={tokenizer}"]))
