"""check and rewrite on files: how findings are printed, what is kept of a file, several files, bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp2.options.errors import ConfigError
from migration.__main__ import main
from migration.rewriter import cli, finding
from migration.rewriter.check import account, load
from migration.rewriter.symbols import BY_CODE

PROGRAM = """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def shard(model):  # ∑ kept
\tmodel = FSDP(model, use_orig_params=True)
\treturn model
"""
BLOCKED = """\
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision


def shard(model, init):
    model = FSDP(model, mixed_precision=MixedPrecision(keep_low_precision_grads=True))
    model.clip_grad_norm_(1.0)
    return model
"""


def run(*arguments: str | Path) -> int:
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def test_decisions_stand_first_and_what_needs_none_is_counted(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = "\ndef count(net):\n    return sum(p.numel() for p in shard(net).parameters())\n"
    program.write_text(PROGRAM + "\nfrom torch.distributed.fsdp import ShardingStrategy\n" + counted)
    assert run("check", program) == 1
    first, second, *end = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{program}:12:16 FC17 [to decide] p.numel(): ")
    assert first.endswith("(docs/migration-options.md#fc17)")
    assert second == f"{program}: imports of FSDP1 in lines 2, 9"
    counts = "5 uses of FSDP1 in 1 file: 1 to decide, 2 imports, 2 moved"
    assert end == [f"{counts} (--all lists them); `rewrite` shows what it moves"]
    assert run("check", "--all", program) == 1
    again, second, third, fourth, *end = capsys.readouterr().out.splitlines()
    assert again == first
    assert third.startswith(f"{program}:6:10 FA01 [moved] FSDP: ")
    assert fourth.startswith(f"{program}:6:22 FA14 [moved] use_orig_params=True: ")
    assert end == [f"{counts}; `rewrite` shows what it moves"]
    assert run("rewrite", program) == 1
    page = (Path(__file__).parent.parent.parent / "docs" / "migration-options.md").read_text()
    assert '<a id="fa14"></a>' in page


def test_what_is_decided_first_is_said_of_its_file(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "blocked.py"
    blocked.write_text(BLOCKED)
    assert run("rewrite", tmp_path) == 1
    printed = capsys.readouterr()
    assert f"+++ b/{program}" in printed.out
    assert f"fsdp2: {blocked}: a constructor has to be decided first" in printed.err


def test_what_waits_is_told_from_what_is_decided_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "blocked.py"
    path.write_text(BLOCKED)
    assert run("check", "--format", "json", path) == 1
    entries = json.loads(capsys.readouterr().out)
    assert {entry["status"] for entry in entries} == {"to decide first", "waits for a decision"}
    assert [entry["code"] for entry in entries if entry["status"] == "to decide first"] == ["FP04"]
    assert run("rewrite", path) == 1


def test_a_file_that_can_not_be_read_is_left_for_both_commands(tmp_path: Path) -> None:
    path = tmp_path / "old.py"
    path.write_text("from torch.distributed.fsdp import FullyShardedDataParallel\nprint 'python 2'\n")
    assert run("check", path) == run("rewrite", path) == 1


def test_findings_for_programs(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "--format", "json", program) == 1
    entries = json.loads(capsys.readouterr().out)
    assert [set(entry) for entry in entries] == [
        {"file", "line", "col", "code", "status", "message", "replacement"} for _ in range(3)
    ]
    assert (entries[1]["line"], entries[1]["col"], entries[1]["code"], entries[1]["status"]) == (6, 10, "FA01", "moved")
    assert run("check", "--format", "github", program) == 1
    assert f"::notice file={program},line=6,col=22,title=FA14::" in capsys.readouterr().out
    assert run("check", "--format", "sarif", program) == 1
    sarif = json.loads(capsys.readouterr().out)
    (made,) = sarif["runs"]
    result = made["results"][2]
    assert made["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "FA14"
    assert result["locations"][0]["physicalLocation"]["region"] == {"startLine": 6, "startColumn": 22}


def test_nothing_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plain.py"
    path.write_text("import torch\n\nmodel = torch.nn.Linear(1, 1)\n")
    assert run("check", path) == 0
    assert capsys.readouterr().out == "nothing of FSDP1 is left to move\n"
    assert run("check", "--format", "json", path) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert run("rewrite", path) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "prepare",
    [
        lambda text: text.encode(),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: ("# -*- coding: latin-1 -*-\n" + text.replace("∑", "é")).encode("latin-1"),
    ],
    ids=["plain", "crlf", "bom", "latin-1"],
)
def test_what_a_file_keeps(tmp_path: Path, prepare: Callable[[str], bytes]) -> None:
    path = tmp_path / "script.py"
    path.write_bytes(prepare(PROGRAM))
    path.chmod(0o750)
    assert run("rewrite", "--write", path) == 0
    made = path.read_bytes()
    expected = prepare(
        PROGRAM.replace("FullyShardedDataParallel as FSDP", "fully_shard").replace(
            "model = FSDP(model, use_orig_params=True)", "fully_shard(model)"
        )
    )
    assert made == expected
    assert path.stat().st_mode & 0o777 == 0o750
    assert run("rewrite", "--write", path) == 0
    assert path.read_bytes() == made
    assert [entry.name for entry in tmp_path.iterdir()] == ["script.py"]


def test_a_difference_is_printed_and_nothing_written(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("rewrite", program) == 0
    printed = capsys.readouterr().out
    assert f"--- a/{program}\n+++ b/{program}\n" in printed
    assert "-\tmodel = FSDP(model, use_orig_params=True)\n+\tfully_shard(model)\n" in printed
    assert program.read_text() == PROGRAM


def test_what_is_not_certain_stays_and_is_marked_once(tmp_path: Path) -> None:
    path = tmp_path / "blocked.py"
    path.write_text(BLOCKED)
    assert run("rewrite", "--write", path) == 1
    made = path.read_text()
    mark = f"    # fsdp2: FP04 {BY_CODE['FP04'].note} (docs/migration-options.md#fp04)\n"
    assert made == BLOCKED.replace("    model = FSDP(", mark + "    model = FSDP(")
    assert run("rewrite", "--write", path) == 1
    assert path.read_text() == made


def test_a_program_that_cannot_be_decided_keeps_no_other_from_being_moved(tmp_path: Path) -> None:
    (tmp_path / "blocked.py").write_text(BLOCKED)
    (tmp_path / "beside.py").write_text(PROGRAM)
    (tmp_path / "user.py").write_text(PROGRAM.replace("import torch\n", "import torch\nimport blocked\n"))
    assert run("rewrite", "--write", tmp_path) == 1
    assert "fully_shard(model)" in (tmp_path / "beside.py").read_text()
    assert "FSDP(model, use_orig_params=True)" in (tmp_path / "user.py").read_text()
    assert "model.clip_grad_norm_(1.0)" in (tmp_path / "blocked.py").read_text()


@pytest.mark.parametrize("line", ["    other(options)", "    options.update(extra)", "    del options['device_id']"])
def test_a_dictionary_that_anything_may_change_stays_as_it_is(tmp_path: Path, line: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel as FSDP\n\n\n"
        "def shard(model, low, other, extra):\n    options = {'device_id': 0}\n    if low:\n"
        f"        options['cpu_offload'] = CPUOffload(True)\n{line}\n    return FSDP(model, **options)\n"
    )
    before = path.read_text()
    assert run("rewrite", "--write", path) == 0
    made = path.read_text()
    assert made.endswith(before.partition("\n")[2])
    assert "from torch.distributed.fsdp import CPUOffload\n" in made


def test_a_model_that_a_library_shards_is_left_to_the_library(tmp_path: Path) -> None:
    """Its configuration says by which FSDP: whatever is done with the model here would be wrong for the other."""
    path = tmp_path / "script.py"
    text = (
        "from accelerate import Accelerator\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n\n\n"
        "def norm(model):\n    model = Accelerator().prepare(model)\n    with FSDP.summon_full_params(model):\n"
        "        return sum(p.norm() for p in model.parameters())\n"
    )
    path.write_text(text)
    assert run("rewrite", "--write", path) == 1
    made = path.read_text()
    assert "# fsdp2: FC21 a library shards the model" in made
    assert [line for line in made.splitlines() if "# fsdp2:" not in line] == text.splitlines()


def test_values_of_other_files_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "__init__.py").write_text("from .precision import *\nfrom .wrapping import get_wrapper\n")
    (tmp_path / "policies" / "precision.py").write_text(
        "import torch\nfrom torch.distributed.fsdp import MixedPrecision\n\n"
        "bf16 = MixedPrecision(param_dtype=torch.bfloat16)\n"
    )
    (tmp_path / "policies" / "wrapping.py").write_text(
        "import functools\n\nimport torch\nfrom torch.distributed.fsdp.wrap import transformer_auto_wrap_policy\n\n\n"
        "def get_wrapper():\n    return functools.partial(transformer_auto_wrap_policy, "
        "transformer_layer_cls={torch.nn.Linear})\n"
    )
    train = tmp_path / "train.py"
    train.write_text(
        "import policies\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "from transformers import AutoModel\n\n\ndef main():\n    model = AutoModel.from_pretrained('x')\n"
        "    model = FSDP(model, auto_wrap_policy=policies.get_wrapper(), mixed_precision=policies.bf16)\n"
    )
    before = {path: path.read_text() for path in tmp_path.glob("policies/*.py")}
    assert run("rewrite", "--write", tmp_path) == 0
    assert {path: path.read_text() for path in tmp_path.glob("policies/*.py")} == before
    call = "FSDP(model, auto_wrap_policy=policies.get_wrapper(), mixed_precision=policies.bf16)"
    assert f"    model = {call}\n" in train.read_text()
    assert (tmp_path / "fsdp1_interface" / "wrapped.py").exists()
    assert run("check", tmp_path) == 0


def test_values_of_files_that_were_not_given_are_asked_at_run_time(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    text = (
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nfrom elsewhere import bf16\n\n\n"
        "def main(model):\n    return FSDP(model, mixed_precision=bf16)\n"
    )
    path.write_text(text)
    assert run("rewrite", "--write", path) == 0
    assert "from fsdp1_interface import FullyShardedDataParallel as FSDP" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["check", "no/such/file.py"], "no/such/file.py: no such file or folder"),
        (["rewrite", __file__ + "/x"], "no such file"),
        (["check"], "required: PATH"),
        (["check", "--format", "xml", "x.py"], "invalid choice: 'xml'"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        main(arguments)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_extra_is_named_where_it_is_missing(program: Path) -> None:
    (program.parent / "libcst.py").write_text("raise ImportError")
    code = (
        "import sys, importlib.util as u; find = u.find_spec;"
        "u.find_spec = lambda n, *a: None if n == 'libcst' else find(n, *a);"
        "from fsdp2.run.process import ending; from migration.__main__ import main\n"
        f"with ending.exit_status(): main(['check', {str(program)!r}])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ)
    assert ended.returncode == 2
    assert "pip install -e '.[migrate]'" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(program: Path) -> None:
    program.parent.chmod(0o500)
    try:
        with pytest.raises(ConfigError, match="it is as it was"):
            main(["rewrite", "--write", str(program)])
    finally:
        program.parent.chmod(0o700)
    assert program.read_text() == PROGRAM


@pytest.mark.parametrize(
    "line",
    [
        "trainer = L.Trainer(strategy='fsdp')",
        'fabric = Fabric(devices=2, strategy="fsdp_cpu_offload")',
        "from accelerate import FullyShardedDataParallelPlugin",
        "from lightning.pytorch.strategies import FSDPStrategy",
    ],
)
def test_fsdp1_that_a_library_makes_is_found(tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "script.py"
    path.write_text("import lightning as L\n\n" + line + "\n")
    assert run("check", path) == 1
    assert f"{path}:3:" in (printed := capsys.readouterr().out)
    assert " FC21 [to decide] " in printed


def test_what_works_on_and_would_better_stand_elsewhere_is_found(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing\n"
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "other = torch.compile(torch.nn.Linear(2, 2)).requires_grad_(False)\n"
        "model = FSDP(torch.nn.Linear(2, 2))\n"
        "apply_activation_checkpointing(model)\n"
        "model.requires_grad_(True)\n"
        "for parameter in model.parameters():\n"
        "    parameter.requires_grad_(False)\n"
        "model = torch.compile(model)\n"
    )
    found = [(finding.line, finding.code) for finding in account(load([str(script)])[0])]
    wanted = [(6, "FC23"), (7, "FC18"), (9, "FC18"), (10, "FC25")]
    assert [each for each in found if each[1] in ("FC18", "FC23", "FC25")] == wanted


def test_the_formats_are_those_of_the_findings() -> None:
    assert tuple(finding.FORMATS) == cli.FORMAT_NAMES
