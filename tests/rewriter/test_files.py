"""check and rewrite on notebooks, and on files that can't be read or aren't Python."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import libcst as cst
import pytest

from migration.rewriter import check, methods, scopes
from migration.rewriter.configs import Config
from migration.rewriter.edits import Edits
from migration.rewriter.module import Module
from migration.rewriter.program import Program
from migration.rewriter.source import LIMIT
from tests.rewriter.test_commands import PROGRAM, run


def notebook(*cells: str) -> str:
    empty: dict[str, Any] = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    made: list[dict[str, Any]] = [{**empty, "source": source} for source in cells]
    made.insert(1, {"cell_type": "markdown", "metadata": {}, "source": ["FSDP of *ours*"]})
    return json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def test_notebooks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tour.ipynb"
    cells = (
        "!pip install torch\nimport torch\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP",
        "%%bash\necho FSDP(model)",
        "files = !ls\nmodel = torch.nn.Linear(2, 2)\nmodel = FSDP(model)\nmodel?\n",
        "norm = model.clip_grad_norm_(1.0)",
    )
    path.write_text(notebook(*cells))
    assert run("check", "--all", path) == 1
    printed = capsys.readouterr().out
    assert f"{path}:cell 4:3:9 FA01" in printed
    assert f"{path}: imports of FSDP1 in lines cell 1:3\n" in printed
    assert run("rewrite", "--write", path) == 0
    assert path.read_text() == notebook(
        "!pip install torch\nimport torch\nfrom torch.distributed.fsdp import fully_shard",
        cells[1],
        "files = !ls\nmodel = torch.nn.Linear(2, 2)\nfully_shard(model)\nmodel?\n",
        "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()",
    )


@pytest.mark.parametrize(
    "layout", [{"indent": 2}, {"indent": "\t"}, {"separators": (",", ":")}, {"indent": 1, "ensure_ascii": False}]
)
@pytest.mark.parametrize(("newline", "end"), [("\n", "\n"), ("\r\n", "\r\n"), ("\n", "")])
def test_the_layout_of_a_notebooks_file_stays(tmp_path: Path, layout: dict[str, Any], newline: str, end: str) -> None:
    def made(*cells: str) -> bytes:
        found = json.loads(notebook(*cells, "'Größe'"))
        return (json.dumps(found, **layout).replace("\n", newline) + end).encode()

    path = tmp_path / "tour.ipynb"
    path.write_bytes(made("from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nFSDP(net)"))
    assert run("rewrite", "--write", path) == 0
    assert path.read_bytes() == made("from torch.distributed.fsdp import fully_shard\nfully_shard(net)")


def test_a_file_that_is_not_python_is_one_line_and_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.py"
    text = "from torch.distributed.fsdp import FullyShardedDataParallel\ndef f(:\n"
    path.write_text(text)
    assert run("check", path) == 1
    printed = capsys.readouterr()
    assert f"{path}:2:1 FC24 [to decide first] line 2: not Python" in printed.out
    assert printed.err.count("\n") == 1
    run("rewrite", "--write", path)
    assert "left as it is" in capsys.readouterr().err
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("name", "data", "part"),
    [
        ("zeros.py", b"from x import y\0\0", "is not text; left out"),
        ("latin.py", b"# \xff\xfe\nx = 1\n", "is not text in its encoding, utf-8"),
        ("huge.py", b"#" * (LIMIT + 1), "aren't read"),
        ("deep.py", b"x = " + b"(" * 5000 + b")" * 5000, ""),
        ("list.ipynb", b"[1]", "is not a notebook"),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, data: bytes, part: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    assert run("rewrite", "--write", path) == 0
    printed = capsys.readouterr().err
    assert part in printed
    assert path.read_bytes() == data


@pytest.mark.parametrize("text", ["FSDP = fsdp.FullyShardedDataParallel", "from torch.distributed.fsdp import *"])
def test_a_file_that_cannot_be_read_and_names_fsdp1_is_something_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """As a notebook whose pictures make it too large."""
    path = tmp_path / "huge.ipynb"
    path.write_text(" " * LIMIT + text)
    assert run("check", path) == 1
    printed = capsys.readouterr()
    assert f"{path}:1:1 FC24 [to decide first] " in printed.out
    assert "aren't read" in printed.err
    path.write_text(" " * LIMIT + "import torch")
    assert run("check", path) == 0
    assert "nothing of FSDP1 is left to move\n" in capsys.readouterr().out


def test_control_characters_of_a_file_are_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.py"
    path.write_text(PROGRAM.replace("use_orig_params=True", 'device_id="\x1b[31m"'))
    run("check", path)
    run("rewrite", path)
    assert "\x1b" not in capsys.readouterr().out


DEEP = {"parentheses": ("(", ")"), "mixed": ("(not -(lambda: {1: [", "]}))"), "not": ("not ", "")}


@pytest.mark.parametrize("kind", DEEP)
def test_a_file_that_is_nested_too_deeply_is_one_line_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    # libcst's parser would die of its stack, and the command with it.
    begin, end = DEEP[kind]
    deep = tmp_path / "deep.py"
    deep.write_text(f"from torch.distributed.fsdp import FullyShardedDataParallel\nx = {begin * 5000}1{end * 5000}\n")
    (tmp_path / "train.py").write_text(PROGRAM)
    assert run("check", tmp_path) == 1
    printed = capsys.readouterr()
    assert printed.err == f"fsdp2: {deep}: is nested too deeply to be parsed; left as it is\n"
    assert f"{deep}:1:1 FC24" in printed.out
    assert f"{tmp_path / 'train.py'}: imports of FSDP1" in printed.out


def test_half_of_a_character_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tour.ipynb").write_text(notebook("x = '\\ud800'", "y = 1").replace("\\\\ud800", "\\ud800"))
    (tmp_path / "seven.py").write_bytes(b"# -*- coding: utf-7 -*-\nx = '+2AA-'\n")
    (tmp_path / "train.py").write_text(PROGRAM)
    assert run("check", tmp_path) == 1
    assert [line.rpartition("/")[2] for line in capsys.readouterr().err.splitlines()] == [
        "seven.py: holds half of a surrogate pair; left out",
        "tour.ipynb: holds half of a surrogate pair; left out",
    ]


def test_nothing_outside_of_a_folder_is_changed_through_a_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outside, folder = tmp_path / "outside.py", tmp_path / "program"
    folder.mkdir()
    outside.write_text(PROGRAM)
    (folder / "train.py").symlink_to(outside)
    (folder / "again.py").symlink_to("real.py")
    (folder / "real.py").write_text(PROGRAM)
    run("rewrite", "--write", folder)
    assert f"{folder / 'train.py'}: leads out of the folder; left out, name the file itself" in capsys.readouterr().err
    assert outside.read_text() == PROGRAM
    assert "fully_shard" in (folder / "real.py").read_text()
    run("rewrite", "--write", folder / "train.py")
    assert "fully_shard" in outside.read_text()


def test_links_to_nothing_and_terabytes_end_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop.py").symlink_to("loop.py")
    (tmp_path / ".#train.py").symlink_to("user@host.1")  # as Emacs marks a file that is edited
    (tmp_path / "sparse.py").touch()
    os.truncate(tmp_path / "sparse.py", 2 << 40)  # looked through, it would take an hour
    (tmp_path / "train.py").write_text(PROGRAM)
    assert run("check", tmp_path) == 1
    printed = capsys.readouterr()
    assert "loop.py: can't be read: Too many levels of symbolic links; left out" in printed.err
    assert ".#train.py: can't be read: No such file or directory; left out" in printed.err
    assert f"{tmp_path / 'sparse.py'}:1:1 FC24" in printed.out
    assert f"{tmp_path / 'train.py'}: imports of FSDP1" in printed.out


def test_what_else_is_on_the_line_of_a_call_stays(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    head = "from torch.distributed.fsdp import {}\nimport torch\n"
    lines = (
        ("x = 1; model = FSDP(model); y = 2", "x = 1; fully_shard(model); y = 2"),
        ("if x: model = FSDP(model); print(x)", "if x: model = fully_shard(model); print(x)"),
        ("model = FSDP(model)  # the student's", "fully_shard(model)  # the student's"),
        ("other = torch.optim.SGD([x], lr=1e-3)", "other = torch.optim.SGD([x], lr=1e-3)"),
    )
    before, after = ("\n".join(one) + "\n" for one in zip(*lines, strict=True))
    path.write_text(head.format("FullyShardedDataParallel as FSDP") + before)
    run("rewrite", "--write", path)
    assert path.read_text() == head.format("fully_shard") + after


def _two_texts(edits: Edits, span: tuple[int, int], text: object, kept: tuple[int, int] = (0, 0)) -> None:
    raise ValueError(f"two texts for one place: {edits.module.text[slice(*span)]!r}")


def _fails(*given: Any, **named: Any) -> Any:
    raise AssertionError


FAULTS: dict[str, tuple[type | ModuleType, str, Callable[..., Any], str]] = {
    "parsing": (scopes.Scopes, "_import", _fails, "AssertionError in here: "),
    "a rule": (methods, "forward", _fails, "AssertionError in here: "),
    "a change": (Edits, "replace", _two_texts, "ValueError in here: two texts for one place: 'FSDP(net)'"),
    "its text": (Edits, "render", _fails, "AssertionError in here: "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_in_which_anything_fails_is_one_line_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    owner, name, fails, said = FAULTS[fault]
    original = getattr(owner, name)

    def only_in_odd(*given: Any, **named: Any) -> Any:
        here = [getattr(one, "module", one) for one in given]
        odd = any(isinstance(one, Module) and one.path.name == "odd.py" for one in here)
        inside = isinstance(given[0], scopes.Scopes) and "odd" in str(getattr(given[1], "names", ""))
        return (fails if odd or inside else original)(*given, **named)

    monkeypatch.setattr(owner, name, only_in_odd)
    if fault == "parsing":
        monkeypatch.setitem(scopes._VISITS, cst.ImportFrom, only_in_odd)
    odd = tmp_path / "odd.py"
    odd.write_text("from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, odd\nodd = FSDP(net)\n")
    (tmp_path / "train.py").write_text(PROGRAM)
    assert run("check", tmp_path) == 1
    printed = capsys.readouterr()
    assert printed.err == f"fsdp2: {odd}: {said}; left as it is\n"
    assert f"{odd}:1:1 FC24 [to decide first] {said}" in printed.out
    assert f"{tmp_path / 'train.py'}: imports of FSDP1" in printed.out
    assert run("rewrite", "--write", tmp_path) == 1
    assert "fully_shard" in (tmp_path / "train.py").read_text()
    assert "FSDP(net)" in odd.read_text()


def test_a_failure_that_leaving_its_file_out_does_not_end_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    program, _ = check.load([str(tmp_path)])
    turns = []

    def fails(program: Program, **named: object) -> None:
        turns.append(1)
        module.span(cst.Name("x"))  # a node of no file

    (module,) = program.parsed
    monkeypatch.setattr(check, "rewrite", fails)
    with pytest.raises(KeyError):
        check.account(program)
    assert len(turns) == 2, "once with the file, once without"


def test_a_configuration_in_which_a_rule_fails_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Config, "findings", _fails)
    path = tmp_path / "config.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n")
    (tmp_path / "train.py").write_text(PROGRAM)
    assert run("check", tmp_path) == 1
    assert capsys.readouterr().err == f"fsdp2: {path}: AssertionError in here: ; left out\n"


def test_a_configuration_that_cannot_be_read_is_something_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_bytes(b"fsdp_config:\n  size: 1 # \x85\n")
    assert run("check", tmp_path) == 1
    printed = capsys.readouterr().out
    assert f"{tmp_path / 'a.yaml'}:1:1 FC24 [to decide first] a file that wasn't read" in printed


def test_a_name_that_is_no_text_keeps_no_other_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / os.fsdecode(b"\xff.py")).write_text(PROGRAM)
    (tmp_path / "b.py").write_text(PROGRAM)
    for form in ("text", "json", "github", "sarif"):
        assert run("check", "--all", f"--format={form}", tmp_path) == 1
        printed = capsys.readouterr().out
        assert "b.py" in printed
        assert "udcff.py" in printed
