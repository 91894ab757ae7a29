"""Programs that keep FSDP1's interface: the package that they get, and what is said of them."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from migration.rewriter import interface
from migration.rewriter.check import load
from migration.rewriter.rewrite import rewrite
from migration.rewriter.source import INTERFACE
from tests.harness import Ranks
from tests.migrate.fsdp1_cases import CASES
from tests.migrate.fsdp1_models import build, fsdp1_broadcasts_on_a_cpu, real, train
from tests.rewriter.test_commands import run
from tests.rewriter.test_rules import put_interface


def test_it_needs_torch_alone() -> None:
    trees = [ast.parse(text) for text in interface.files().values()]
    packages = {a.name.split(".")[0] for t in trees for n in ast.walk(t) if isinstance(n, ast.Import) for a in n.names}
    packages |= {
        (n.module or "").split(".")[0]
        for t in trees
        for n in ast.walk(t)
        if isinstance(n, ast.ImportFrom)
        if not n.level
    }
    assert packages - sys.stdlib_module_names == {"torch"}


def losses(folder: Path) -> dict[str, tuple[list[float], list[float]]]:
    found = {}
    with fsdp1_broadcasts_on_a_cpu(), mock.patch.object(sys, "path", [str(folder), *sys.path]):
        ours = importlib.import_module(INTERFACE)
        assert Path(str(ours.__file__)).parent == folder / INTERFACE
        for name, case in CASES.items():
            sides = []
            for fsdp in (real(), ours):
                given = {"use_orig_params": True, **case()}
                if fsdp is real():  # which has them no more
                    renamed = {"fsdp_auto_wrap_policy": "auto_wrap_policy", "ignored_params": "ignored_states"}
                    given = {renamed.get(key, key): value for key, value in given.items()}
                model = build(fsdp, **given)
                assert isinstance(model, fsdp.FullyShardedDataParallel)
                sides.append(train(model, torch.optim.SGD(model.parameters(), 0.5, momentum=0.9), 3))
            found[name] = sides[0], sides[1]
        del sys.modules[INTERFACE]
    return found


def test_each_option_gives_the_losses_of_fsdp1(ranks: Ranks, tmp_path: Path) -> None:
    put_interface(tmp_path)
    for results in ranks.run(losses, tmp_path, timeout=200):
        assert len(results) == len(CASES)
        assert [name for name, (expected, got) in results.items() if got != expected] == []


IMPORT = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
CALL = f"{IMPORT}\n\ndef made(model, **options):\n"
CALL += "    return FSDP(model, **options)\n"


def written(folder: Path, files: dict[str, str]) -> dict[str, str]:
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    result = rewrite(load([str(folder)])[0])
    assert result.undecided == []
    return {str(file.source.path.relative_to(folder)): file.data.decode() for file in result.files}


@pytest.mark.parametrize(
    ("others", "said", "where"),
    [
        ({}, "from fsdp1_interface import", "pkg"),
        ({"pkg/__init__": ""}, "from pkg.fsdp1_interface import", "pkg"),
        ({"train": "from pkg.wrap import made\n"}, "from fsdp1_interface import", ""),
        ({"pkg/train": "from wrap import made\n"}, "from fsdp1_interface import", "pkg"),
        # Two programs' folders, one package: a copy in the package, so that there is one class.
        (
            {"pkg/__init__": "", "scripts/train": f"{IMPORT}from pkg.wrap import made\nmade(0, a=FSDP)\n"},
            "from pkg.fsdp1_interface import",
            "pkg",
        ),
    ],
)
def test_there_is_one_copy_which_all_files_can_import(
    tmp_path: Path, others: dict[str, str], said: str, where: str
) -> None:
    made = written(tmp_path, {"pkg/wrap": CALL, **others})
    assert said in made["pkg/wrap.py"]
    assert said in made.get("scripts/train.py", said)
    copies = {str(Path(name).parent.parent) for name in made if INTERFACE in name}
    assert copies == {where or "."}
    assert {Path(name).name: text for name, text in made.items() if INTERFACE in name} == interface.files()


@pytest.mark.parametrize("what", ["folder", "link", "folder of links"])
def test_another_folder_of_its_name_stays(tmp_path: Path, what: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "wrapped.py").touch()
    tmp_path /= "program"
    tmp_path.mkdir()
    if what == "link":
        (tmp_path / INTERFACE).symlink_to(elsewhere)
    else:
        (tmp_path / INTERFACE).mkdir()
    if what == "folder of links":
        (tmp_path / INTERFACE / "wrapped.py").symlink_to(elsewhere / "wrapped.py")
    (tmp_path / "train.py").write_text(CALL)
    (problem,) = rewrite(load([str(tmp_path)])[0]).undecided
    assert problem.blocking
    assert "rename it" in problem.why


def test_files_that_cannot_share_a_copy_are_asked(tmp_path: Path) -> None:
    files = {"one/a": CALL, "two/b": f"{IMPORT}print(FSDP)\n", "main/c": "import a, b\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / f"{name}.py").write_text(text)
    (problem,) = rewrite(load([str(tmp_path)])[0]).undecided
    assert problem.blocking
    assert "need one copy of FSDP1's interface: one, two" in problem.why


def test_a_second_rewrite_changes_nothing(tmp_path: Path) -> None:
    for name, text in written(tmp_path, {"train": CALL}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    result: Any = rewrite(load([str(tmp_path)])[0])
    assert (result.files, result.undecided, result.account) == ([], [], [])


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        # model.module is the model.
        ("def unwrap(m):\n    while hasattr(m, 'module'):\n        m = m.module\n    return m\n", "FC08"),
        ("def unwrap(m):\n    return unwrap(m.module) if hasattr(m, 'module') else m\n", "FC08"),
        ("def kind(m: FSDP):\n    return type(m.module).__name__\n", "FC08"),
        ("def kind(m: FSDP):\n    return m.module.__class__\n", "FC08"),
        # The interface's class is made of a module.
        ("class Mine(FSDP):\n    def __init__(self, options, model):\n        super().__init__(model)\n", "FC05"),
        ("def offload(m):\n    for handle in m._all_handles:\n        print(handle.flat_param)\n", "FC31"),
    ],
)
def test_what_would_go_wrong_when_it_runs_is_marked(tmp_path: Path, lines: str, code: str) -> None:
    (tmp_path / "train.py").write_text(CALL + "\n\n" + lines)
    result = rewrite(load([str(tmp_path)])[0])
    assert {problem.code for problem in result.undecided} == {code}
    assert f"# fsdp2: {code} " in result.files[0].data.decode()


def test_a_dotted_name_beside_an_import_by_another(tmp_path: Path) -> None:
    lines = "import torch.distributed as dist\n\n\ndef ask(m):\n"
    lines += "    return isinstance(m, dist.fsdp.FullyShardedDataParallel)\n"
    (tmp_path / "train.py").write_text(CALL + "\n\n" + lines)
    made = rewrite(load([str(tmp_path)])[0]).files[0].data.decode()
    assert "return isinstance(m, FSDP)" in made


def test_what_a_library_shards_stays_though_a_test_shards_itself(tmp_path: Path) -> None:
    """Its models would be FSDP1's own, which the interface knows nothing of."""
    (tmp_path / "test_save.py").write_text(f"{CALL}\n\nimport save\n")
    text = f"from composer import Trainer\n{IMPORT}\n\ndef save(m):\n    return FSDP.optim_state_dict(m, Trainer(m))\n"
    (tmp_path / "save.py").write_text(text)
    result = rewrite(load([str(tmp_path)])[0])
    assert {problem.code for problem in result.undecided} == {"FC21"}
    assert not any(INTERFACE in file.data.decode() for file in result.files)


