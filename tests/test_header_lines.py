"""A run says what it sees of text and conversations; wrong data would show at a glance."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest

from fsdp2 import data
from fsdp2.data.errors import UnusableText
from fsdp2.data.splits import IGNORED
from fsdp2_extra.text import header_lines, text
from fsdp2_extra.text.chat import Chat
from fsdp2_extra.text.ends_of_turns import NONE, Turns
from fsdp2_extra.text.places import find
from fsdp2_extra.text.preparing import prepare
from fsdp2_extra.text.text import Text
from fsdp2_extra.text.tokenizer_file import FromFile, open_tokenizer
from fsdp2_tools.data import __main__ as command
from tests.test_bos import make_words
from tests.test_chat import GENERATION, NO_BORDER, PLAIN, TEMPLATE, make_tokenizer, talk

UNENDED = TEMPLATE.replace("ANSWER", "{% generation %}{{ message.content }}{% endgeneration %}<|end|>\n")
ENDLESS = NO_BORDER.replace("assistant: ", "<|assistant|>").replace("{{ message.role }}: ", "<|{{ message.role }}|>")
# A turn that ends with another token than the tokenizer's eos_token.
OTHER = GENERATION.replace("<|end|>", "<|system|>")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """100 documents of 0 to 10 words of a tokenizer that begins and ends each."""
    make_words(tmp_path, "template", {"eos_token": "</s>"})
    file = tmp_path / "words.jsonl"
    file.write_text("".join(json.dumps({"text": " ".join("a" * (number % 11))}) + "\n" for number in range(110)))
    return file


def talks(folder: Path, template: str) -> Path:
    """A folder with the file of 40 conversations of two answers each, and a tokenizer."""
    pytest.importorskip("transformers")
    make_tokenizer(folder, template)
    file = folder / "talks.jsonl"
    file.write_text("".join(json.dumps(talk("hi", "yes", "a" * (number % 9), "no")) + "\n" for number in range(40)))
    return file


def counted(split: Any, length: int) -> str:
    """The line of a split, by looking at each of its sequences."""
    learned = sum(int((split[number][1] != IGNORED).sum()) for number in range(len(split)))
    return f"learned: {learned / (length):.1%} of {length:,} tokens in {len(split):,} sequences for training"


@pytest.mark.parametrize("task", ["causal", "masked", "seq2seq"])
@pytest.mark.parametrize("apart", [True, False])
def test_counts_of_text_are_those_of_its_sequences(
    words: Path, monkeypatch: pytest.MonkeyPatch, task: str, apart: bool
) -> None:
    monkeypatch.setattr(header_lines, "AT_A_TIME", 7)
    made = data.load(
        f"text:{words}",
        root=None,
        seq_len=8,
        vocab_size=8,
        reading={"tokenizer": str(words.parent)},
        task=task,
        special_token=4,
        apart=apart,
    )
    counts, learned, tokenizer = header_lines.lines(made)
    splits: list[Any] = [getattr(split, "windows", split) for split in (made.train, made.test)]
    documents = [range(end - length, end) for one in splits for end, length in _lengths(one.ends.tolist())]
    cut = sum(int(document[0] // 8 != document[-1] // 8) for document in documents)
    left = sum(len(split.tokens) - 8 * len(split) - 1 for split in splits)
    seen_by = "" if apart and task == "causal" else ", and see each other"
    # 550 words, a beginning and an end of 100 documents; and 9 spaces between 10 words.
    assert counts == (
        f"documents: 100 of 3 to 12 tokens (750 in all, {(550 + 450) / 750:.1f} characters each); "
        f"{cut} go on in the next sequence of 8{seen_by}; dropped: 10 empty ones, {left} tokens at the end"
    )
    assert learned == f"{counted(made.train, 8 * len(made.train))}, {len(made.test)} for evaluation"
    assert tokenizer.endswith("/tokenizer.json; a document begins with <s>, ends with </s>")


def _lengths(ends: list[int]) -> list[tuple[int, int]]:
    return [(end, end - begin) for begin, end in zip([0, *ends], ends, strict=False)]


def test_counts_of_conversations_are_those_of_their_sequences(tmp_path: Path) -> None:
    file = talks(tmp_path / "chat", GENERATION)
    made = text.load(str(file), 80, 256, Chat(str(file.parent)), apart=True)
    counts, learned, tokenizer = header_lines.lines(made)
    tokens = [len(split.tokens) for split in (made.train, made.test)]  # type: ignore[attr-defined]
    assert counts.startswith("conversations: 40 of ")
    assert f" tokens ({sum(tokens):,} in all); truncated: none, dropped: none" in counts
    lines = [{**json.loads(line), "sco\x1bre": 1} for line in file.read_text().splitlines()]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    again = text.load(str(file), 80, 256, Chat(str(file.parent)), apart=True)
    assert header_lines.lines(again)[0].endswith(r"; truncated: none, dropped: sco\x1bre")
    assert learned == (
        f"{counted(made.train, tokens[0])}, {len(made.test)} for evaluation; <|end|> ends a turn, learned in 80 of 80 "
        "answers"
    )
    assert tokenizer.endswith("tokenizer.json; a conversation is as the chat template prints it")


@pytest.mark.parametrize(
    ("template", "turn", "warning"),
    [
        (PLAIN, "<|end|> ends a turn, learned in 80 of 80 answers", None),
        (
            OTHER,
            "<|system|> ends a turn (eos_token is <|end|>; an export as hf names this one too), learned in 80 of 80 "
            "answers",
            None,
        ),
        (
            UNENDED,
            "<|end|> ends a turn, learned in 0 of 80 answers",
            "{file} leaves <|end|> out of what is learned; put that inside {{% generation %}}",
        ),
        (ENDLESS, "no token ends a turn", "{file} prints no special token there; let it print one after an answer"),
    ],
)
@pytest.mark.parametrize("own_file", [False, True])
def test_an_end_of_turn_that_is_not_learned_is_named_with_its_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str, turn: str, warning: str | None, own_file: bool
) -> None:
    file = talks(tmp_path / "chat", template)
    place = file.parent / "tokenizer_config.json"
    if own_file:
        settings = json.loads(place.read_text())
        settings["chat_template"] = "another, which doesn't count"
        place.write_text(json.dumps(settings))
        place = file.parent / "chat_template.jinja"
        place.write_text(template)
    flags = ["--model=llama", "--seq-len=80", f"--dataset=chat:{file}", f"--tokenizer={file.parent}"]
    assert command.cli(["show", *flags, "--samples=0"]) == 0
    shown = capsys.readouterr().out.partition("tokens in a ")[0].splitlines()
    assert shown[1].partition("; ")[2] == turn
    if warning is None:
        assert len(shown) == 3
        return
    (line,) = shown[3:]
    assert line.startswith("warning: the end of 80 of 80 answers isn't learned, so the model won't stop there: ")
    assert line.endswith(warning.format(file=place))
    # Whoever prepares for hours hears of it at the end, and not only when a run begins.
    out = tmp_path / "out"
    assert command.cli(["prepare", "--chat", str(file), f"--tokenizer={file.parent}", f"--out={out}"]) == 0
    assert line in capsys.readouterr().out


NAMES = ["a", " ", "\n", "<end>", "<call>", "<user>"]  # the last three are added tokens


@pytest.mark.parametrize(
    ("tokens", "learn", "found"),
    [
        ([5, 0, 3], [0, 1, 1], [(3, True)]),
        ([5, 0, 3, 2, 5], [0, 1, 1, 1, 0], [(3, True)]),
        ([5, 0, 3, 2, 5, 0], [0, 1, 0, 0, 0, 1], [(3, False), (NONE, False)]),
        ([0, 1, 2, 3], [1, 0, 0, 0], [(3, False)]),
        ([0, 0, 3], [1, 0, 0], [(NONE, False)]),  # it isn't the next one
        ([0, 4, 3], [1, 1, 0], [(3, False)]),  # the tokenizer's own end follows a call
        ([0, 3, 3], [1, 1, 0], [(3, True)]),
        ([0, 4, 0, 4, 2, 3], [0, 0, 1, 1, 1, 0], [(4, True)]),  # and this one, as others do
        ([0, 4, 2, 5], [1, 1, 1, 0], [(4, True)]),  # a call ends this answer
        ([5, 5], [0, 0], []),
    ],
)
def test_the_token_that_ends_an_answer(tokens: list[int], learn: list[int], found: list[tuple[int, bool]]) -> None:
    turns = Turns(NAMES, [3, 4, 5], end=3)
    assert list(turns(numpy.array(tokens), numpy.array(learn, dtype=numpy.uint8))) == found


def test_what_is_learned_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, template, answer in (("good", GENERATION, r"⟦yes<|end|>\n⟧"), ("bad", UNENDED, r"⟦yes⟧<|end|>\n")):
        file = talks(tmp_path / name, template)
        flags = ["--model=llama", "--seq-len=80", f"--dataset=chat:{file}", f"--tokenizer={file.parent}"]
        assert command.cli(["show", *flags, "--samples=1"]) == 0
        found = capsys.readouterr().out.partition("sequence 1 of ")[2].partition("tokens in a ")[0].splitlines()[1:]
        # A line for each conversation, and none for the empty rest of the sequence.
        assert len(found) == 3
        assert all(line.startswith(rf"  <s><|user|>\nhi<|end|>\n<|assistant|>\n{answer}<|user|>") for line in found)


def test_documents_are_counted_by_their_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes, text = [1, *[2, 3] * 30, *[64] * 20, 127, 128], "the quick brown fox jumps over it " * 20
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text[at : at + size]}) + "\n" for at, size in enumerate(sizes))
    )
    flags = ["--model=llama", "--seq-len=8", f"--dataset=text:{tmp_path}/a.jsonl", "--tokenizer=bytes"]
    assert command.cli(["show", *flags, "--samples=0"]) == 0
    rows = capsys.readouterr().out.partition("tokens in a document:\n")[2].splitlines()
    found = [re.fullmatch(r" +(\d+(?: to \d+)?)  (█*) +(\d+) \((.+)%\)", row) for row in rows]
    assert [(row[1], int(row[3])) for row in found if row] == [
        *(("1", 1), ("2 to 3", 60), ("4 to 7", 0), ("8 to 15", 0)),
        *(("16 to 31", 0), ("32 to 63", 0), ("64 to 127", 21), ("128 to 255", 1)),
    ]
    assert [len(row[2]) for row in found if row] == [1, 40, 0, 0, 0, 0, 14, 1]


def test_a_beginning_shows_at_a_glance(words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for bos, first in (("auto", "  <s>⟦a </s>⟧"), ("never", "  a⟦</s>⟧")):
        flags = ["--model=llama", "--seq-len=8", f"--dataset=text:{words}", f"--tokenizer={words.parent}"]
        assert command.cli(["show", *flags, f"--bos={bos}", "--samples=1"]) == 0
        found = capsys.readouterr().out.splitlines()
        assert ("begins with <s>," in found[2], "begins with no token of its own," in found[2]) == (
            bos == "auto",
            bos == "never",
        )
        assert found[4] == first


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, "GPT2Tokenizer makes [209, "),
        ({"split_special_tokens": True}, "of 'Hello<|end|>', and tokenizer.json [39, "),
        ({"extra_special_tokens": ["c"]}, "of 'bc', and tokenizer.json ["),
        ({"pad_token": "h"}, "of 'Helloh hs', and tokenizer.json ["),
        ({}, None),
    ],
)
def test_a_tokenizer_that_transformers_reads_differently_is_named(
    settings: dict[str, Any], part: str | None, tmp_path: Path
) -> None:
    """The settings beside it change tokens for whoever serves the model, and not for the run."""
    pytest.importorskip("transformers")
    folder = make_tokenizer(tmp_path / "tokenizer", None)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), **settings}))
    (tmp_path / "a.txt").write_text("words " * 100)
    for _ in range(2):  # made, and found in the cache
        made = text.load(str(tmp_path / "a.txt"), 8, 300, Text(open_tokenizer(str(folder))), apart=True)
        warned = [line for line in header_lines.lines(made) if line.startswith("warning: transformers reads ")]
        assert [str(part) in line for line in warned] == [True] * (part is not None)


def test_a_difference_that_only_the_data_shows_is_named(tmp_path: Path) -> None:
    """Qwen2's class has digits apart from the space before them, which no probe has."""
    pytest.importorskip("transformers")
    folder = make_tokenizer(tmp_path / "tokenizer", PLAIN)
    made = json.loads((folder / "tokenizer.json").read_bytes())
    made["model"]["vocab"]["Ġ1"] = 300
    made["model"]["merges"].append(["Ġ", "1"])
    (folder / "tokenizer.json").write_text(json.dumps(made))
    settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "Qwen2Tokenizer"}))
    for name, content, told in (("a", "no number", 0), ("b", "number 1 and 12", 1)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(talk(f"{content} {'b' * at}", "yes")) + "\n" for at in range(40)))
        lines = header_lines.lines(text.load(str(file), 128, 400, Chat(str(folder)), apart=True))
        warned = [line for line in lines if "Qwen2Tokenizer makes" in line]
        assert len(warned) == told
        assert told == sum("in the data, and tokenizer.json [300, " in line for line in warned)


