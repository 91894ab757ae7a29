"""MixedPrecision(**settings) spelled out, argument by argument, where it is known which settings there are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import libcst as cst

from rewriter.edits import Edits
from rewriter.module import Module
from rewriter.precision import FIELDS
from rewriter.program import Program
from rewriter.source import Source
from rewriter.values import Values, dictionary

SYMBOL = "MixedPrecision"


def spelled_out(program: Program) -> dict[Path, Source]:
    """Files of the program with such calls, by their paths; none if there are none."""
    values, made = Values(program), {}
    for module in program.relevant():
        edits = Edits(module)
        for call in module.all(cst.Call) if SYMBOL in module.text and module.source.notebook is None else ():
            if program.symbol(call.func, module) == SYMBOL:
                for arg in call.args:
                    if arg.star == "**" and (given := _given(values, arg.value, module)):
                        edits.replace(module.span(arg), ", ".join(given))
        if edits.changed:
            made[module.path.resolve()] = dataclasses.replace(module.source, text=edits.render((0, len(module.text))))
    return made


def _given(values: Values, node: cst.BaseExpression, module: Module) -> list[str]:
    """The arguments that a spread stands for; none if they aren't known."""
    shown = module.code(node)
    if isinstance(node, cst.Call) and len(node.args) == 1 and module.code(node.func).endswith(("asdict", "vars")):
        owners = values.classes(node.args[0].value, module)
        keys = {tuple(_fields(owner)) for owner, _ in owners}
        return [f"{key}={module.code(node.args[0].value)}.{key}" for key in _one(keys)]
    if not isinstance(node, (cst.Name, cst.Attribute, cst.Subscript)) or _changed(node, module):
        return []
    keys = set()
    for leaf in values.leaves(node, module):
        entries = dictionary(leaf.node) if leaf.kind == "value" and isinstance(leaf.node, cst.BaseExpression) else None
        keys.add(tuple(key or "" for key, _ in entries or ()))
    return [f'{key}={shown}["{key}"]' for key in _one(keys)]


def _one(keys: set[tuple[str, ...]]) -> tuple[str, ...]:
    """The names of the arguments, if they are the same on all paths."""
    found = next(iter(keys), ()) if len(keys) == 1 else ()
    return found if set(found) <= set(FIELDS) else ()


def _fields(owner: cst.ClassDef) -> list[str]:
    lines = [line for line in owner.body.body if isinstance(line, cst.SimpleStatementLine)]
    return [s.target.value for line in lines for s in line.body
            if isinstance(s, cst.AnnAssign) and isinstance(s.target, cst.Name)]  # fmt: skip


def _changed(node: cst.BaseExpression, module: Module) -> bool:
    """Whether something may be put into the dictionary after it was written."""
    root = node
    while isinstance(root, (cst.Subscript, cst.Attribute)):
        root = root.value
    for read in module.references(root) if isinstance(root, cst.Name) else ():
        above = module.parent(read)
        while isinstance(above, (cst.Subscript, cst.Attribute)):
            read, above = above, module.parent(above)
        if isinstance(above, (cst.AssignTarget, cst.AugAssign, cst.Del)):
            return True
        if isinstance(above, cst.Call) and isinstance(read, cst.Attribute) and read.attr.value in ("update", "pop"):
            return True
    return False
