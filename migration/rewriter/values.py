"""The value of an expression, as far as the lines around it say.

Nothing is run: what isn't written out beside is unknown, and whoever asks must then leave the code alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from migration.rewriter.module import Module
from migration.rewriter.program import Program


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


def only(program: Program, node: cst.BaseExpression, module: Module, depth: int = 0) -> Leaf | None:
    """The one value that an expression has: written there, or assigned once to the name that it is, in the same
    function or outside of all, of names that are the same in both places. None for anything else."""
    if is_none(node):
        return Leaf("none", node, module)
    if (symbol := program.symbol(node, module)) is not None:
        return Leaf("symbol", node, module, symbol)
    if isinstance(node, cst.Call):
        return _of_call(program, node, module)
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
    leaf = only(program, made.value, module, depth + 1) if made is not None and made.value is not None else None
    if leaf is None or module.function(leaf.node) not in (None, module.function(node)):
        return None
    start, end = module.order(leaf.node), module.order(node)
    bound = [module.order(b.node) for name in module.within(leaf.node, cst.Name) for b in module.assignments(name)]
    return None if any(start < at < end for at in bound) else leaf


def _of_call(program: Program, node: cst.Call, module: Module) -> Leaf | None:
    if any(name == "functools.partial" for name, _ in module.qualified(node.func)) and node.args:
        args, spread = arguments(node, skip=1)
        symbol = program.symbol(node.args[0].value, module)
        return Leaf("partial", node, module, symbol, args, spread) if symbol is not None else None
    args, spread = arguments(node)
    symbol = program.symbol(node.func, module)
    return Leaf("call" if symbol is not None else "value", node, module, symbol or "", args, spread)