def test_a_class_that_begins_a_text_differently_is_named(tmp_path: Path) -> None:
    """GPT-NeoX' takes the place of the post-processor of tokenizer.json, which the run follows."""
    pytest.importorskip("transformers")
    folder = make_tokenizer(tmp_path / "tokenizer", None, "<s>")
    file = folder / "tokenizer_config.json"
    for name, told in ((None, False), ("GPTNeoXTokenizer", True)):
        file.write_text(json.dumps({**json.loads(file.read_bytes()), "tokenizer_class": name}))
        assert ("of 'Hello' with what begins and ends a text" in open_tokenizer(str(folder)).unlike()) == told


def test_truncation_shows_at_a_glance(words: Path) -> None:
    """It is off, which a line says; were it in force, all documents would be of one length, and of many characters."""
    file = words.parent / "tokenizer.json"
    made = FromFile(file)
    made._tokenizer.enable_truncation(2)
    made._tokenizer.enable_padding(length=6)
    file.write_text(made._tokenizer.to_str())
    (counts, _, tokenizer), (wrong, *_) = (
        header_lines.lines(text.load(str(words), 8, 8, Text(one), apart=True))
        for one in (open_tokenizer(str(file)), _cutting(made))
    )
    assert tokenizer.endswith("; off: its truncation to 2 tokens and padding to 6")
    assert counts.startswith("documents: 100 of 3 to 12 tokens (750 in all, 1.3 characters each)")
    assert wrong.startswith("documents: 110 of 8 tokens each (880 in all, 1.1 characters each)")


