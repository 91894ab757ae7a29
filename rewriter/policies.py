"""FSDP1's functions that choose units, where they can't become a condition in the call: functions of the program that
answer the same questions, "go into this module?" and "make it a unit?", take their places."""

from __future__ import annotations

import libcst as cst

from rewriter.bindings import Leaf
from rewriter.conditions import POLICY_CLASSES, SIZE
from rewriter.edits import Undecided
from rewriter.helpers import HELPERS
from rewriter.module import Module
from rewriter.names import uses
from rewriter.scene import Scene
from rewriter.translate import Rewriting

# By FSDP1's name: the helper that takes its place, argument by argument.
SAME = {
    "size_based_auto_wrap_policy": "wrap_by_size",
    "default_auto_wrap_policy": "wrap_by_size",
    "transformer_auto_wrap_policy": "wrap_by_class",
    "lambda_auto_wrap_policy": "wrap_by_function",
    "_or_policy": "wrap_by_any",
    "always_wrap_policy": "wrap_always",
}
AS_THEY_ARE = (*SIZE, "always_wrap_policy")  # policies, and no functions that one is made of
NEEDS_TORCH = ("wrap_by_size",)


def are_conditions(rewriting: Rewriting, leaves: list[Leaf], node: cst.BaseExpression, module: Module) -> bool:
    """Whether each may become a condition on a module. Policies by size, and functions, are one helper's argument."""
    if any(leaf.symbol in SIZE or leaf.kind == "function" for leaf in leaves):
        return rewriting.only(node, module) is not None
    return all(leaf.kind == "none" or _is_condition(rewriting, leaf) for leaf in leaves)


def _is_condition(rewriting: Rewriting, leaf: Leaf) -> bool:
    if leaf.kind == "partial" and leaf.symbol == "_or_policy":
        given = leaf.args.get("policies")
        if not isinstance(given, (cst.List, cst.Tuple, cst.Set)):
            return False
        inner = [rewriting.only(element.value, leaf.module) for element in given.elements]
        return all(one is not None and one.symbol not in SIZE and _is_condition(rewriting, one) for one in inner)
    return leaf.kind != "unknown"


def require_same(rewriting: Rewriting, leaves: list[Leaf], node: cst.BaseExpression, module: Module) -> None:
    """Raises Undecided if one of them can't be what it was, with a helper in place of FSDP1's function."""
    for leaf in leaves:
        if leaf.kind == "unknown":
            raise Undecided("FA05", leaf.why, node, module)
        known = leaf.symbol in SAME and leaf.kind in ("partial", "symbol")
        if leaf.kind not in ("none", "function") and not known:
            raise Undecided("FA05", "it is one of several kinds of policies", node, module)
        if known and leaf.symbol not in AS_THEY_ARE and leaf.kind == "symbol":
            raise Undecided("FA05", "it has no arguments", node, module)


def move(scene: Scene) -> None:
    """Put the helpers in place of FSDP1's functions that are left: a policy that something else than a constructor
    reads, such as activation checkpointing, answers as before."""
    for module in scene.modules:
        edits = scene.edits(module)
        for node, symbol in uses(module, scene.symbol):
            name = SAME.get(symbol)
            if name is not None and _removed(scene, module, node):
                continue
            if name is None or edits.covers(node) or not _complete(scene, module, node, symbol):
                continue
            edits.replace(module.span(node), name)
            edits.helpers[name] = HELPERS[name]
            if name in NEEDS_TORCH:
                edits.need("torch")


def _removed(scene: Scene, module: Module, node: cst.CSTNode) -> bool:
    """Whether it is in the value of a variable of a function that nothing reads, whose statement is removed then."""
    line = module.statement(node)
    assign = line.body[0] if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else None
    if (
        line is None
        or not isinstance(assign, cst.Assign)
        or module.function(assign) is None
        or len(assign.targets) != 1
    ):
        return False
    target = assign.targets[0].target
    if not isinstance(target, cst.Name) or module.references(target) or not scene.rewriting.pure(assign.value, module):
        return False
    scene.edits(module).remove(line)
    return True


def _complete(scene: Scene, module: Module, node: cst.CSTNode, symbol: str) -> bool:
    """Whether the arguments have the names that the helper knows, and the name of the helper is free."""
    if any(name.value == SAME[symbol] for name in module.all(cst.Name)):
        return False
    above = module.parent(node)
    call = module.parent(above) if isinstance(above, cst.Arg) else above
    if not isinstance(call, cst.Call):
        return symbol in AS_THEY_ARE
    keywords = {arg.keyword.value for arg in call.args if arg.keyword is not None}
    wanted = {"wrap_by_size": {"min_num_params"}, "wrap_by_class": {POLICY_CLASSES["transformer_auto_wrap_policy"]},
              "wrap_by_function": {"lambda_fn"}, "wrap_by_any": {"policies"}, "wrap_always": set(),
              }[SAME[symbol]]  # fmt: skip
    return keywords - {"module", "recurse", "nonwrapped_numel"} <= wanted
