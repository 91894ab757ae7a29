"""Text, tokenizers and prepared folders that can't be used: each is one line, before anything waits for it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fsdp2.config import parse
from fsdp2.data.errors import UnusableText
from fsdp2.options.errors import ConfigError
from fsdp2.run.preflight import check_data
from fsdp2_extra.text import text
from fsdp2_extra.text.places import find
from fsdp2_extra.text.preparing import prepare
from fsdp2_extra.text.text import Text
from fsdp2_extra.text.tokenizer import Bytes
from fsdp2_extra.text.tokenizer_file import open_tokenizer
from tests.test_bos import make_words
from tests.test_text import corpus as corpus


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--dataset=text:{folder}/nothing*", "there is no file of text"),
        ("--dataset=text:{folder}/strange.bin", "isn't of a type that is read here"),
        ("--dataset=text:{corpus} --tokenizer={folder}", "has no tokenizer.json"),
        ("--dataset=text:", "names no file"),
        ("--tokenizer=bytes", "only text:, chat: and datasets: take one"),
        ("--documents=together", "has no documents"),
        (
            "--bos=never",
            "--bos never with --dataset source-text: only documents of text begin with a token; drop it",
        ),
        ("--dataset=text:{corpus} --bos=always", "bytes have no token that begins a text; drop --bos"),
        (
            "--dataset=text:{corpus} --tokenizer={words} --bos=always",
            "--bos always: .*words/tokenizer.json has no token",
        ),
        ("--dataset=chat:{corpus} --bos=always", "the chat template begins a conversation; drop it"),
        ("--dataset=text:{corpus} --model=vit", "the model takes image data"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_read(corpus: Path, flags: str, part: str) -> None:
    (corpus.parent / "strange.bin").write_bytes(b"x")
    (corpus.parent / "words").mkdir()
    words = make_words(corpus.parent / "words", "none", {})
    with pytest.raises(ConfigError, match=part):
        check_data(parse(["--model=llama", *flags.format(folder=corpus.parent, corpus=corpus, words=words).split()]))


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("empty.txt", b"", "there is no text in it; give files that have some"),
        ("bytes.txt", b"\xff\xfe\x00", "can't be read as text"),
        ("latin.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', "latin.jsonl, line 2: can't be read as text"),
        (
            "torn.jsonl",
            b'{"text": "a"}\n{"tex\n',
            "line 2: can't be read as JSON .Unterminated string starting at: column 2",
        ),
        ("other.jsonl", b'{"body": "a"}\n', "line 1: has no text in its field text; it has body; see --text-field"),
        (
            "talks.jsonl",
            b'{"messages": []}\n',
            "line 1: has no text .*; it has messages; give conversations as chat:PATH",
        ),
        ("null.jsonl", b'{"text": null}\n', "line 1: has no text in its field text, but null; leave that one out"),
        ("short.txt", b"abc", "which fill no sequence of 8"),
        ("half.jsonl", b'{"text": "a\\ud800"}\n', "line 1: has half of a character in its field text"),
        ("twice.jsonl", b'{"text": "a"}\n{"text": "a", "text": "b"}\n', "line 2: an object has 'text' twice; keep one"),
        ("deep.jsonl", b'{"text": "a", "of": [{"b": 1, "b": 1}]}\n', "line 1: an object has 'b' twice; keep one"),
        ("junk.parquet", b"PAR1junkPAR1", "the library that reads it gives up"),
    ],
)
def test_text_that_cannot_be_used_is_named(corpus: Path, name: str, content: bytes, part: str) -> None:
    file = corpus.parent / name
    file.write_bytes(content)
    with pytest.raises(UnusableText, match=part):
        text.load(str(file), 8, 256, Text(Bytes()), apart=True)
    line = ["--model=llama", f"--dataset=text:{file}", "--seq-len=8"]
    with pytest.raises(ConfigError, match=part):
        check_data(parse(line))  # before any process group
    check_data(parse(line), read=False)


def test_of_much_text_the_first_document_is_looked_at_before(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "SOON", 10)
    file = corpus.parent / "other.jsonl"
    file.write_text('{"body": "a"}\n')
    with pytest.raises(ConfigError, match="has no text in its field text"):
        check_data(parse(["--model=llama", f"--dataset=text:{file}"]))
    check_data(parse(["--model=llama", f"--dataset=text:{file}", "--text-field=body", "--seq-len=512"]))


def test_a_folder_of_text_is_what_lies_in_it(tmp_path: Path) -> None:
    (tmp_path / "private.txt").write_text("a secret")
    for name in ("a.txt", ".git/b.txt", ".c.txt", "below/d.txt"):
        (tmp_path / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / name).write_text(name)
    place = tmp_path / "text"
    (place / "again.txt").symlink_to("below/d.txt")
    assert [file.name.removeprefix(f"{place}/") for file in find(str(place))] == ["a.txt", "again.txt", "below/d.txt"]
    (place / "out.txt").symlink_to(tmp_path / "private.txt")
    with pytest.raises(UnusableText, match=r"out\.txt: is a link out of the folder; name the file that it leads to"):
        find(str(place))
    assert find(f"{place}/out.txt")  # by name


def test_what_is_no_file_in_a_folder_of_text_hangs_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(UnusableText, match="there is no file of text"):
        find(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ('{"eos_token": {"a": 1}}', "its eos_token is no text"),
        ('{"eos_token": 5}', "its eos_token is no text"),
        ("[]", "can't be used"),
        ("{", "can't be used"),
    ],
)
def test_settings_of_a_tokenizer_that_make_no_sense(tmp_path: Path, content: str, part: str) -> None:
    file = tmp_path / "tokenizer.json"
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(file))
    assert open_tokenizer(str(tmp_path)).size == 2
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UnusableText, match=part):
        open_tokenizer(str(tmp_path))


def test_a_prepared_folder_that_lies_is_refused(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "prepared"
    prepare(find(str(corpus)), folder, Text(Bytes()))
    good = json.loads((folder / "meta.json").read_text())
    text.load(str(folder), 8, 256, Text(Bytes()), apart=True)
    lies: list[tuple[str, Any]] = [("dtype", "object"), ("dtype", "uint16"), ("files", 5), ("tokens", {})]
    lies += [("tokens", None), ("documents", {"train": "1", "test": 1}), ("characters", 1.5), ("characters", -5)]
    lies += [("empty", None), ("begin", "a"), ("turns", 3), ("turns", {"a": [1, 2]}), ("turns", {"1": [1]})]
    for name, value in [*lies, *((name, "nothing") for name in good if name not in ("format", "content"))]:
        (folder / "meta.json").write_text(json.dumps({**good, name: value}))
        if value == "nothing":
            (folder / "meta.json").write_text(json.dumps({key: one for key, one in good.items() if key != name}))
        with pytest.raises(UnusableText, match="is not a prepared text"):
            text.load(str(folder), 8, 256, Text(Bytes()), apart=True)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(corpus: Path) -> None:
    with pytest.raises(UnusableText, match="has 256 tokens, and the model's vocabulary 64"):
        text.load(str(corpus), 8, 64, Text(Bytes()), apart=True)
