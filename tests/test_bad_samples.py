"""`--bad-samples`: conversations that can't be learned are refused together, or left out and counted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2.config import parse
from fsdp2.data.errors import UnusableText
from fsdp2.data.splits import Dataset
from fsdp2.options.errors import ConfigError
from fsdp2.run.preflight import check_data
from fsdp2_extra.text import header_lines, text
from fsdp2_extra.text.chat import Chat
from fsdp2_tools.data import __main__ as command
from tests.harness import Ranks, losses, main_in_ranks, of_kind, refusal_in_ranks
from tests.hostile.common import one_line
from tests.test_chat import PLAIN, make_tokenizer, talk
from tests.test_text import LLAMA

LONG, UNANSWERED = (4, 9, 30), (1, 17)  # lines of the file, from 1


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Forty conversations, three of which are long, and two have no answer."""
    make_tokenizer(tmp_path / "tokenizer", PLAIN)
    return written(tmp_path / "all.jsonl", lambda number: True)


def written(file: Path, wanted: Callable[[int], bool]) -> Path:
    def line(number: int) -> dict[str, Any]:
        if number in UNANSWERED:
            return talk("a question")
        return talk(f"question {number}", "yes " * (30 if number in LONG else number % 7 + 1))

    file.write_text("".join(json.dumps(line(number)) + "\n" for number in range(1, 41) if wanted(number)))
    return file


def load(file: Path, **settings: bool) -> Dataset:
    return text.load(str(file), 64, 256, Chat(str(file.parent / "tokenizer")), apart=True, **settings)  # type: ignore[arg-type]


def test_all_of_them_are_refused_in_one_line(file: Path) -> None:
    with pytest.raises(UnusableText) as caught:
        load(file)
    why = "3 longer than --seq-len 64 (none is cut) in lines LONG and 2 without an answer to learn in lines UNANSWERED"
    for name, lines in (("LONG", LONG), ("UNANSWERED", UNANSWERED)):
        why = why.replace(name, ", ".join(map(str, sorted(lines))))
    one_line(caught.value, f"{file}: of 40 conversations {why}; raise --seq-len, to ", "--bad-samples drop")
    assert str(caught.value).count("all.jsonl") == 1


