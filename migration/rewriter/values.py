"""The value of an expression, as far as the lines around it say; and which function or class of the program is called.

Nothing is run: what isn't written out beside is unknown, and whoever asks must then leave the code alone.
"""

from __future__ import annotations

import argparse
import logging
import re
import threading
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import libcst as cst

from migration.rewriter.module import Module
from migration.rewriter.program import Program

# Classes whose methods aren't looked for among the program's; those of torch by file, since importing it takes seconds.
ELSEWHERE = (dict, list, set, str, Path, argparse.ArgumentParser, logging.Logger, threading.Thread)
OF_TORCH = {
    "_C/__init__.pyi": "TensorBase",
    "_tensor.py": "Tensor",
    "nn/modules/module.py": "Module",
    "optim/optimizer.py": "Optimizer",
    "utils/data/dataloader.py": "DataLoader",
}


@cache
def methods_elsewhere() -> frozenset[str]:
    """Names of what `ELSEWHERE` and `OF_TORCH` have, the latter by the text of the installed torch."""
    found = {name for one in ELSEWHERE for name in dir(one)}
    spec = find_spec("torch")
    assert spec is not None  # a dependency
    for file, name in OF_TORCH.items():
        text = (Path(str(spec.origin)).parent / file).read_text(encoding="utf-8")
        body = re.split(rf"^class {name}\b", text, maxsplit=1, flags=re.MULTILINE)[1]
        body = re.split(r"^(?:class|def|@)", body, maxsplit=1, flags=re.MULTILINE)[0]
        found.update(re.findall(r"^    (?:def )?(\w+)(?=[(:]| = )", body, re.MULTILINE))
    return frozenset(found)


@dataclass
class Leaf:
    """A value that is written out.

    Attributes:
        kind: "none", "symbol" (FSDP1's name in `symbol`), "call" (of FSDP1's `symbol`), "partial" (of it), "function"
            (a def or lambda of the program), "value" (anything else).
        args: of a call or partial: its arguments as they are written, keyword or position to expression.
    """

    kind: str
    node: cst.CSTNode
    module: Module
    symbol: str = ""
    args: dict[str | int, cst.BaseExpression] = field(default_factory=dict)
    spread: bool = False  # *args or **kwargs among the arguments


def arguments(call: cst.Call, skip: int = 0) -> tuple[dict[str | int, cst.BaseExpression], bool]:
    """Arguments of a call by keyword or position, from the `skip`th positional on; and whether any is spread."""
    found: dict[str | int, cst.BaseExpression] = {}
    spread, position = False, 0
    for arg in call.args:
        if arg.star:
            spread = True
        elif arg.keyword is not None:
            found[arg.keyword.value] = arg.value
        else:
            if position >= skip:
                found[position - skip] = arg.value
            position += 1
    return found, spread


def is_none(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Name) and node.value == "None"


def string(node: cst.CSTNode) -> str | None:
    if isinstance(node, (cst.SimpleString, cst.ConcatenatedString)):
        value = node.evaluated_value
        return value if isinstance(value, str) else None
    return None


def key_of(node: cst.Subscript) -> object:
    """Return the number or string that something is looked up by; None for what isn't written out."""
    index = node.slice[0].slice
    value = index.value if isinstance(index, cst.Index) else None
    return int(value.value, 0) if isinstance(value, cst.Integer) else string(value) if value is not None else None


def assignment(target: cst.CSTNode, module: Module) -> cst.Assign | cst.AnnAssign | None:
    """The statement that gives one name its value."""
    above = module.parent(target)
    if isinstance(above, cst.AnnAssign):
        return above
    assign = module.parent(above) if isinstance(above, cst.AssignTarget) else None
    return assign if isinstance(assign, cst.Assign) and len(assign.targets) == 1 else None


