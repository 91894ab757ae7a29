"""Who copies a function out of a room finds beside it what it takes, gives and raises."""

from __future__ import annotations

import importlib
import inspect
import io
import pkgutil
from collections.abc import Iterator
from types import FunctionType, ModuleType

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.checkpoint.files import Files
from fsdp2.checkpoint.state import Part

ROOMS = ("parallel", "checkpoint", "models", "data", "parallelize")
# Methods of torch's and Python's classes, which say themselves what they are for.
OF_OTHERS = ("torch.", "io", "argparse")
# What classes implement without inheriting it.
PROTOCOLS = (Files, Part, torch.amp.GradScaler, io.RawIOBase)


def modules() -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(fsdp2.__path__, "fsdp2."):
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


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_each_public_function_of_a_room_that_is_copied_has_a_docstring(module: ModuleType) -> None:
    assert list(_undocumented(module)) == []
