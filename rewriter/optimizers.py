"""The optimizer after the model: fully_shard puts other parameters in the place of those that an optimizer holds."""

from __future__ import annotations

import re

import libcst as cst

from rewriter.edits import Undecided
from rewriter.module import Module
from rewriter.scene import Scene

OPTIMIZER = re.compile(r"(Adam\w*|SGD\w*|Adagrad|Adadelta|RMSprop|Lion|LAMB|Lamb|Adafactor|\w*Optimizer)$")


def made_before(module: Module, node: cst.Call) -> list[cst.Call]:
    """Optimizers that take the parameters of the model of a construction and stand above it in its function."""
    if not node.args:
        return []
    model = module.code(node.args[0].value)
    home = module.function(node)
    start = module.span(node)[0]
    return [
        call
        for call in module.all(cst.Call)
        if module.span(call)[1] < start
        and module.function(call) is home
        and OPTIMIZER.search(module.code(call.func))
        and re.search(rf"(?<![\w.]){re.escape(model)}\.(named_)?parameters\(", module.code(call))
    ]


def move(scene: Scene) -> list[Undecided]:
    """Put such optimizers behind the call, where nothing between uses them."""
    problems = []
    for node, module in scene.calls:
        for optimizer in made_before(module, node):
            scene.take("FC14", optimizer, module)
            problem = _move(scene, module, node, optimizer)
            if problem:
                problems.append(Undecided("FC14", problem, optimizer, module))
    return problems


def _move(scene: Scene, module: Module, node: cst.Call, optimizer: cst.Call) -> str:
    """Why it can't be moved; "" if it was."""
    made, wrapped = module.statement(optimizer), module.statement(node)
    assign = module.parent(optimizer)
    if not isinstance(assign, cst.Assign) or not isinstance(made, cst.SimpleStatementLine) or wrapped is None:
        return "the optimizer holds the parameters as they are before sharding: make it after"
    block = module.block_of(made)
    if not any(known is wrapped for known in block):
        return "the optimizer is made in another block: make it after the model is sharded"
    name = module.code(assign.targets[0].target)
    between = block[[known is made for known in block].index(True) + 1 : [k is wrapped for k in block].index(True) + 1]
    if any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", module.code(statement)) for statement in between):
        return f"{name} is used before the model is sharded: make both after"
    edits = scene.edits(module)
    text = edits.render(module.line_span(made))
    edits.remove(made)
    at = module.line_span(wrapped)[1]
    edits.replace((at, at), text if text.endswith("\n") else text + "\n")
    return ""
