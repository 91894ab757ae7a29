"""Who copies a function out of a room finds beside it what it takes, gives and raises."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import torch
from torch import nn

import fsdp2
import fsdp2_extra
from fsdp2.checkpoint import full_dtensor, restore
from fsdp2.checkpoint.files import Files
from fsdp2.checkpoint.state import Part
from fsdp2.parallel import groups
from fsdp2.parallel.mesh import make_mesh
from tests.docs import commands
from tests.docstring_rules import Code, collective, has_shape, raised, says, takes_or_gives_tensors, unwrapped

ROOMS = (
    "parallel",
    "checkpoint",
    "models",
    "data",
    "parallelize",
    "train",
    "text",
    "baselines",
    "low_precision",
    "remote",
)
# Methods of torch's and Python's classes, which say themselves what they are for.
OF_OTHERS = ("torch.", "io", "argparse")
# What classes implement without inheriting it.
PROTOCOLS = (Files, Part, torch.amp.GradScaler, io.RawIOBase)


def modules() -> Iterator[ModuleType]:
    for found in (
        *pkgutil.walk_packages(fsdp2.__path__, "fsdp2."),
        *pkgutil.walk_packages(fsdp2_extra.__path__, "fsdp2_extra."),
    ):
        if found.name.split(".")[1] in ROOMS and not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


def _undocumented(module: ModuleType) -> Iterator[str]:
    for name, one in vars(module).items():
        if name.startswith("_") or getattr(one, "__module__", None) != module.__name__:
            continue
        if isinstance(one, FunctionType) and not inspect.getdoc(one):
            yield name
        if not inspect.isclass(one):
            continue
        for method, value in vars(one).items():
            if method.startswith("_") or not isinstance(value, FunctionType | property | classmethod | staticmethod):
                continue
            if any(vars(base).get(method) and base.__module__.startswith(OF_OTHERS) for base in one.__mro__[1:]):
                # A forward of a model says what shapes it takes; torch can't.
                if not (issubclass(one, nn.Module) and method == "forward") or value.__doc__ or one.__doc__:
                    continue
                yield f"{name}.{method}"
            elif not _is_explained(one, method):
                yield f"{name}.{method}"


def _is_explained(one: type, method: str) -> bool:
    of_class = f"{method}:" in (one.__doc__ or "")  # among its attributes
    return of_class or any(inspect.getdoc(getattr(place, method, None)) for place in (one, *PROTOCOLS))


def _documented(module: ModuleType) -> Iterator[tuple[str, Code, type | None, str]]:
    """Each public function and method that is written in a module, its class, and what both say of it."""
    for name, one in vars(module).items():
        if name.startswith("_") or getattr(one, "__module__", None) != module.__name__:
            continue
        for method, value in vars(one).items() if inspect.isclass(one) else ():
            function = unwrapped(value)
            if function is None or function.__code__.co_filename != module.__file__:  # a dataclass's, a protocol's
                continue
            if not method.startswith("_") or method == "__init__":
                places = (
                    *(base for base in one.__mro__ if base.__module__.startswith(("fsdp2.", "fsdp2_extra."))),
                    *PROTOCOLS,
                )
                said = [
                    inspect.getdoc(getattr(place, method, None)) or "" for place in places if hasattr(place, method)
                ]
                yield (
                    f"{name}.{method}",
                    function,
                    one,
                    " ".join([*said, *(base.__doc__ or "" for base in one.__mro__[:-1])]),
                )
        function = None if inspect.isclass(one) else unwrapped(one)
        if function is not None:
            yield name, function, None, function.__doc__ or ""


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_each_public_function_of_a_room_that_is_copied_has_a_docstring(module: ModuleType) -> None:
    assert list(_undocumented(module)) == []


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_a_docstring_names_collectives_errors_and_shapes(module: ModuleType) -> None:
    missing = []
    for name, function, owner, said in _documented(module):
        if (called := collective(function, owner)) and "collective" not in said.lower():
            missing.append(f"{name} leads to a collective ({called})")
        missing += [f"{name} raises {error.__name__}" for error in raised(function, owner) if not says(said, error)]
        if ".checkpoint." not in module.__name__ and takes_or_gives_tensors(function) and not has_shape(said):
            missing.append(f"{name} has a tensor without a shape")
    assert missing == []


def test_the_rules_see_what_they_are_for() -> None:
    assert collective(full_dtensor.full_model_state, None) == "_gathered -> full_tensor"
    assert collective(restore.restore_newest, None) is not None
    assert collective(groups.shard_groups, None) is None
    assert raised(make_mesh, None) == {ValueError}
    assert says("Raises OSError.", FileNotFoundError)
    assert not says("Raises OSError.", ValueError)
    assert not has_shape("The sum of the losses.")


Documented = ast.Module | ast.ClassDef | ast.FunctionDef


def _in_all_rooms() -> Iterator[tuple[Documented, str, str]]:
    """Each module, class and function, with its docstring and its place."""
    root = Path(fsdp2.__path__[0]).parent
    for file in (file for room in (*commands.ROOMS, "benchmarks") for file in (root / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, Documented):
                yield node, ast.get_docstring(node) or "", f"{file}:{getattr(node, 'lineno', 1)}"


QUESTIONS = re.compile(r"(What|Whether|How|Which|Where|Why|As)\b(?!.*\?)")


def test_no_docstring_begins_with_a_question() -> None:
    """A docstring names a thing or begins with a verb: "What …" and "Where …" make a reader wait for the noun, and
    "As …" sends them elsewhere. A tool may begin with the question that it answers."""
    assert [f"{place}: {said}" for _, said, place in _in_all_rooms() if QUESTIONS.match(said)] == []


def test_a_docstring_says_whether_only_of_a_bool() -> None:
    """Of what gives nothing, or something else, "Return whether" tells a reader to look for a bool."""
    said_of = {place: said for node, said, place in _in_all_rooms() if not _gives_bools(node)}
    assert [f"{place}: {said}" for place, said in said_of.items() if re.match("Returns? whether|True if", said)] == []


def _gives_bools(node: Documented) -> bool:
    return isinstance(node, ast.FunctionDef) and "bool" in ast.unparse(node.returns or ast.Constant(None))
