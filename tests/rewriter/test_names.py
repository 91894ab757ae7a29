"""Each way in which FSDP1's names go through a program: it is found, and moved, or marked with how it goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewriter.check import account, load
from rewriter.rewrite import rewrite

CLASS = "from torch.distributed.fsdp import FullyShardedDataParallel"
FSDP = f"{CLASS} as FSDP\n"
PACKAGE = "import torch.distributed.fsdp as fsdp\n"
USES = (
    "def made(net):\n    model = Wrapper(net)\n    if isinstance(model, Wrapper):\n        model.clip_grad_norm_(1.0)\n"
    "    with Wrapper.summon_full_params(model, writeback=False):\n        print(model.weight)\n    return model\n"
)
MADE = FSDP + "model = FSDP(net)\n"

# The program, and a line of what becomes of it.
MOVED = {
    "alias of the module": (
        f"{CLASS}\nWrapper = FullyShardedDataParallel\n{USES}",
        "if isinstance(model, FSDPModule):",
    ),
    "alias in a function": (
        f"{CLASS}\ndef made(net):\n    Wrapper = FullyShardedDataParallel\n    return Wrapper(net)\n",
        "return fully_shard(net)",
    ),
    "alias of an alias": (f"{FSDP}First = FSDP\nWrapper = First\n{USES}", "with full_params(model):"),
    "tuple": (f"{CLASS}\nWrapper, other = FullyShardedDataParallel, 3\n{USES}", "other = 3"),
    "or None": (
        f"try:\n    {CLASS} as Wrapper\nexcept ImportError:\n    Wrapper = None\n{USES}",
        "if isinstance(model, FSDPModule):",
    ),
    "getattr": (f'{PACKAGE}Wrapper = getattr(fsdp, "FullyShardedDataParallel")\n{USES}', "with full_params(model):"),
    "getattr, called": (
        f'{PACKAGE}model = getattr(fsdp, "FullyShardedDataParallel")(net)\n',
        "model = fully_shard(net)",
    ),
    "dict of the package": (
        f'{PACKAGE}Wrapper = fsdp.__dict__["FullyShardedDataParallel"]\n{USES}',
        "fully_shard(net)",
    ),
    "importlib": (
        'import importlib\nfsdp = importlib.import_module("torch.distributed.fsdp")\n'
        "model = fsdp.FullyShardedDataParallel(net)\n",
        "model = fully_shard(net)",
    ),
    "only for types": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch.distributed.fsdp import "
        'FullyShardedDataParallel as FSDP\ndef step(model: "FSDP | None"):\n    model.clip_grad_norm_(1.0)\n',
        'def step(model: "FSDPModule | None"):\n    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)',
    ),
    "annotation": (
        f"{FSDP}def step(model: FSDP):\n    with model.no_sync():\n        model().backward()\n",
        "with no_sync(model):",
    ),
    "type": (f"{MADE}print(type(model) is FSDP)\n", "print(isinstance(model, FSDPModule))"),
    "name of the type": (
        f'{MADE}print(type(model).__name__ != "FullyShardedDataParallel")\n',
        "print(not isinstance(model, FSDPModule))",
    ),
    "class of the model": (
        f'{MADE}print(model.__class__.__name__ == "FullyShardedDataParallel")\n',
        "print(isinstance(model, FSDPModule))",
    ),
    "method by name": (
        f'from contextlib import nullcontext\n{MADE}with getattr(model, "no_sync", nullcontext)():\n    pass\n',
        "with no_sync(model):",
    ),
    "method by name, later": (
        f'{MADE}context = getattr(model, "no_sync")\n',
        "context = functools.partial(no_sync, model)",
    ),
    "dictionary": (f'{FSDP}KINDS = {{"fsdp": FSDP}}\nmodel = KINDS[kind](net)\n', '{"fsdp": ShardedLikeFSDP1}'),
    "dictionary, got": (f"{FSDP}KINDS = dict(fsdp=FSDP)\nmodel = KINDS.get(kind)(net)\n", "fsdp=ShardedLikeFSDP1"),
    "list": (f"{FSDP}for wrapper in [FSDP, print]:\n    wrapper(net)\n", "in [ShardedLikeFSDP1, print]:"),
    "attribute of a class": (
        f"{FSDP}class Strategy:\n    wrapper = FSDP\n    def make(self, net):\n        model = self.wrapper(net)\n"
        "        model.clip_grad_norm_(1.0)\n",
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    ),
    "default": (f"{FSDP}def made(net, wrapper=FSDP):\n    return wrapper(net)\n", "wrapper=ShardedLikeFSDP1"),
    "returned, called": (f"{FSDP}def kind():\n    return FSDP\nmodel = kind()(net)\n", "return ShardedLikeFSDP1"),
    "chosen": (f"{FSDP}Wrapper = FSDP if sharded else print\nWrapper(net)\n", "= ShardedLikeFSDP1 if sharded"),
    "asked for": (f'{MADE}print(hasattr(model, "clip_grad_norm_"))\n', "print(isinstance(model, FSDPModule))"),
}

# The program, the code of the mark, a part of what it says, and whether it stops the move.
MARKED = {
    "field": (
        f"from dataclasses import dataclass\n{FSDP}@dataclass\nclass Config:\n    wrapper: type = FSDP\n",
        "FC04",
        "a field holds",
        True,
    ),
    "argument": (f"{FSDP}build(FSDP, net)\n", "FC04", "build in line 2 gets the class", True),
    "returned": (f"{FSDP}def wrapper():\n    return FSDP\n", "FC04", "a function returns the class", True),
    "subclass": (f"{FSDP}class Mine(FSDP):\n    pass\nmodel = Mine(net)\n", "FC05", "", True),
    "method of a part": (f"{MADE}model.layers[0].clip_grad_norm_(1.0)\n", "FM13", "", False),
    "other method by name": (f'{MADE}clip = getattr(model, "clip_grad_norm_")\n', "FM13", "", False),
    "method by name of anything": (f'{MADE}clip = getattr(other, "no_sync", None)\n', "FM12", "", False),
}  # fmt: skip


def moved(folder: Path, **files: str) -> tuple[dict[str, str], list[tuple[str, str, bool]]]:
    """What becomes of each file, and what is marked."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    result = rewrite(load([str(folder)])[0])
    made = {file.source.path.stem: file.data.decode() for file in result.files}
    return {**files, **made}, [(problem.code, problem.why, problem.blocking) for problem in result.undecided]


