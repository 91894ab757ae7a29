"""`python -m fsdp2.data prepare`: what it makes is there as a whole or not at all, at whatever moment it is killed."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest

from fsdp2.config import parse
from fsdp2.data.errors import UnusableText
from fsdp2.options.errors import ConfigError
from fsdp2.run.preflight import check_data
from fsdp2_extra.text import preparing, reading, rows, text
from fsdp2_extra.text.places import find
from fsdp2_extra.text.prepared import files_of, read_meta
from fsdp2_extra.text.preparing import prepare
from fsdp2_extra.text.text import Text
from fsdp2_extra.text.tokenizer import Bytes
from fsdp2_tools.data import __main__ as command


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of each kind of file; with blocks and pieces so small that there are many of each."""
    monkeypatch.setattr(rows, "AT_A_TIME", 3)
    monkeypatch.setattr(reading, "PIECE", 64)
    folder = tmp_path / "corpus"
    folder.mkdir()
    words = ["".join(chr(97 + (number * 7 + place) % 26) for place in range(3 + number % 11)) for number in range(60)]
    (folder / "a.txt").write_text("\n".join(words * 2), newline="")
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": word * 3}) + "\n\n" for word in words[:30]))
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.table({"text": words[30:]}), folder / "c.parquet", row_group_size=8)
    (folder / "d.txt").write_bytes("é\r\n".encode() * 20 + "😀".encode() * 50 + b"\r" * 70)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def in_a_process_that_dies(function: Callable[[], Any], after: int) -> int:
    """Run a function in a process that kills itself before the `after`-th thing that it does to a file; its status."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    left = after

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    try:
        for name in ("fsync", "rename"):
            setattr(os, name, counted(getattr(os, name)))
        preparing._Output.add = counted(preparing._Output.add)  # type: ignore[method-assign]
        function()
        os._exit(0)
    except BaseException:
        os._exit(1)


def test_a_process_killed_at_any_moment_has_made_nothing(corpus: Path, tmp_path: Path) -> None:
    files, encoder = find(str(corpus)), Text(Bytes())
    prepare(files, tmp_path / "whole", encoder)
    wanted = contents(tmp_path / "whole")
    assert read_meta(tmp_path / "whole")["documents"] == {"train": 57, "test": 5}
    out, other = tmp_path / "out", tmp_path / "out.unfinished-another.host-1"
    other.mkdir()
    (other / "train.bin").touch()
    left = {other}
    for after in range(1, 1000, 7):
        status = in_a_process_that_dies(partial(prepare, files, out, encoder), after)
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert not out.exists()
        (work,) = {*tmp_path.glob("out.unfinished-*")} - {other}  # that of the one before is gone
        left.add(work)
    assert len(left) > 10
    assert contents(out) == wanted
    assert list(tmp_path.glob("out.unfinished-*")) == [other]


def test_two_that_make_the_same_leave_it_once(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, out, rename = find(str(corpus)), tmp_path / "out", os.rename

    def later(work: Path, folder: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        prepare(files, out, Text(Bytes()))
        assert work.exists()  # of the slower one, which is alive
        rename(work, folder)

    monkeypatch.setattr(os, "rename", later)
    assert prepare(files, out, Text(Bytes())) == read_meta(out)
    assert sorted(tmp_path.iterdir()) == [corpus, out]


def test_pieces_of_a_file_are_the_file(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.txt", "d.txt"):
        wanted = (corpus / name).read_text()
        (corpus / name).write_bytes(b"\xef\xbb\xbf" + (corpus / name).read_bytes())
        (file,) = find(str(corpus / name))
        for size in (8, 9, 10, 11, 64, 10_000):
            monkeypatch.setattr(reading, "PIECE", size)
            rows = list(reading.rows_of(file, "text"))
            assert "".join(row.content for row in rows) == wanted
            assert [row.begins for row in rows] == [True] + [False] * (len(rows) - 1)
            assert [row.ends for row in rows] == [False] * (len(rows) - 1) + [True]


def test_it_says_how_far_it_is(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "SAY_SECONDS", 0.0)
    said: list[str] = []
    meta = prepare(find(str(corpus)), tmp_path / "out", Text(Bytes()), say=said.append)
    found = [re.fullmatch(r"file (\d) of 4, ([\d,]+) tokens", line) for line in said]
    counts = [(int(match[1]), int(match[2].replace(",", ""))) for match in found if match]
    assert len(counts) == len(said) > 20
    assert counts == sorted(counts)
    assert counts[-1] == (4, sum(meta["tokens"].values()))


def test_the_command_and_the_run_that_takes_what_it_made(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    line = ["prepare", f"{corpus}/a.txt", f"{corpus}/*.jsonl", "--tokenizer=bytes", f"--out={out}"]
    assert command.cli(line) == 0
    assert f"--dataset text:{out} --tokenizer bytes" in capsys.readouterr().out
    before = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    assert command.cli(line) == 0  # it is there, and stays as it is
    assert before == {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    of_files = text.load(f"{corpus}/a.txt,{corpus}/b.jsonl", 8, 256, Text(Bytes()), apart=True).train
    of_folder = text.load(str(out), 8, 256, Text(Bytes()), apart=True).train
    assert numpy.array_equal(of_files.tokens, of_folder.tokens)  # type: ignore[attr-defined]
    for more, part in (
        (f"prepare {corpus}/a.txt --tokenizer=bytes --out={out}", "was made of other files, or with other settings"),
        (f"prepare {corpus}/a.txt --tokenizer={corpus} --out={out}", "has no tokenizer.json"),
        (f"prepare {corpus}/none* --tokenizer=bytes --out={out}", "there is no file of text"),
        (f"prepare {corpus} --out={out}", "the following arguments are required: --tokenizer"),
        (
            f"prepare {corpus}/a.txt --tokenizer=bytes --out={corpus}",
            "is there, and is no prepared text; choose another",
        ),
        (f"prepare {corpus}/a.txt --tokenizer=bytes --out={corpus}/a.txt", "a.txt: is there, and is no prepared text"),
        (f"prepare {corpus} --tokenizer=bytes --out={out} --chat", "has no tokenizer.json and chat template"),
    ):
        assert command.cli(more.split()) == 2
        error = capsys.readouterr().err
        assert part in error
        assert error.count("\n") == 1


def test_a_run_with_other_settings_is_refused(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    file = tmp_path / "body.jsonl"
    file.write_text('{"body": "abcdefghij"}\n' * 20)
    prepare(find(str(file)), out, Text(Bytes(), "body"))
    run = ["--model=llama", f"--dataset=text:{out}", "--seq-len=8", "--text-field=body"]
    check_data(parse(run))
    with pytest.raises(ConfigError, match="was made of the field body; add --text-field body"):
        check_data(parse(run[:-1]))
    meta = json.loads((out / "meta.json").read_text())
    of_chat = dict.fromkeys((name for name in files_of("chat") if name not in meta["files"]), 0)
    for name in of_chat:
        (out / name).touch()
    of_chat |= meta["files"]
    for change, part in (
        ({"tokenizer": "other"}, "was made with another tokenizer; give that with --tokenizer"),
        ({"kind": "chat", "field": None, "files": of_chat}, f"was prepared as chat; give it as chat:{out}"),
        ({"format": 1}, "is of another version; prepare it again"),
    ):
        (out / "meta.json").write_text(json.dumps({**meta, **change}))
        with pytest.raises(ConfigError, match=part):
            check_data(parse(run))


def test_a_file_that_changes_meanwhile_is_refused(corpus: Path, tmp_path: Path) -> None:
    files = find(str(corpus))
    (corpus / "b.jsonl").write_text("{")
    with pytest.raises(UnusableText, match="has changed while it was read"):
        prepare(files, tmp_path / "out", Text(Bytes()))
    assert list(tmp_path.iterdir()) == [corpus]
