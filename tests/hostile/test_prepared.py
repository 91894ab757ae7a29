"""Text that a stranger has written or prepared: what no text is, and what its columns disagree about."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from fsdp2.data.errors import UnusableText
from fsdp2_extra.text import text
from fsdp2_extra.text.places import find
from fsdp2_extra.text.reading import rows_of
from fsdp2_extra.text.text import encoder_of
from fsdp2_tools.data.__main__ import cli
from tests.harness import python_environment
from tests.hostile.common import one_line
from tests.test_chat import PLAIN, make_tokenizer, talk


def test_half_a_character_in_a_conversation(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for line in (talk("hello", "h\ud83d"), {**talk("a", "b"), "tools": [{"\udc00": 1}]}):
        file.write_text(json.dumps(talk("whole", "\U0001f600")) + "\n" + json.dumps(line) + "\n")
        with pytest.raises(UnusableText) as caught:
            list(rows_of(find(str(file))[0], {}))
        one_line(caught.value, f"{file}, line 2: has half of a character, which no text has; leave it out")


Prepared = Callable[[str], Path]


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return functools.cache(lambda kind: _prepare(tmp_path_factory.mktemp("made"), kind))


@pytest.fixture
def prepared(once: Prepared, tmp_path: Path) -> Prepared:
    """Prepares text or chat of its own for a test, and the tokenizer beside it."""
    return lambda kind: Path(shutil.copytree(once(kind).parent, tmp_path / "made")) / kind


def _prepare(tmp_path: Path, kind: str) -> Path:
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


def _doubled(learn: numpy.ndarray) -> None:
    learn *= 2


@pytest.mark.parametrize(
    ("kind", "column", "dtype", "change", "part"),
    [
        ("text", "ends", "int64", _fall, "documents of its train split end before they begin"),
        ("text", "ends", "int64", _begin_before, "documents of its train split end before they begin"),
        ("chat", "targets", "int64", _more, "conversations of its train split have other targets than it says"),
        ("chat", "learn", "uint8", _unlearned, "conversations of its train split have other targets than it says"),
        ("chat", "learn", "uint8", _doubled, "tokens of its train split are learned 2 times"),
    ],
)
def test_a_prepared_text_whose_columns_disagree_is_refused(
    kind: str, column: str, dtype: str, change: Callable[[numpy.ndarray], None], part: str, prepared: Prepared
) -> None:
    pytest.importorskip("transformers")
    folder = prepared(kind)
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


def _documents(folder: Path, change: int, split: str = "train") -> None:
    documents = json.loads((folder / "meta.json").read_text())["documents"]
    _says(folder, documents={**documents, split: documents.get(split, 0) + change})


@pytest.mark.parametrize(
    ("kind", "change", "part"),
    [
        ("chat", _nothing_learned, "answers, and not as many as it says"),
        ("chat", lambda folder: _documents(folder, -1), "and not as many as it says"),
        ("text", lambda folder: _documents(folder, 1), "and not as many as it says"),
        ("chat", lambda folder: _one_more(folder, "learn", "uint8"), "columns of its train split have other lengths"),
        ("chat", lambda folder: _one_more(folder, "targets", "int64"), "columns of its train split have other lengths"),
        ("text", lambda folder: _documents(folder, 5, "more"), "it counts documents of others than train, test"),
        ("chat", lambda folder: _says(folder, turns={"3": [2**62, 1]}), "it has 40 answers, and not as many as"),
        ("chat", lambda folder: _says(folder, turns={}), "it has 40 answers, and not as many as it says"),
        ("chat", lambda folder: _says(folder, turns={" 1_0 ": [40, 0]}), "its turns end with tokens that are none"),
        ("chat", lambda folder: _says(folder, turns={"-1": [40, 0]}), "its turns end with tokens that are none"),
        ("text", lambda folder: _says(folder, files={}), "it counts files of others than train.bin, train-ends.bin"),
        ("text", lambda folder: _says(folder, kind="x"), "it is x of uint8"),
        ("text", lambda folder: _says(folder, dtype="int64"), "it is text of int64"),
        ("text", lambda folder: _says(folder, begin={}), "its documents begin, or are found, in no way that"),
        ("text", lambda folder: _says(folder, field=None), "it says in other words than prepare writes"),
        ("text", lambda folder: _says(folder, template="x"), "it says more: template"),
        ("text", lambda folder: os.truncate(folder / "meta.json", 1 << 25), "is larger than any that prepare writes"),
        ("text", lambda folder: _says(folder, field="x" * 5000), "it says in other words than prepare writes"),
        ("chat", lambda folder: _says(folder, longest=[[5, "x" * 9000]]), "it names conversations in another way"),
        ("chat", lambda folder: _says(folder, unlearned=["x"] * 99), "it names conversations in another way"),
        ("chat", lambda folder: _says(folder, longest=[["5", "x"]]), "it counts 5"),
        ("text", lambda folder: _says(folder, content=[1]), "it says in other words than prepare writes"),
    ],
)
def test_a_prepared_text_that_says_what_is_not_there_is_refused(
    kind: str, change: Callable[[Path], None], part: str, prepared: Prepared
) -> None:
    pytest.importorskip("transformers")
    folder = prepared(kind)
    change(folder)
    with pytest.raises(UnusableText) as caught:
        _loaded(folder, kind)
    one_line(caught.value, f"{folder}: is not a prepared text", part, "prepare it again")
    assert len(str(caught.value)) < 600


def test_text_in_which_nothing_is_learned_is_refused(tmp_path: Path) -> None:
    """A document's first token is no target, and these have no other."""
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": "abc"[i % 3]}) + "\n" for i in range(400)))
    with pytest.raises(UnusableText) as caught:
        text.load(str(file), 8, 256, encoder_of("text", "bytes"), apart=True)
    one_line(caught.value, f"{file}: its train split has nothing to learn", "give longer ones")
    assert len(text.load(str(file), 8, 256, encoder_of("text", "bytes"), apart=False).train) > 20


def _beyond(tokens: numpy.ndarray) -> None:
    tokens[:] = 255


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_prepared_tokens_beyond_the_vocabulary_are_refused(kind: str, prepared: Prepared) -> None:
    pytest.importorskip("transformers")
    folder = prepared(kind)
    _loaded(folder, kind).train.__getitems__([0])
    _changed(folder / "train.bin", "uint8", _beyond)
    with pytest.raises(UnusableText, match="holds the token 255, and its tokenizer has 252; prepare it again"):
        _loaded(folder, kind).train.__getitems__([0])


def test_a_run_on_tokens_beyond_the_vocabulary_ends_in_one_line(prepared: Prepared, tmp_path: Path) -> None:
    folder = prepared("text")
    _changed(folder / "train.bin", "uint8", _beyond)
    flags = ["--model=llama", "--seq-len=64", "--batch-size=2", "--device=cpu", "--loader-workers=1", "--max-steps=2"]
    flags += [f"--dataset=text:{folder}", f"--tokenizer={folder.parent / 'tokenizer'}", f"--run-dir={tmp_path / 'run'}"]
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
