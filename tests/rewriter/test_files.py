"""check and rewrite on notebooks, and on files that can't be read or aren't Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rewriter.source import LIMIT
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
        "model = torch.nn.Linear(2, 2)\nmodel = FSDP(model)\n",
        "norm = model.clip_grad_norm_(1.0)",
    )
    path.write_text(notebook(*cells))
    assert run("check", "--all", path) == 1
    printed = capsys.readouterr().out
    assert f"{path}:cell 4:2:9 FA01" in printed
    assert f"{path}: imports of FSDP1 in lines cell 1:3\n" in printed
    assert run("rewrite", "--write", path) == 0
    assert path.read_text() == notebook(
        "!pip install torch\nimport torch\nfrom torch.distributed.fsdp import fully_shard",
        cells[1],
        "model = torch.nn.Linear(2, 2)\nfully_shard(model)\n",
        "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()",
    )


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
    assert "no use of FSDP1 is left\n" in capsys.readouterr().out


def test_control_characters_of_a_file_are_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.py"
    path.write_text(PROGRAM.replace("use_orig_params=True", 'device_id="\x1b[31m"'))
    run("check", path)
    run("rewrite", path)
    assert "\x1b" not in capsys.readouterr().out
