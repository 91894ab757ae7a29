"""Text that a stranger has written or prepared: what no text is, and what its columns disagree about."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from fsdp2.data import text
from fsdp2.data.__main__ import cli
from fsdp2.data.places import find
from fsdp2.data.reading import rows_of
from fsdp2.data.text import encoder_of
from fsdp2.data.tokenizer import UnusableText
from tests.harness import python_environment
from tests.hostile.common import one_line
from tests.test_chat import PLAIN, make_tokenizer, talk


def test_half_a_character_in_a_conversation(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for line in (talk("hello", "h\ud83d"), {**talk("a", "b"), "tools": [{"\udc00": 1}]}):
        file.write_text(json.dumps(talk("whole", "\U0001f600")) + "\n" + json.dumps(line) + "\n")
        with pytest.raises(UnusableText) as caught:
            list(rows_of(find(str(file))[0], None))
        one_line(caught.value, f"{file}, line 2: has half of a character, which no text has; leave it out")


def _prepared(tmp_path: Path, kind: str) -> Path:
    folder, file = tmp_path / kind, tmp_path / f"{kind}.jsonl"
    some = [talk(f"question {i}", "yes") if kind == "chat" else {"text": f"document {i} " * 5} for i in range(40)]
    file.write_text("".join(json.dumps(one) + "\n" for one in some))
    tokenizer = make_tokenizer(tmp_path / "tokenizer", PLAIN)
    chat = ["--chat"] if kind == "chat" else []
    assert cli(["prepare", str(file), f"--tokenizer={tokenizer}", f"--out={folder}", *chat]) == 0
    return folder


def _changed(file: Path, dtype: str, change: Callable[[numpy.ndarray], None]) -> None:
    values = numpy.fromfile(file, dtype=dtype)
    change(values)
    values.tofile(file)


def _loaded(folder: Path, kind: str) -> Any:
    return text.load(str(folder), 64, 256, encoder_of(kind, str(folder.parent / "tokenizer")), apart=True)


def _fall(ends: numpy.ndarray) -> None:
    ends[[1, 2]] = ends[[2, 1]]


def _begin_before(ends: numpy.ndarray) -> None:
    ends[0] = -3


def _more(targets: numpy.ndarray) -> None:
    targets[1] += 1


def _unlearned(learn: numpy.ndarray) -> None:
    learn[learn.nonzero()[0][0]] = 0


@pytest.mark.parametrize(
    ("kind", "column", "dtype", "change", "part"),
    [
        ("text", "ends", "int64", _fall, "documents of its train split end before they begin"),
        ("text", "ends", "int64", _begin_before, "documents of its train split end before they begin"),
        ("chat", "targets", "int64", _more, "conversations of its train split have other targets than it says"),
        ("chat", "learn", "uint8", _unlearned, "conversations of its train split have other targets than it says"),
    ],
)
def test_a_prepared_text_whose_columns_disagree_is_refused(
    kind: str, column: str, dtype: str, change: Callable[[numpy.ndarray], None], part: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    folder = _prepared(tmp_path, kind)
    _loaded(folder, kind)
    _changed(folder / f"train-{column}.bin", dtype, change)
    with pytest.raises(UnusableText) as caught:
        _loaded(folder, kind)
    one_line(caught.value, f"{folder}: is not a prepared text", part, "prepare it again")


def _nothing_learned(folder: Path) -> None:
    for column, dtype in (("learn", "uint8"), ("targets", "int64")):
        _changed(folder / f"train-{column}.bin", dtype, lambda values: values.fill(0))


def _one_more(folder: Path, column: str, dtype: str) -> None:
    file = folder / f"train-{column}.bin"
    values = numpy.fromfile(file, dtype=dtype)
    numpy.append(values, values[-1:]).tofile(file)
    _says(folder, files={**json.loads((folder / "meta.json").read_text())["files"], file.name: file.stat().st_size})


def _says(folder: Path, **content: Any) -> None:
    file = folder / "meta.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **content}))


def _documents(folder: Path, change: int) -> None:
    documents = json.loads((folder / "meta.json").read_text())["documents"]
    _says(folder, documents={**documents, "train": documents["train"] + change})


@pytest.mark.parametrize(
    ("kind", "change", "part"),
    [
        ("chat", _nothing_learned, "a conversation of its train split has nothing to learn"),
        ("chat", lambda folder: _documents(folder, -1), "and not as many as it says"),
        ("text", lambda folder: _documents(folder, 1), "and not as many as it says"),
        ("chat", lambda folder: _one_more(folder, "learn", "uint8"), "columns of its train split have other lengths"),
        ("chat", lambda folder: _one_more(folder, "targets", "int64"), "columns of its train split have other lengths"),
        ("chat", lambda folder: _says(folder, turns={"3": [2**62, 1]}), "it counts more turns than tokens"),
        ("text", lambda folder: _says(folder, field="x" * 5000), "it says in other words than prepare writes"),
        ("text", lambda folder: _says(folder, content=[1]), "it says in other words than prepare writes"),
    ],
)
def test_a_prepared_text_that_says_what_is_not_there_is_refused(
    kind: str, change: Callable[[Path], None], part: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    folder = _prepared(tmp_path, kind)
    change(folder)
    with pytest.raises(UnusableText) as caught:
        _loaded(folder, kind)
    one_line(caught.value, f"{folder}: is not a prepared text", part, "prepare it again")
    assert len(str(caught.value)) < 600


def _beyond(tokens: numpy.ndarray) -> None:
    tokens[:] = 255


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_prepared_tokens_beyond_the_vocabulary_are_refused(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = _prepared(tmp_path, kind)
    _loaded(folder, kind).train.__getitems__([0])
    _changed(folder / "train.bin", "uint8", _beyond)
    with pytest.raises(UnusableText, match="holds the token 255, and its tokenizer has 252; prepare it again"):
        _loaded(folder, kind).train.__getitems__([0])


def test_a_run_on_tokens_beyond_the_vocabulary_ends_in_one_line(tmp_path: Path) -> None:
    folder = _prepared(tmp_path, "text")
    _changed(folder / "train.bin", "uint8", _beyond)
    flags = ["--model=llama", "--seq-len=64", "--batch-size=2", "--device=cpu", "--loader-workers=1", "--max-steps=2"]
    flags += [f"--dataset=text:{folder}", f"--tokenizer={tmp_path / 'tokenizer'}", f"--run-dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-m", "fsdp2.train", *flags],
        capture_output=True,
        text=True,
        env=python_environment(),
        timeout=200,
    )
    line = (
        "stopped: rank 0: --dataset: the prepared text holds the token 255, and its tokenizer has 252; prepare it again"
    )
    assert done.returncode == 1
    assert f"fsdp2: {line}\n" in done.stderr
    assert "Traceback" not in done.stderr