def test_what_it_cannot_do_is_marked_before_it_runs(tmp_path: Path) -> None:
    lines = {
        "FD03": "FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)",
        "FM22": "model.register_comm_hook(None, hook)",
        "FC31": "handle = model._handle",
        "FX03": "flat = FlatParameter",
    }
    text = CALL.replace(" as FSDP", " as FSDP, StateDictType, FlatParameter") + "\n\ndef use(hook, **options):\n"
    text += "    model = made(None, **options)\n" + "".join(f"    {line}\n" for line in lines.values())
    (tmp_path / "train.py").write_text(text)
    result = rewrite(load([str(tmp_path)])[0])
    assert {problem.code for problem in result.undecided} == set(lines)
    assert not any(problem.blocking for problem in result.undecided)
    made = result.files[0].data.decode()
    assert "from fsdp1_interface import FullyShardedDataParallel as FSDP" in made
    for code, line in lines.items():
        assert f"# fsdp2: {code} " in made.partition(f"    {line}\n")[0].splitlines()[-1], code


def test_what_a_library_shards_hides_no_class_that_is_derived(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"{IMPORT}\n\nclass Mine(FSDP):\n    pass\n")
    text = "from composer import Trainer\nfrom mine import Mine\n\ndef ask(m: Mine):\n    return isinstance(m, Mine)\n"
    (tmp_path / "ask.py").write_text(text)
    result = rewrite(load([str(tmp_path)])[0])
    assert [each.shown for each in result.account if each.code == "FC36"] == ["Mine", "Mine"]


def test_all_that_is_not_plain_is_listed_by_both_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n\n\ndef make(net, own, given):\n"
        "    other = FSDP(net, mixed_precision=given)\n    return other, FSDP(own, ignored_modules=[own.head])\n"
    )
    for command in ("check", "rewrite"):
        run(command, path)
        said = capsys.readouterr().err
        assert f"not all is plain: {path}:5:39 FA07 it is decided elsewhere, or at run time: write one value" in said
        assert re.search(rf"; {re.escape(str(path))}:6:45 FA08 \w+ \w+", said), "each in words"


def test_a_write_that_works_is_not_said_to_be_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    loop = "    for p in model.parameters():\n        p.clamp_(-1, 1)\n"
    path.write_text(f"{IMPORT}\n\ndef make(net):\n    model = FSDP(net)\n{loop}")
    run("check", "--all", path)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " FC27 [works as it is]" in line]
    assert "the interface shards a model again after an evaluation" in line
