"""with statements that set a kind of state dict by a function of the program: `with self.full_state(rank0=True):`."""

from __future__ import annotations

import libcst as cst

from fsdp2.migrate.code.edits import Undecided
from fsdp2.migrate.code.kinds import Kind, kind_of, passed
from fsdp2.migrate.code.module import Module
from fsdp2.migrate.code.scene import Scene

Opened = list[tuple[cst.With, cst.WithItem, Module, Kind]]


def openings(scene: Scene, module: Module, returned: cst.Call) -> tuple[cst.FunctionDef, Opened]:
    """The function that returns FSDP.state_dict_type(…), and each statement that opens it, with the kind it gets.

    Raises Undecided if the function does more than that, or is used in another way.
    """
    why = "the kind of state dict is set in a way that isn't followed"
    problem = Undecided("FM07", why, returned, module)
    function = module.function(returned)
    if function is None or len(function.body.body) > 1 + (function.get_docstring() is not None):
        raise problem
    opened: Opened = []
    for where in scene.modules:
        for name in where.all(cst.Name):
            if name.value != function.name.value or name is function.name:
                continue
            call = next((above for above in where.ancestors(name) if isinstance(above, cst.Call)), None)
            item = where.parent(call) if call is not None else None
            block = where.parent(item) if isinstance(item, cst.WithItem) else None
            if call is None or not isinstance(item, cst.WithItem) or not isinstance(block, cst.With):
                raise problem
            found = scene.values.function_in(call.func, where)
            if found is None or found[0] is not function:
                raise problem
            opened.append((block, item, where, kind_of(scene.values, module, returned, passed(function, call))))
    return function, opened
