"""Each way in which FSDP1's names go through a program: it is found, and moved."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from torch.distributed.fsdp import FullyShardedDataParallel

from migration.rewriter.check import account, load
from migration.rewriter.constructor_calls import ORDER
from migration.rewriter.rewrite import rewrite

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
        "if isinstance(model, Wrapper):",
    ),
    "alias in a function": (
        f"{CLASS}\ndef made(net):\n    Wrapper = FullyShardedDataParallel\n    return Wrapper(net)\n",
        "return Wrapper(net)",
    ),
    "alias of an alias": (f"{FSDP}First = FSDP\nWrapper = First\n{USES}", "Wrapper = First"),
    "tuple": (f"{CLASS}\nWrapper, other = FullyShardedDataParallel, 3\n{USES}", "from fsdp1_interface import"),
    "or None": (
        f"try:\n    {CLASS} as Wrapper\nexcept ImportError:\n    Wrapper = None\n{USES}",
        "if isinstance(model, FSDPModule):",
    ),
    "getattr": (
        f'{PACKAGE}Wrapper = getattr(fsdp, "FullyShardedDataParallel")\n{USES}',
        "Wrapper = FullyShardedDataParallel",
    ),
    "getattr, called": (
        f'{PACKAGE}model = getattr(fsdp, "FullyShardedDataParallel")(net)\n',
        "model = fully_shard(net)",
    ),
    "dict of the package": (
        f'{PACKAGE}Wrapper = fsdp.__dict__["FullyShardedDataParallel"]\n{USES}',
        "Wrapper = FullyShardedDataParallel",
    ),
    "importlib": (
        'import importlib\nfsdp = importlib.import_module("torch.distributed.fsdp")\n'
        "model = fsdp.FullyShardedDataParallel(net)\n",
        "model = FullyShardedDataParallel(net)",
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
        'with getattr(model, "no_sync", nullcontext)():',
    ),
    "method by name, later": (
        f'{MADE}context = getattr(model, "no_sync")\n',
        'context = getattr(model, "no_sync")',
    ),
    "dictionary": (f'{FSDP}KINDS = {{"fsdp": FSDP}}\nmodel = KINDS[kind](net)\n', '{"fsdp": FSDP}'),
    "dictionary, got": (f"{FSDP}KINDS = dict(fsdp=FSDP)\nmodel = KINDS.get(kind)(net)\n", "fsdp=FSDP"),
    "list": (f"{FSDP}for wrapper in [FSDP, print]:\n    wrapper(net)\n", "in [FSDP, print]:"),
    "attribute of a class": (
        f"{FSDP}class Strategy:\n    wrapper = FSDP\n    def make(self, net):\n        model = self.wrapper(net)\n"
        "        model.clip_grad_norm_(1.0)\n",
        "        model.clip_grad_norm_(1.0)",
    ),
    "default": (f"{FSDP}def made(net, wrapper=FSDP):\n    return wrapper(net)\n", "wrapper=FSDP"),
    "returned, called": (f"{FSDP}def kind():\n    return FSDP\nmodel = kind()(net)\n", "return FSDP"),
    "chosen": (f"{FSDP}Wrapper = FSDP if sharded else print\nWrapper(net)\n", "= FSDP if sharded"),
    "field": (
        f"from dataclasses import dataclass\n{FSDP}@dataclass\nclass Config:\n    wrapper: type = FSDP\n",
        "wrapper: type = FSDP",
    ),
    "argument": (f"{FSDP}build(FSDP, net)\n", "build(FSDP, net)"),
    "subclass": (f"{FSDP}class Mine(FSDP):\n    pass\nmodel = Mine(net)\n", "class Mine(FSDP):"),
    "method of a part": (f"{MADE}model.layers[0].clip_grad_norm_(1.0)\n", "model.layers[0].clip_grad_norm_(1.0)"),
    "other method by name": (f'{MADE}clip = getattr(model, "clip_grad_norm_")\n', 'getattr(model, "clip_grad_norm_")'),
    "method by name of anything": (
        f'{MADE}clip = getattr(other, "no_sync", None)\n',
        'getattr(other, "no_sync", None)',
    ),
    "star": (
        "from torch.distributed.fsdp import *\nbuild(FullyShardedDataParallel)\n",
        "from fsdp1_interface import *",
    ),
    "of the package": (f"{PACKAGE}build(fsdp.FullyShardedDataParallel)\n", "build(FullyShardedDataParallel)"),
    "compared, and passed on": (f"{MADE}build(FSDP)\nprint(type(model) is FSDP)\n", "isinstance(model, FSDPModule)"),
    "two statements in a line": (
        f"import os; {FSDP}build(FSDP)\n",
        "import os; from fsdp1_interface import FullyShardedDataParallel as FSDP\n",
    ),
    "asked for": (f'{MADE}print(hasattr(model, "clip_grad_norm_"))\n', 'print(hasattr(model, "clip_grad_norm_"))'),
}


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


def test_it_is_handed_on_through_packages(tmp_path: Path) -> None:
    files, marks = moved(
        tmp_path,
        base=f"{CLASS}\nWrapper, other = FullyShardedDataParallel, 3\n",
        middle="from base import Wrapper as Sharded, other\n",
        end="from middle import Sharded\nmodel = Sharded(net)\nprint(isinstance(model, Sharded))\n",
    )
    assert marks == []
    assert "from fsdp1_interface import FullyShardedDataParallel\n" in files["base"]
    assert files["middle"] == "from base import Wrapper as Sharded, other\n"


def test_a_model_of_another_file(tmp_path: Path) -> None:
    files, marks = moved(tmp_path, base=MADE, end="from base import model\nmodel.clip_grad_norm_(1.0)\n")
    assert marks == []
    assert "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)" in files["end"]


def test_the_arguments_that_are_written_out_are_torchs() -> None:
    assert tuple(inspect.signature(FullyShardedDataParallel).parameters) == ORDER


def test_what_may_be_something_else_is_not_moved(tmp_path: Path) -> None:
    """Places of a container of which nothing else is known, and reads above the line that shards."""
    files, marks = moved(
        tmp_path,
        program=f"{FSDP}def one(part):\n    return FSDP(part) if isinstance(part, Net) else part\n"
        "def prepare(*parts):\n    return [one(part) for part in parts]\n"
        "def main(net, sgd):\n    print(net.state_dict())\n    net, other = FSDP(net), 3\n    print(net.state_dict())\n"
        "    model, optimizer = prepare(Net(), sgd)\n    print(optimizer.state_dict())\n",
    )
    assert marks == []
    assert "    print(net.state_dict())\n    net, other =" in files["program"]
    assert "print(optimizer.state_dict())" in files["program"]
    assert "print(get_model_state_dict(net" in files["program"], "the rest is moved"


def test_a_method_of_an_unknown_object_is_the_one_of_that_name(tmp_path: Path) -> None:
    """But not one that containers and models have too, nor one of several."""
    files, marks = moved(
        tmp_path,
        program=f"{FSDP}class Trainer:\n    def fit(self, model):\n        self.model = model\n"
        "        save(model.state_dict())\n    def made(self):\n        return self.model\n"
        "    def update(self, other):\n        save(other.state_dict())\n"
        "def main(config, net, kept):\n    trainer = load(config)\n    trainer.fit(FSDP(net))\n"
        "    print(trainer.made().state_dict())\n    kept.update(FSDP(net))\n",
    )
    assert marks == []
    assert "save(get_model_state_dict(model" in files["program"]
    assert "print(get_model_state_dict(trainer.made()" in files["program"]
    assert "save(other.state_dict())" in files["program"]