@pytest.mark.parametrize("way", MOVED)
def test_it_is_moved(tmp_path: Path, way: str) -> None:
    program, line = MOVED[way]
    files, marks = moved(tmp_path, program=program)
    assert marks == []
    assert line in files["program"]
    (tmp_path / "program.py").write_text(files["program"])
    assert account(load([str(tmp_path)])[0]) == [], files["program"]


@pytest.mark.parametrize("way", MARKED)
def test_it_is_marked(tmp_path: Path, way: str) -> None:
    program, code, why, blocks = MARKED[way]
    (tmp_path / "program.py").write_text(program)
    assert code in {finding.code for finding in account(load([str(tmp_path)])[0])}
    files, marks = moved(tmp_path, program=program)
    assert [(c, b) for c, said, b in marks if c == code and why in said] == [(code, blocks)], marks
    lines = [line for line in files["program"].splitlines(keepends=True) if not line.lstrip().startswith("# fsdp2:")]
    assert ("".join(lines) == program) == blocks


def test_it_is_handed_on_through_packages(tmp_path: Path) -> None:
    files, marks = moved(
        tmp_path,
        base=f"{CLASS}\nWrapper, other = FullyShardedDataParallel, 3\n",
        middle="from base import Wrapper as Sharded, other\n",
        end="from middle import Sharded\nmodel = Sharded(net)\nprint(isinstance(model, Sharded))\n",
    )
    assert marks == []
    assert "model = fully_shard(net)\nprint(isinstance(model, FSDPModule))" in files["end"]
    assert files["base"] == "other = 3\n"
    assert files["middle"] == "from base import other\n"


def test_a_model_of_another_file(tmp_path: Path) -> None:
    files, marks = moved(tmp_path, base=MADE, end="from base import model\nmodel.clip_grad_norm_(1.0)\n")
    assert marks == []
    assert "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)" in files["end"]
