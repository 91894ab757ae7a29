"""FSDP1's wrapping policies as conditions on a module, where they are its classes."""

from __future__ import annotations

import libcst as cst

from migration.rewriter.edits import Undecided
from migration.rewriter.module import Module
from migration.rewriter.rewriting import Rewriting
from migration.rewriter.values import Leaf

# Policies, each with the argument that its classes are.
BY_CLASS = {"ModuleWrapPolicy": "module_classes", "transformer_auto_wrap_policy": "transformer_layer_cls"}


def condition(rewriting: Rewriting, leaf: Leaf, name: str) -> str:
    """The condition under which a policy makes a module a group, on a variable of that name.

    Raises Undecided for one that has none: by size, of the program's own, or with options for each module."""
    argument = BY_CLASS.get(leaf.symbol)
    classes = leaf.args.get(argument or "", leaf.args.get(0))
    if leaf.kind not in ("call", "partial") or leaf.spread or argument is None or classes is None:
        raise Undecided("FA05", "the policy can't be turned into a condition", leaf.node, leaf.module)
    return f"isinstance({name}, {_classes(rewriting, classes, leaf.module)})"


def _classes(rewriting: Rewriting, node: cst.BaseExpression, module: Module) -> str:
    """The second argument of isinstance for a set of classes."""
    only = rewriting.only(node, module)
    held = only.node if only is not None else None
    if isinstance(held, (cst.Set, cst.Tuple, cst.List)):
        if any(isinstance(element, cst.StarredElement) for element in held.elements):
            raise Undecided("FA05", "some of its classes come from elsewhere", node, module)
        rewriting.drop(node, module)
        names = [rewriting.code(element.value, module) for element in held.elements]
        return names[0] if len(names) == 1 else f"({', '.join(names)})"
    return f"tuple({rewriting.code(node, module)})"