def test_those_that_cannot_be_read_are_counted_and_left_out(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = file.read_text().splitlines(keepends=True)
    wanted = load(written(file.parent / "good.jsonl", lambda number: number not in (*LONG, *UNANSWERED)), drop=True)
    odd = [{"messages": one} for one in ([{"role": "user", "content": None}], [{"role": "user"}], [])]
    file.write_text("".join([*good[:20], *(json.dumps(one) + "\n" for one in odd), *good[20:]]))
    with pytest.raises(UnusableText) as caught:
        load(file)
    one_line(
        caught.value,
        " and 3 that can't be read in lines 21, 22, 23; ",
        "; lines 21, 22: its message 1 (user) has no content; it has role; ",
        "; line 23: its messages must be a list; ",
        "--bad-samples drop",
    )
    alone = file.with_name("alone.jsonl")
    alone.write_text("".join([*good[10:16], *(json.dumps(one) + "\n" for one in odd[:2])]))
    with pytest.raises(UnusableText, match=r"of 8 conversations 2 that can't be read in lines 7, 8; .*--bad-samples"):
        load(alone)
    found = load(file, drop=True)
    rows = list(range(len(wanted.train)))
    assert len(found.train) == len(rows)
    assert torch.equal(found.train.__getitems__(rows)[1], wanted.train.__getitems__(rows)[1])
    counts, *_ = header_lines.lines(found)
    assert counts.startswith("conversations: 35 of ")
    assert f"and 3 that can't be read ({file}, lines 21, 22: its message 1 (user) has no content" in counts
    assert "; line 23: its messages must be a list" in counts  # of the same file
    line = ["prepare", str(file), "--chat", f"--tokenizer={file.parent}/tokenizer", f"--out={file.parent}/out"]
    assert command.cli(line) == 0
    assert (
        f"warning: 3 can't be read ({file}, lines 21, 22, 23), and a run needs --bad-samples drop"
        in capsys.readouterr().out
    )


def test_where_most_cannot_be_read_it_is_not_their_fault(file: Path) -> None:
    bad, good = {"messages": [{"role": "user"}]}, talk("question", "yes")

    def read(*lines: dict[str, Any]) -> int:
        file.write_text("".join(json.dumps(one) + "\n" for one in lines))
        splits = load(file, drop=True)
        return len(splits.train) + len(splits.test)

    assert read(*[bad] * 5, *[good] * 5) == read(*[good] * 5, *[bad] * 5) > 0
    of = "can't be read, and so many aren't left out; the first: .*"
    with pytest.raises(UnusableText, match=rf"6 of 11 conversations {of}line 1: its message 1 \(user\) has no content"):
        read(*[bad] * 6, *[good] * 5)
    with pytest.raises(UnusableText, match=rf"6 of 11 conversations {of}line 6: its message 1"):
        read(*[good] * 5, *[bad] * 6)
    with pytest.raises(UnusableText, match=rf"100 of the first 103 conversations {of}line 4: its message 1"):
        read(*[good] * 3, *[bad] * 200, *[good] * 500)  # whose rest isn't read


def test_no_more_than_ten_are_named(file: Path) -> None:
    file.write_text("".join(json.dumps(talk("q", "yes" * (50 + number))) + "\n" for number in range(40)))
    with pytest.raises(UnusableText, match=r"of 40 conversations 40 longer .* lines 31, 32, .*, 39, 40; raise --seq"):
        load(file)
    with pytest.raises(UnusableText, match="--bad-samples drop leaves none of its conversations; 40 longer than"):
        load(file, drop=True)


def test_what_is_left_is_as_if_they_were_not_there(file: Path) -> None:
    wanted = load(written(file.parent / "good.jsonl", lambda number: number not in (*LONG, *UNANSWERED)))
    found = load(file, drop=True)
    for ours, theirs in ((found.train, wanted.train), (found.test, wanted.test)):
        rows = list(range(len(theirs)))
        (inputs, targets), (others, wanted_targets) = ours.__getitems__(rows), theirs.__getitems__(rows)
        assert len(ours) == len(theirs)
        assert ours.target_count(rows) == theirs.target_count(rows)  # type: ignore[attr-defined]
        assert torch.equal(targets, wanted_targets)
        assert all(torch.equal(inputs[name], others[name]) for name in others)
        assert ours.content != theirs.content
    counts, share, *_ = header_lines.lines(found)
    assert share.endswith(" 38 answers, those in what is left out among them")
    assert counts.startswith("conversations: 35 of ")
    assert "left out by --bad-samples drop: 3 longer than --seq-len 64 (none is cut) and 2 without an" in counts


def test_none_is_left_out_where_all_can_be_learned(file: Path) -> None:
    good = written(file.parent / "good.jsonl", lambda number: number not in (*LONG, *UNANSWERED))
    assert load(good, drop=True).train.content == load(good).train.content
    assert "left out" not in " ".join(header_lines.lines(load(good, drop=True)))


def test_a_run_counts_them_and_goes_on_at_another_number_of_ranks(ranks: Ranks, file: Path, tmp_path: Path) -> None:
    common = [*LLAMA[:1], *LLAMA[2:], "--seq-len=64", f"--dataset=chat:{file}", f"--tokenizer={tmp_path}/tokenizer"]
    drop = [*common, "--bad-samples=drop", "--batch-size=2", "--checkpoint-every=2"]
    both = ranks.run(main_in_ranks, [*drop, f"--run-dir={tmp_path}/whole"])
    (start,) = of_kind(both[0], "start")
    filled = re.search(
        r"global batch 4 .* data-parallel ranks, (\d+) tokens \(sequences of 64, (\d+)% filled\)",
        " ".join(start["header"]),
    )
    assert filled
    (tokens, share), split = map(int, filled.groups()), load(file, drop=True).train
    kept = int(split.ends[-1]) / (64 * len(split))  # type: ignore[attr-defined]
    assert (tokens, share) == (round(4 * 64 * kept), round(100 * kept))
    record = of_kind(both[0], "train")[0]
    assert record["tokens_per_second"] / record["samples_per_second"] == pytest.approx(64 * kept)
    assert start["bad_samples"] == {str(file): {"too_long": 3, "no_answer": 2}}
    rest = [f"--resume={tmp_path}/whole/checkpoints/step-00000002", "--grad-accumulation=2"]
    (alone,) = ranks.run(main_in_ranks, [*drop, *rest, f"--run-dir={tmp_path}/rest"], ranks=1)
    assert losses(alone) == losses(both[0])[2:]
    for line in ranks.run(refusal_in_ranks, [*common, "--batch-size=2", *rest, f"--run-dir={tmp_path}/b"], ranks=1):
        assert "--bad-samples drop, which leaves them out and counts them" in line
    # The same conversations without those: as many samples, and others by what was left out.
    good = written(file, lambda number: number not in (*LONG, *UNANSWERED))
    assert good == file
    for line in ranks.run(refusal_in_ranks, [*drop, *rest, f"--run-dir={tmp_path}/c"], ranks=1):
        assert "the checkpoint's data differs from this run's" in line


def test_show_counts_them(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["show", "--model=llama", "--seq-len=64", f"--dataset=chat:{file}", f"--tokenizer={file.parent}/tokenizer"]
    assert command.cli(line) == 2
    assert "--bad-samples drop" in capsys.readouterr().err
    assert command.cli([*line, "--bad-samples=drop"]) == 0
    assert "left out by --bad-samples drop: 3 longer" in capsys.readouterr().out


def test_a_preparation_keeps_them_and_names_those_without_an_answer(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["prepare", str(file), "--chat", f"--tokenizer={file.parent}/tokenizer", f"--out={file.parent}/out"]
    assert command.cli(line) == 0
    assert f"warning: no answer to learn ({file}, lines 1, 17)" in capsys.readouterr().out
    (many := file.parent / "many.jsonl").write_text("".join(json.dumps(talk(f"q{n}")) + "\n" for n in range(11)))
    for name, count, some in (("ten", 10, ""), ("eleven", 11, ", …")):
        (file.parent / f"{name}.jsonl").write_text("".join(many.read_text().splitlines(keepends=True)[:count]))
        assert (
            command.cli([line[0], str(file.parent / f"{name}.jsonl"), *line[2:-1], f"--out={file.parent}/{name}"]) == 0
        )
        assert f"2, 3, 4, 5, 6, 7, 8, 9, 10{some}); a run" in capsys.readouterr().out
    made = text.load(f"{file.parent}/out", 64, 256, Chat(str(file.parent / "tokenizer")), apart=True, drop=True)
    assert made.train.content == load(file, drop=True).train.content


@pytest.mark.parametrize("name", ["text:{file}", "source-text"])
def test_only_conversations_are_left_out(file: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"--bad-samples drop with --dataset .*: only conversations are too long"):
        check_data(parse(["--model=llama", f"--dataset={name.format(file=file)}", "--bad-samples=drop"]))
