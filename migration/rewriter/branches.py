"""Reads that a sharded model reaches: those behind where it is made, and not in a branch for other models."""

from __future__ import annotations

import libcst as cst

from migration.rewriter.module import Module
from migration.rewriter.program import Program
from migration.rewriter.symbols import CLASS


class Branches:
    program: Program

    def _reached(self, read: cst.CSTNode, module: Module, target: cst.CSTNode | None = None) -> bool:
        """Return whether a name may be a sharded model; `target`: the assignment's by which it is one."""
        if isinstance(read, cst.Name) and self._excluded(read, module):
            return False
        if target is None:
            return True
        others = self._conditions(read, module, "orelse")
        if others and self._conditions(target, module) & others:
            return False
        return module.order(target) <= module.order(read) or not self._beside(target, read, module)

    @staticmethod
    def _conditions(node: cst.CSTNode, module: Module, branch: str = "body") -> set[str]:
        """The conditions of this function under which a statement is reached; with "orelse" those without which."""
        found, below = set(), node
        for above in module.ancestors(node):
            if isinstance(above, cst.FunctionDef):
                break
            if isinstance(above, cst.If) and below is getattr(above, branch):
                found.add(module.code(above.test))
            below = above
        return found

    @staticmethod
    def _beside(target: cst.CSTNode, read: cst.CSTNode, module: Module) -> bool:
        """Return whether reads above an assignment come before it: same function, and no loop around both."""
        if module.function(target) is not module.function(read):
            return False
        loops = {id(loop) for loop in module.ancestors(target) if isinstance(loop, (cst.For, cst.While, cst.BaseComp))}
        return not any(id(loop) in loops for loop in module.ancestors(read))

    def _excluded(self, node: cst.Name, module: Module) -> bool:
        """Return whether this is the branch for models that aren't sharded: else of `if isinstance(model, FSDP)`."""
        below: cst.CSTNode = node
        for above in module.ancestors(node):
            if isinstance(above, cst.FunctionDef):
                return False
            if isinstance(above, (cst.If, cst.IfExp)) and below is above.orelse:
                test = above.test
                if self._asks(test, node.value, module):
                    return True
                if isinstance(above, cst.If) and self._fsdp1_alone(above.body, node.value, module):
                    return True
            if isinstance(below, (cst.SimpleStatementLine, cst.BaseCompoundStatement)) and self._left_before(
                below, node.value, module
            ):
                return True
            below = above
        return False

    def _asks(self, test: cst.BaseExpression, name: str, module: Module) -> bool:
        """isinstance(model, FSDP), or hasattr for a method that only FSDP1's models have."""
        if not isinstance(test, cst.Call) or len(test.args) != 2 or module.code(test.args[0].value) != name:
            return False
        second = test.args[1].value
        if module.code(test.func) == "hasattr":
            return isinstance(second, cst.SimpleString) and second.evaluated_value == "clip_grad_norm_"
        return module.code(test.func) == "isinstance" and self.program.symbol(second, module) == CLASS

    def _left_before(self, statement: cst.CSTNode, name: str, module: Module) -> bool:
        """Return whether the function has returned before this statement if the model is sharded."""
        for known in module.block_of(statement):
            if known is statement:
                return False
            if isinstance(known, cst.If) and known.orelse is None and self._asks(known.test, name, module):
                last = known.body.body[-1]
                if isinstance(last, cst.SimpleStatementLine) and isinstance(last.body[-1], (cst.Return, cst.Raise)):
                    return True
        return False

    def _fsdp1_alone(self, branch: cst.BaseSuite, name: str, module: Module) -> bool:
        """True if static methods of FSDP1's class are called with a model, so that what follows else is for others."""
        return any(
            (self.program.symbol(call.func, module) or "").startswith(CLASS + ".")
            and any(module.code(arg.value) == name for arg in call.args)
            for call in module.within(branch, cst.Call)
        )