def _cutting(made: FromFile) -> FromFile:
    made.identity = "another"
    return made


def test_a_strangers_text_is_shown_and_not_acted_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "text.txt"
    file.write_text("a\x1b[31m\u202eb\n" * 50)
    assert command.cli(["show", "--model=llama", "--seq-len=16", f"--dataset=text:{file}", "--samples=1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[4].startswith(r"  a⟦\x1b[31m")
    assert all(line.isprintable() for line in shown)


def test_a_strangers_tokens_are_shown_and_not_acted_on(words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = words.parent / "tokenizer.json"
    file.write_text(file.read_text().replace("<s>", r"<\u001b[31m" + "s" * 1000))
    flags = ["--model=llama", "--seq-len=8", f"--dataset=text:{words}", f"--tokenizer={words.parent}"]
    assert command.cli(["show", *flags, "--samples=1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert r"a document begins with <\x1b[31mssss" in shown[2]
    assert all(line.isprintable() for line in shown)
    assert len(shown[2]) < 300


def test_conversations_that_end_with_a_token_beyond_the_tokenizer_are_refused(tmp_path: Path) -> None:
    file = talks(tmp_path / "chat", GENERATION)
    chat = Chat(str(file.parent))
    prepare(find(str(file)), tmp_path / "out", chat)
    meta = tmp_path / "out" / "meta.json"
    good = meta.read_text()
    for turns, part in (({"300": [1, 1]}, "a token that its tokenizer doesn't have"), ({"-1": [0, 80]}, None)):
        meta.write_text(json.dumps({**json.loads(good), "turns": turns}))
        if part is None:
            assert (
                "no token ends a turn"
                in header_lines.lines(text.load(str(tmp_path / "out"), 80, 256, chat, apart=True))[1]
            )
            continue
        with pytest.raises(UnusableText, match=part):
            text.load(str(tmp_path / "out"), 80, 256, chat, apart=True)


def test_what_cannot_be_shown_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for more, part in (
        ("", "--dataset digits: only text:, chat:, datasets: are shown; give one of them"),
        ("--samples=-1", "--samples -1: must be"),
        ("--model=llama --dataset=text:/nowhere*", "there is no file of text"),
        ("--modle=llama", "--modle=llama: no such flag"),
    ):
        assert command.cli(["show", *more.split()]) == 2
        error = capsys.readouterr().err
        assert part in error
        assert error.count("\n") == 1


def test_a_run_without_text_says_nothing_of_it() -> None:
    made = data.load("random-tokens", root=None, seq_len=8, vocab_size=16)
    assert header_lines.lines(made) == []


def test_of_each_source_a_masked_model_learns_what_it_learns_of_one(words: Path) -> None:
    how: dict[str, Any] = {"root": None, "seq_len": 8, "vocab_size": 300, "task": "masked", "special_token": 1}
    alone = [line for line in header_lines.lines(data.load(f"text:{words}", **how)) if "learned:" in line]
    mixed = header_lines.lines(data.load(f"text:{words}@1,text:{words}@2", **how))
    assert [line.strip() for line in mixed if "learned:" in line] == alone * 2
