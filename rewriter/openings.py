"""with statements that set a kind of state dict by a function of the program: `with self.full_state(rank0=True):`."""

from __future__ import annotations

import libcst as cst

from rewriter.edits import Undecided
from rewriter.kinds import Kind, kind_of, passed
from rewriter.module import Module
from rewriter.scene import Scene
from rewriter.values import assignment

Opened = list[tuple[cst.With, cst.WithItem, Module, Kind]]


def openings(scene: Scene, module: Module, setting: cst.Call) -> tuple[cst.FunctionDef, Opened]:
    """The function that returns FSDP.state_dict_type(…), or yields within it as a context manager, and each statement
    that opens it, with the kind it gets.

    Raises Undecided if the function does more than that, or is used in another way.
    """
    why = "the kind of state dict is set in a way that isn't followed"
    problem = Undecided("FM07", why, setting, module)
    function = module.function(setting)
    if function is None or not _only_sets(scene, module, function, setting):
        raise problem
    opened: Opened = []
    for where in scene.modules:
        uses = [n for n in where.all(cst.Name) if n.value == function.name.value and n is not function.name]
        imported = [use for use in uses if where.enclosing(use, cst.ImportFrom) is not None]
        if imported and len(imported) == len(uses):
            raise problem  # it is handed on under its name
        for name in uses if len(uses) > len(imported) else ():
            if any(name is known for known in imported):
                continue
            call = next((above for above in where.ancestors(name) if isinstance(above, cst.Call)), None)
            item = where.parent(call) if call is not None else None
            block = where.parent(item) if isinstance(item, cst.WithItem) else None
            if call is None or not isinstance(item, cst.WithItem) or not isinstance(block, cst.With):
                raise problem
            found = scene.values.function_in(call.func, where)
            if found is None or found[0] is not function or item.asname is not None:
                raise problem
            opened.append((block, item, where, kind_of(scene.values, module, setting, passed(function, call))))
    return function, opened


def _only_sets(scene: Scene, module: Module, function: cst.FunctionDef, setting: cst.Call) -> bool:
    """Whether a function does nothing else: imports, names for its configurations, and the context."""
    *lines, last = function.body.body[function.get_docstring() is not None :]
    for line in lines:
        if not isinstance(line, cst.SimpleStatementLine):
            return False
        for small in line.body:
            if isinstance(small, (cst.Import, cst.ImportFrom)):
                continue
            named = isinstance(small, cst.Assign) and isinstance(small.targets[0].target, cst.Name)
            if not named or not isinstance(small, cst.Assign) or assignment(small.targets[0].target, module) is None:
                return False
            value = small.value
            if not scene.rewriting.pure(value, module) and module.code(value) != "torch.cuda.is_available()":
                return False
    if _yields(last):
        assert isinstance(last, cst.With)
        return len(last.items) == 1 and last.items[0].item is setting
    above = module.parent(setting)
    return isinstance(above, cst.Return) and module.statement(above) is last


def _yields(block: cst.CSTNode) -> bool:
    """Whether a with statement's body is a yield, as in a context manager of one's own."""
    if not isinstance(block, cst.With) or len(block.body.body) != 1:
        return False
    line = block.body.body[0]
    expression = line.body[0] if isinstance(line, cst.SimpleStatementLine) else line
    return isinstance(expression, cst.Expr) and isinstance(expression.value, cst.Yield)
