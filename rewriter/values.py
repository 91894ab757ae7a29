"""What an expression may be: followed back through names, arguments, dictionaries, functions and files.

`leaves` answers with every value that may arrive there. Nothing is run: what can't be followed is a leaf that is
unknown, and whoever asks must then leave the code alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from rewriter.bindings import Bindings, Leaf, arguments
from rewriter.module import Module
from rewriter.program import Program
from rewriter.symbols import ENUMS

MOST = 2000  # expressions behind one, after which it may be anything
Step = Leaf | tuple[cst.BaseExpression, Module]


def is_partial(module: Module, call: cst.Call) -> bool:
    return any(name == "functools.partial" for name, _ in module.qualified(call.func))


def is_none(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Name) and node.value == "None"


def string(node: cst.CSTNode) -> str | None:
    if isinstance(node, (cst.SimpleString, cst.ConcatenatedString)):
        value = node.evaluated_value
        return value if isinstance(value, str) else None
    return None


def assignment(target: cst.CSTNode, module: Module) -> cst.Assign | cst.AnnAssign | None:
    """The statement that gives one name its value."""
    above = module.parent(target)
    if isinstance(above, cst.AnnAssign):
        return above
    assign = module.parent(above) if isinstance(above, cst.AssignTarget) else None
    return assign if isinstance(assign, cst.Assign) and len(assign.targets) == 1 else None


class Values(Bindings):
    def __init__(self, program: Program) -> None:
        self.program = program

    def leaves(self, node: cst.BaseExpression, module: Module) -> list[Leaf]:
        """Every value that an expression may have: the ends of all ways back from it."""
        # Meanwhile none: where an attribute's class depends on the attribute.
        return list(self.program.answer("leaves", node, lambda: self._ends(node, module), []))

    def _ends(self, node: cst.BaseExpression, module: Module) -> list[Leaf]:
        found: dict[int, Leaf] = {}
        seen: set[int] = set()
        ways: list[Step] = [(node, module)]
        while ways:
            way = ways.pop()
            if isinstance(way, Leaf):
                found.setdefault(id(way.node), way)
            elif id(way[0]) not in seen:
                seen.add(id(way[0]))
                ways += reversed(self._steps(*way))
                if len(seen) > MOST:
                    found[id(node)] = Leaf("unknown", node, module, why="too many values")
                    break
        return list(found.values())

    def _steps(self, node: cst.BaseExpression, module: Module) -> list[Step]:
        return self.program.answer("steps", node, lambda: list(self._of(node, module)), [])

    def _of(self, node: cst.BaseExpression, module: Module) -> Iterator[Step]:
        if is_none(node):
            yield Leaf("none", node, module)
            return
        symbol = self.program.symbol(node, module)
        if symbol is not None:
            yield Leaf("symbol", node, module, symbol)
            return
        if isinstance(node, cst.IfExp):
            yield from [(node.body, module), (node.orelse, module)]
        elif isinstance(node, cst.BooleanOperation) and isinstance(node.operator, cst.Or):
            yield from [(node.left, module), (node.right, module)]
        elif isinstance(node, cst.NamedExpr):
            yield node.value, module
        elif isinstance(node, cst.Lambda):
            yield Leaf("function", node, module)
        elif isinstance(node, cst.Call):
            yield from self._of_call(node, module)
        elif isinstance(node, cst.Subscript):
            yield from self._of_subscript(node, module)
        elif isinstance(node, (cst.Name, cst.Attribute)):
            sources, why = self.sources(node, module)
            if sources is None:
                yield Leaf("unknown", node, module, why=why)
            for source, where in sources or ():
                if isinstance(source, (cst.FunctionDef, cst.ClassDef)):
                    yield Leaf("function" if isinstance(source, cst.FunctionDef) else "class", source, where)
                else:
                    yield source, where
        else:
            yield Leaf("value", node, module)

    def _of_call(self, node: cst.Call, module: Module) -> Iterator[Step]:
        if is_partial(module, node) and node.args and not node.args[0].star:
            args, spread = arguments(node, skip=1)
            for callee in self.leaves(node.args[0].value, module):
                if callee.kind == "symbol":
                    yield Leaf("partial", node, module, callee.symbol, args, spread)
                elif callee.kind == "partial":
                    yield Leaf("partial", node, module, callee.symbol, {**callee.args, **args}, spread or callee.spread)
                elif callee.kind == "function":
                    yield Leaf("function", node, module)
                else:
                    yield Leaf("unknown", node, module, why="a partial of something that isn't FSDP1's")
            return
        symbol = self.program.symbol(node.func, module)
        if symbol is not None:
            args, spread = arguments(node)
            yield Leaf("call", node, module, symbol, args, spread)
            return
        if isinstance(node.func, cst.Name) and node.func.value == "getattr" and len(node.args) >= 2:
            base, name = self.program.symbol(node.args[0].value, module), string(node.args[1].value)
            if base in ENUMS:
                default = node.args[2].value if len(node.args) > 2 else None
                yield from self._member(node, module, base, node.args[1].value, name, default)
                if default is not None and name is None:
                    yield default, module
                return
        if isinstance(node.func, cst.Attribute) and node.func.attr.value == "get" and node.args:
            held = self._entries(node.func.value, module, node.args[0].value)
            if held is not None:
                yield from held
                yield from [(arg.value, module) for arg in node.args[1:2]]
                return
        returned = self.returns(node, module)
        if returned is None:
            yield Leaf("value", node, module)
        else:
            yield from returned

    def _of_subscript(self, node: cst.Subscript, module: Module) -> Iterator[Step]:
        index = node.slice[0].slice
        key = index.value if isinstance(index, cst.Index) else None
        base = self.program.symbol(node.value, module)
        if base in ENUMS and key is not None:
            yield from self._member(node, module, base, key, string(key))
            return
        held = self._entries(node.value, module, key) if key is not None else None
        if held is None:
            yield Leaf("unknown", node, module, why="chosen at run time")
        else:
            yield from held

    @staticmethod
    def _member(
        node: cst.BaseExpression,
        module: Module,
        enum: str,
        key: cst.BaseExpression,
        name: str | None,
        default: cst.BaseExpression | None = None,
    ) -> Iterator[Leaf]:
        if name is not None:
            yield Leaf("symbol", node, module, f"{enum}.{name}")
        else:
            yield Leaf("member", node, module, enum, {0: key} if default is None else {0: key, 1: default})

    def _entries(
        self, base: cst.BaseExpression, module: Module, key: cst.BaseExpression
    ) -> list[tuple[cst.BaseExpression, Module]] | None:
        """The values of a written-out dictionary that a key may choose; None if it is no such dictionary."""
        wanted, found = string(key), []
        for node, where in self.written(base, module):
            entries = held(node)
            if entries is None:
                return None
            chosen = [value for name, value in entries if wanted is None or name is None or name == wanted]
            found += [(value, where) for value in chosen]
        return found or None

    def written(self, node: cst.BaseExpression, module: Module) -> list[tuple[cst.BaseExpression, Module]]:
        """Where an expression's value is written out: itself, or what is assigned to the name that it is."""
        if isinstance(node, (cst.Name, cst.Attribute)):
            sources, _ = self.sources(node, module)
            if sources is not None:
                return [(s, m) for s, m in sources if not isinstance(s, (cst.FunctionDef, cst.ClassDef))]
        return [(node, module)]


def dictionary(node: cst.BaseExpression) -> list[tuple[str | None, cst.BaseExpression]] | None:
    """The entries of a written-out dictionary, or of a call of dict; a key that isn't a string is None."""
    if isinstance(node, cst.Dict):
        if any(not isinstance(element, cst.DictElement) for element in node.elements):
            return None
        return [(string(e.key), e.value) for e in node.elements if isinstance(e, cst.DictElement)]
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value == "dict":
        if any(arg.star or arg.keyword is None for arg in node.args):
            return None
        return [(arg.keyword.value, arg.value) for arg in node.args if arg.keyword is not None]
    return None


def held(node: cst.BaseExpression) -> list[tuple[str | None, cst.BaseExpression]] | None:
    """The entries of a written-out dictionary, list or tuple; the key is None where it isn't a string."""
    if isinstance(node, (cst.List, cst.Tuple)):
        return None if any(isinstance(e, cst.StarredElement) for e in node.elements) else [
            (None, e.value) for e in node.elements
        ]  # fmt: skip
    return dictionary(node)