class Values:
    def __init__(self, program: Program) -> None:
        self.program = program

    # --- what is written out ---

    def only(self, node: cst.BaseExpression, module: Module, depth: int = 0) -> Leaf | None:
        """The one value that an expression has: written there, or assigned once to the name that it is, in the same
        function or outside of all, of names that are the same in both places. None for anything else."""
        if is_none(node):
            return Leaf("none", node, module)
        if (symbol := self.program.symbol(node, module)) is not None:
            return Leaf("symbol", node, module, symbol)
        if isinstance(node, cst.Call):
            return self._of_call(node, module)
        if isinstance(node, cst.Lambda):
            return Leaf("function", node, module)
        if not isinstance(node, cst.Name):
            unknown = (cst.Attribute, cst.Subscript, cst.IfExp, cst.BooleanOperation, cst.NamedExpr)
            return None if isinstance(node, unknown) else Leaf("value", node, module)
        bindings = module.assignments(node)
        if not bindings and node.value in ("True", "False"):
            return Leaf("value", node, module)
        if len(bindings) != 1 or depth > 4:
            return None
        if isinstance(bindings[0].node, cst.FunctionDef):
            return Leaf("function", bindings[0].node, module)
        made = assignment(bindings[0].node, module)
        leaf = self.only(made.value, module, depth + 1) if made is not None and made.value is not None else None
        if leaf is None or module.function(leaf.node) not in (None, module.function(node)):
            return None
        start, end = module.order(leaf.node), module.order(node)
        bound = [module.order(b.node) for name in module.within(leaf.node, cst.Name) for b in module.assignments(name)]
        return None if any(start < at < end for at in bound) else leaf

    def _of_call(self, node: cst.Call, module: Module) -> Leaf | None:
        if any(name == "functools.partial" for name, _ in module.qualified(node.func)) and node.args:
            args, spread = arguments(node, skip=1)
            symbol = self.program.symbol(node.args[0].value, module)
            return Leaf("partial", node, module, symbol, args, spread) if symbol is not None else None
        args, spread = arguments(node)
        symbol = self.program.symbol(node.func, module)
        return Leaf("call" if symbol is not None else "value", node, module, symbol or "", args, spread)

    # --- functions and classes of the program ---

    def calls(self, function: cst.FunctionDef, module: Module) -> list[tuple[cst.Call, Module]]:
        """Calls of a function or method, in all files that are parsed. Methods are told apart by name alone."""
        return self.program.answer("calls", function, lambda: self._calls(function, module), [])

    def _calls(self, function: cst.FunctionDef, module: Module) -> list[tuple[cst.Call, Module]]:
        owner, named = module.enclosing(function, cst.ClassDef, cst.FunctionDef), self.program.called(last(function))
        if isinstance(owner, cst.ClassDef):
            made = self.program.called(last(owner)) if last(function) == "__init__" else []
            made = [(c, where) for c, where in made if isinstance(c.func, cst.Name)]
            return made + [(c, where) for c, where in named if isinstance(c.func, cst.Attribute)]
        return [(call, where) for call, where in named if self.function(call.func, where) is function]

    def function(self, node: cst.CSTNode, module: Module) -> cst.FunctionDef | None:
        """The function of the program that a called expression is."""
        found = self.function_in(node, module)
        return found[0] if found else None

    def function_in(self, node: cst.CSTNode, module: Module) -> tuple[cst.FunctionDef, Module] | None:
        return self.program.answer("function", node, lambda: self._function_in(node, module))

    def _function_in(self, node: cst.CSTNode, module: Module) -> tuple[cst.FunctionDef, Module] | None:
        if isinstance(known := self._defined(node, module), tuple) and isinstance(known[0], cst.FunctionDef):
            return known[0], known[1]
        if not isinstance(node, cst.Attribute):
            return None
        name = node.attr.value
        if isinstance(node.value, cst.Name) and node.value.value == "self":
            owner = module.enclosing(node, cst.ClassDef)
            for statement in owner.body.body if owner is not None else ():
                if isinstance(statement, cst.FunctionDef) and last(statement) == name:
                    return statement, module
        # Of an object of the program, if one class alone has a method of that name.
        if any(imported for _, imported in module.qualified(node)) or name in methods_elsewhere():
            return None
        named = self.program.named(cst.FunctionDef, name)
        around = named[0][1].enclosing(named[0][0], cst.ClassDef, cst.FunctionDef) if len(named) == 1 else None
        return named[0] if isinstance(around, cst.ClassDef) else None

    def class_in(self, node: cst.CSTNode, module: Module) -> tuple[cst.ClassDef, Module] | None:
        """The class of the program that a called expression is."""
        known = self._defined(node, module)
        return (known[0], known[1]) if known is not None and isinstance(known[0], cst.ClassDef) else None

    def _defined(self, node: cst.CSTNode, module: Module) -> tuple[cst.CSTNode, Module] | None:
        if isinstance(node, cst.Name):
            for binding in module.assignments(node):
                if isinstance(binding.node, (cst.FunctionDef, cst.ClassDef)):
                    return binding.node, module
        place = self.program.definition(node, module) if isinstance(node, (cst.Name, cst.Attribute)) else None
        known = place[0].top_level.get(place[1]) if place is not None else None
        return (known, place[0]) if known is not None and place is not None else None


def last(node: cst.FunctionDef | cst.ClassDef) -> str:
    return node.name.value
