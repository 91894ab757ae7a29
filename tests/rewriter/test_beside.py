"""The file that programs get beside them: FSDP1's options mean there what they mean to FSDP1."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecision

from rewriter import beside
from rewriter.check import load
from rewriter.rewrite import rewrite
from tests.harness import Ranks
from tests.migrate.fsdp1_cases import CASES
from tests.migrate.fsdp1_models import build, fsdp1_broadcasts_on_a_cpu, real, train


def test_it_is_one_file_that_needs_torch_alone() -> None:
    tree = ast.parse(beside.text())
    packages = {alias.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    packages |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert packages - sys.stdlib_module_names == {"torch"}
    assert max(map(len, beside.text().splitlines())) <= 120
    assert "shim" not in beside.text()


def losses(folder: Path) -> dict[str, tuple[list[float], list[float]]]:
    made = runpy.run_path(str(folder / f"{beside.NAME}.py"))
    ours = cast(ModuleType, SimpleNamespace(FullyShardedDataParallel=made["ShardedLikeFSDP1"]))
    found = {}
    with fsdp1_broadcasts_on_a_cpu():
        for name, case in CASES.items():
            sides = []
            for fsdp in (real(), ours):
                given = {"use_orig_params": True, **case()}
                if fsdp is real():  # which has them no more
                    renamed = {"fsdp_auto_wrap_policy": "auto_wrap_policy", "ignored_params": "ignored_states"}
                    given = {renamed.get(key, key): value for key, value in given.items()}
                model = build(fsdp, **given)
                assert fsdp is real() or isinstance(model, made["ShardedLikeFSDP1"])
                sides.append(train(model, torch.optim.SGD(model.parameters(), 0.5, momentum=0.9), 3))
            found[name] = sides[0], sides[1]
    plain = nn.Linear(2, 2)
    assert not isinstance(plain, made["ShardedLikeFSDP1"])
    with pytest.raises(made["Unsupported"], match="keep_low_precision_grads=True"):
        made["shard_like_fsdp1"](plain, mixed_precision=MixedPrecision(keep_low_precision_grads=True))
    assert not isinstance(plain, FSDPModule)
    assert made["gather_in"](plain, "extra_repr") is plain
    return found


def test_each_option_gives_the_losses_of_fsdp1(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / f"{beside.NAME}.py").write_text(beside.text())
    for results in ranks.run(losses, tmp_path, timeout=200):
        assert len(results) == len(CASES)
        assert [name for name, (expected, got) in results.items() if got != expected] == []


CALL = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n\n\ndef made(model, **options):\n"
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
    ("others", "said"),
    [
        ({}, "from fsdp1_options import"),
        ({"pkg/__init__": ""}, "from .fsdp1_options import"),
        ({"train": "from pkg.wrap import made\n"}, "from pkg.fsdp1_options import"),
        ({"pkg/train": "from wrap import made\n"}, "from fsdp1_options import"),
    ],
)
def test_it_is_imported_as_the_files_beside_it_are(tmp_path: Path, others: dict[str, str], said: str) -> None:
    made = written(tmp_path, {"pkg/wrap": CALL, **others})
    assert said in made["pkg/wrap.py"]
    assert made["pkg/fsdp1_options.py"] == beside.text()


def test_another_file_of_its_name_stays(tmp_path: Path) -> None:
    (tmp_path / f"{beside.NAME}.py").write_text("LAYERS = 2\n")
    (tmp_path / "train.py").write_text(CALL)
    (problem,) = rewrite(load([str(tmp_path)])[0]).undecided
    assert problem.blocking
    assert "rename it" in problem.why


def test_a_second_rewrite_changes_nothing(tmp_path: Path) -> None:
    for name, text in written(tmp_path, {"train": CALL}).items():
        (tmp_path / name).write_text(text)
    result: Any = rewrite(load([str(tmp_path)])[0])
    assert (result.files, result.undecided, result.account) == ([], [], [])
