"""What a docstring of a public function must say, found in the function's own code.

A call is followed through functions of the packages, by the name under which the module knows them, and through
private methods of the same class. What is called through an object isn't followed.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import re
import sys
from types import FunctionType, ModuleType
from typing import Any

# Calls of torch that every rank of a group has to make.
COLLECTIVES = frozenset(
    {"all_gather", "all_gather_object", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single",
     "barrier", "broadcast", "broadcast_object_list", "distribute_tensor", "full_tensor", "gather_object",
     "init_device_mesh", "new_group", "reduce_scatter_tensor", "scatter_object_list"}
)  # fmt: skip
# What torch.distributed.checkpoint calls by common names; with `no_dist` they work in one process.
OF_DCP = frozenset({"save", "load", "async_save"})
# Says nothing of what went wrong.
ANY_ERROR = (Exception, BaseException, object)
Code = FunctionType


def tree_of(function: Code) -> ast.Module:
    lines = inspect.getsource(function).splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    return ast.parse("\n".join(line[indent:] for line in lines))


def unwrapped(found: Any) -> Code | None:
    """The function behind a property, a classmethod or a context manager."""
    found = getattr(found, "fget", None) or getattr(found, "__func__", found)
    found = inspect.unwrap(found) if callable(found) else found
    return found if isinstance(found, FunctionType) else None


def target(node: ast.Call, function: Code, owner: type | None) -> tuple[str, Code | None]:
    """What a call is of: its last name, and the function of ours that it is, if that can be seen."""
    names = vars(sys.modules[function.__module__])
    if isinstance(node.func, ast.Name):
        return node.func.id, unwrapped(names.get(node.func.id))
    if not isinstance(node.func, ast.Attribute):
        return "", None
    place, name = node.func.value, node.func.attr
    if isinstance(place, ast.Name) and place.id == "self" and owner is not None:
        return name, unwrapped(inspect.getattr_static(owner, name, None))
    if isinstance(place, ast.Name) and isinstance(names.get(place.id), ModuleType):
        return name, unwrapped(getattr(names[place.id], name, None))
    return name, None


def is_ours(function: Code | None) -> bool:
    return function is not None and function.__module__.partition(".")[0] in ("fsdp2", "fsdp2_extra")


@functools.cache
def collective(function: Code, owner: type | None) -> str | None:
    """The collective that a function leads to, or None."""
    calls = [
        target(node, function, owner)
        for node in ast.walk(tree_of(function))
        if isinstance(node, ast.Call) and not any(keyword.arg == "no_dist" for keyword in node.keywords)
    ]
    for name, found in calls:
        of_dcp = name in OF_DCP and found is not None and found.__module__.startswith("torch.distributed.checkpoint")
        if of_dcp or (name in COLLECTIVES and not is_ours(found)):
            return name
    for name, found in calls:
        if is_ours(found) and found is not None and found is not function:
            further = collective(found, owner if name.startswith("_") else None)
            if further is not None:
                return f"{name} -> {further}"
    return None


@functools.cache
def raised(function: Code, owner: type | None) -> frozenset[type[BaseException]]:
    """The errors that a function raises itself, or by a private function beside it, and doesn't catch.

    What it defines inside, and hands to others, is theirs to handle.
    """
    names = vars(builtins) | vars(sys.modules[function.__module__])
    found: set[type[BaseException]] = set()

    def visit(node: ast.AST, caught: tuple[type, ...]) -> None:
        if isinstance(node, ast.Try):
            types = [one for handler in node.handlers for one in _classes(handler.type, names)]
            for guarded in node.body:
                visit(guarded, (*caught, *types))
            for other in (*node.handlers, *node.orelse, *node.finalbody):
                visit(other, caught)
            return
        if isinstance(node, ast.FunctionDef | ast.Lambda) and node is not top:
            return
        errors: set[type[BaseException]] = set()
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            errors.update(_classes(node.exc.func, names))
        if isinstance(node, ast.Call):
            name, code = target(node, function, owner)
            if name.startswith("_") and is_ours(code) and code is not None and code is not function:
                errors |= raised(code, owner)
        found.update(error for error in errors if not issubclass(error, caught))
        for inner in ast.iter_child_nodes(node):
            visit(inner, caught)

    top: ast.AST = tree_of(function).body[0]
    visit(top, ())
    return frozenset(error for error in found if not issubclass(error, AssertionError))


def _classes(node: ast.expr | None, names: dict[str, Any]) -> list[type[BaseException]]:
    """Of what stands behind `except`, or is called behind `raise`; a bare `except` is all."""
    if node is None:
        return [BaseException]
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    found = [names.get(part.id) for part in parts if isinstance(part, ast.Name)]
    return [one for one in found if isinstance(one, type) and issubclass(one, BaseException)]


def has_shape(docstring: str) -> bool:
    """Whether it gives a tensor's shape: (N, T), 0-d, that of another, or a part of a whole one."""
    return re.search(r"0-d|\([\w…/ ]+,|\(…\)|shape|whole|rows|shard|range|block", docstring) is not None


def takes_or_gives_tensors(function: Code) -> bool:
    """Tensors of a known kind; a mapping of names holds any."""
    kinds = [str(kind) for kind in function.__annotations__.values()]
    return any(
        "Tensor" in re.findall(r"[\w.]+", kind) and "Mapping" not in kind and "dict" not in kind for kind in kinds
    )


def says(docstring: str, error: type[BaseException]) -> bool:
    """Whether a docstring names an error, or a kind of error that it is one of."""
    return any(re.search(rf"\b{kind.__name__}\b", docstring) for kind in error.__mro__ if kind not in ANY_ERROR)
