"""The changes of a program while they are made, and values that stand in a call or in a variable beside it."""

from __future__ import annotations

from itertools import takewhile

import libcst as cst

from migration.rewriter.edits import MOVED, Edits, Taken, Undecided
from migration.rewriter.module import Module
from migration.rewriter.program import Program
from migration.rewriter.values import Leaf, assignment, is_none, only, string

FSDP = "torch.distributed.fsdp"


class Rewriting:
    """Edits of each file, and what the rules have taken."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._edits: dict[int, Edits] = {}
        self.account: list[Taken] = []
        self._droppable: list[tuple[cst.Name, Module]] = []
        self._dropped: set[int] = set()  # reads that the new calls have no more
        self.named: dict[int, set[str]] = {}  # a statement's number: variables for models that are sharded above it

    def edits(self, module: Module) -> Edits:
        return self._edits.setdefault(id(module), Edits(module))

    def take(self, code: str, node: cst.CSTNode, module: Module, outcome: str = MOVED, why: str = "") -> None:
        self.account.append(Taken(code, node, module, outcome, why))

    def code(self, node: cst.CSTNode, module: Module) -> str:
        return self.edits(module).code(node)

    def only(self, node: cst.BaseExpression, module: Module) -> Leaf | None:
        return only(self.program, node, module)

    def known(self, node: cst.BaseExpression, module: Module, code: str) -> Leaf:
        """Raises Undecided where `only` knows none."""
        if (leaf := self.only(node, module)) is None:
            raise Undecided(code, "it is decided elsewhere, or at run time: write one value in the call", node, module)
        return leaf

    def drop(self, node: cst.BaseExpression, module: Module) -> None:
        """An expression isn't read any more; a variable that only it read is removed in the end."""
        for name in module.within(node, cst.Name):
            self._dropped.add(id(name))
        if isinstance(node, cst.Name):
            self._droppable.append((node, module))
            for binding in module.assignments(node):
                assign = assignment(binding.node, module)
                if assign is not None and isinstance(assign.value, cst.Name):
                    self.drop(assign.value, module)

    def remove_unread(self) -> None:
        """Statements that assign to a variable that nothing reads any more."""
        for name, module in self._droppable:
            if all(self._gone(read, module) for read in module.references(name)):
                for binding in module.assignments(name):
                    assign = assignment(binding.node, module)
                    line = None if assign is None else module.parent(assign)
                    alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
                    value = assign.value if assign is not None and alone else None
                    if line is not None and value is not None and self._pure(value, module):
                        self.edits(module).remove(line)

    def _gone(self, read: cst.CSTNode, module: Module) -> bool:
        """Return whether a read is dropped, and what took its place doesn't read it again."""
        edits = self.edits(module)
        return edits.goes(read) if edits.covers(read) else id(read) in self._dropped

    def _pure(self, node: cst.BaseExpression, module: Module) -> bool:
        """Return whether leaving out an expression leaves out nothing but a value of FSDP1."""
        return all(
            self.program.symbol(call.func, module) is not None
            or module.code(call.func) in ("dict", "set", "tuple", "getattr", "int", "torch.device")
            or module.code(call.func).endswith(("partial", "current_device"))
            for call in module.within(node, cst.Call)
            if not any(
                isinstance(one, cst.Lambda) for one in takewhile(lambda one: one is not node, module.ancestors(call))
            )
        )


def constant(node: cst.BaseExpression | None, default: object = None) -> object:
    """True, False, None or a string that is written out; Ellipsis for anything else."""
    if node is None:
        return default
    if is_none(node):
        return None
    if isinstance(node, cst.Name) and node.value in ("True", "False"):
        return node.value == "True"
    text = string(node)
    return text if text is not None else ...
