"""Ranks that a script starts by itself, so that torchrun can start it too. The old way goes on working."""

from __future__ import annotations

import libcst as cst

from rewriter.bindings import arguments
from rewriter.module import Module
from rewriter.scene import Scene
from rewriter.taken import KEPT, MOVED
from rewriter.values import string

SPAWN = ("torch.multiprocessing.spawn", "torch.multiprocessing.spawn.spawn")
SET_BY_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT")


def spawns(module: Module) -> list[cst.Call]:
    return [
        node
        for node in (module.all(cst.Call) if "spawn" in module.text else [])
        if any(name in SPAWN for name, _ in module.qualified(node.func))
    ]


def fixed(module: Module) -> list[tuple[cst.Subscript, cst.Assign]]:
    """os.environ["MASTER_PORT"] = …: what is set, and the assignment."""
    found = []
    for assign in module.all(cst.Assign):
        target = assign.targets[0].target
        if isinstance(target, cst.Subscript) and any(n == "os.environ" for n, _ in module.qualified(target.value)):
            index = target.slice[0].slice
            name = string(index.value) if isinstance(index, cst.Index) else None
            if name in SET_BY_TORCHRUN:
                found.append((target, assign))
    return found


def move(scene: Scene) -> None:
    for module in {id(module): module for _, module in scene.calls}.values():
        for node in spawns(module):
            moved = _spawn(scene, module, node)
            scene.take("FC19", node, module, MOVED if moved else KEPT)
            if moved:
                edits = scene.edits(module)
                for target, assign in fixed(module):
                    name, value = module.code(target.slice[0].slice), module.code(assign.value)
                    scene.take("FC19", assign, module)
                    edits.replace(module.span(assign), f"{module.code(target.value)}.setdefault({name}, {value})")


def _spawn(scene: Scene, module: Module, node: cst.Call) -> bool:
    args, spread = arguments(node)
    function = args.get(0, args.get("fn"))
    passed = args.get(1, args.get("args"))
    statement = module.statement(node)
    if (
        spread
        or function is None
        or scene.values.function(function, module) is None
        or not isinstance(module.parent(node), cst.Expr)
        or not isinstance(statement, cst.SimpleStatementLine)
        or not (passed is None or isinstance(passed, cst.Tuple))
        or "TORCHELASTIC" in module.text
        or "LOCAL_RANK" in module.text
    ):
        return False
    count = args.get(2, args.get("nprocs"))
    values = [element.value for element in passed.elements] if isinstance(passed, cst.Tuple) else []
    world = 'int(os.environ["WORLD_SIZE"])'
    shown = [world if count is not None and module.code(v) == module.code(count) else module.code(v) for v in values]
    if count is None or world not in shown:
        return False
    edits = scene.edits(module)
    edits.modules["os"] = "os"
    indent = module.indent(statement)
    called = ", ".join(['int(os.environ["RANK"])', *shown])

    def text() -> str:
        old = edits.render(module.span(statement)).replace("\n", "\n    ")
        lines = (
            f'if "RANK" in os.environ:  # started by torchrun\n    {module.code(function)}({called})\nelse:\n    {old}'
        )
        first, *rest = lines.split("\n")
        return "\n".join([first, *(indent + line for line in rest)])

    edits.replace(module.span(statement), text)
    return True
