"""Fields and methods of a program's classes, where it isn't known of which class an object is: by names that one class
alone has."""

from __future__ import annotations

import argparse
import logging
import threading
from pathlib import Path

import libcst as cst
import torch

from rewriter.module import Module
from rewriter.program import Program

Bound = cst.BaseExpression | cst.FunctionDef | cst.ClassDef
# Classes whose methods aren't looked for among the program's.
ELSEWHERE = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.utils.data.DataLoader, dict, list, set, str,
             Path, argparse.ArgumentParser, logging.Logger, threading.Thread)  # fmt: skip


def method_of_any(program: Program, node: cst.Attribute, module: Module) -> tuple[cst.FunctionDef, Module] | None:
    """The method of an object of the program, if one class alone has a method of that name, which nothing else
    has either that a training program calls methods of."""
    name = node.attr.value
    if any(imported for _, imported in module.qualified(node)) or any(hasattr(known, name) for known in ELSEWHERE):
        return None
    found = program.named(cst.FunctionDef, name)
    owner = found[0][1].enclosing(found[0][0], cst.ClassDef, cst.FunctionDef) if len(found) == 1 else None
    return found[0] if isinstance(owner, cst.ClassDef) else None


def field_of_any(program: Program, name: str) -> list[tuple[Bound, Module]]:
    """The default of a field that one class of the program alone has, in its body, or what its property returns."""
    found: list[tuple[Bound, Module]] = []
    fields = properties = 0
    for where in program.parsed if len(name) > 3 else ():
        for owner in where.all(cst.ClassDef) if name in where.text else ():
            known: list[tuple[Bound, Module]] = [(v, where) for target, v in class_attributes(owner) if target == name]
            found += known + (constructed(program, owner, name) if known else [])
            fields += len(known)
        for function in where.named(cst.FunctionDef, name):
            if is_property(function):
                found += returned_by(function, where)
                properties += 1
    return found if fields + properties == 1 else []


def constructed(program: Program, owner: cst.ClassDef, name: str) -> list[tuple[Bound, Module]]:
    """What the program's calls of a class give for one of its fields, by keyword or by its place."""
    lines = [line for line in owner.body.body if isinstance(line, cst.SimpleStatementLine)]
    fields = [s.target.value for line in lines for s in line.body if isinstance(s, cst.AnnAssign)
              and isinstance(s.target, cst.Name)]  # fmt: skip
    found: list[tuple[Bound, Module]] = []
    for where in program.parsed:
        for call in (*where.named(cst.Call, owner.name.value), *where.named(cst.Call, "replace")):
            for place, arg in enumerate(call.args):
                by_place = arg.keyword is None and not arg.star and place < len(fields) and fields[place] == name
                if (arg.keyword is not None and arg.keyword.value == name) or by_place:
                    found.append((arg.value, where))
    return found


def is_property(function: cst.FunctionDef) -> bool:
    decorators = [decorator.decorator for decorator in function.decorators]
    return any(isinstance(d, cst.Name) and d.value in ("property", "cached_property") for d in decorators)


def returned_by(function: cst.FunctionDef, module: Module) -> list[tuple[cst.BaseExpression, Module]]:
    """What a function returns, statement by statement."""
    return [
        (statement.value, module)
        for statement in module.within(function, cst.Return)
        if module.function(statement) is function and statement.value is not None
    ]


def class_attributes(owner: cst.ClassDef) -> list[tuple[str, cst.BaseExpression]]:
    found, lines = [], list(owner.body.body)
    for line in lines:
        if isinstance(line, cst.If):  # which decides while the class is made
            lines += line.body.body
            other = line.orelse
            lines += [other] if isinstance(other, cst.If) else other.body.body if other is not None else []
        for statement in line.body if isinstance(line, cst.SimpleStatementLine) else []:
            if isinstance(statement, cst.AnnAssign) and isinstance(statement.target, cst.Name) and statement.value:
                found.append((statement.target.value, statement.value))
            elif isinstance(statement, cst.Assign) and isinstance(statement.targets[0].target, cst.Name):
                found.append((statement.targets[0].target.value, statement.value))
    return found
