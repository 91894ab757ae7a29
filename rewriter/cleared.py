"""zero_grad() of a sharded model, which clears nothing of a group that is gathered.

The outermost group is, from its forward to its backward and after an evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from rewriter.each_parameter import reshard
from rewriter.module import Module
from rewriter.scene import Scene
from rewriter.taken import KEPT, MOVED

EVALUATES = {"eval", "no_grad", "inference_mode"}


def calls(scene: Scene, module: Module) -> Iterator[tuple[cst.Call, cst.BaseExpression]]:
    """Each with the model that it is of."""
    for call in module.all(cst.Call):
        called = call.func
        if not isinstance(called, cst.Attribute) or called.attr.value != "zero_grad":
            continue
        if scene.is_model(called.value, module):
            yield call, called.value


def move(scene: Scene) -> None:
    """All groups are sharded again before it, where one may be gathered."""
    if not scene.shards:
        return
    evaluated = any(_called(module, module.tree, EVALUATES) for module in scene.modules)
    for module in scene.modules:
        for call, model in calls(scene, module):
            statement = module.statement(call)
            gathered = evaluated or _after_forward(module, call, model)
            scene.take("FC35", call, module, MOVED if gathered else KEPT)
            if isinstance(statement, cst.SimpleStatementLine) and gathered:
                shown = [scene.edits(module).code(model)]
                reshard(scene, module, statement, shown, "zero_grad() clears nothing of a gathered group")


def _after_forward(module: Module, call: cst.Call, model: cst.BaseExpression) -> bool:
    """Whether the model is used above in the same block, and a backward comes below."""
    at, text = module.span(call)[0], module.code(model)
    block = module.block_of(module.statement(call) or call)
    above = [one for one in block if module.span(one)[1] <= at]
    below = [one for one in block if module.span(one)[0] > at]
    used = any(module.code(name) == text for one in above for name in module.within(one, type(model)))
    return used and any(_called(module, one, {"backward"}) for one in below)


def _called(module: Module, within: cst.CSTNode, names: set[str]) -> bool:
    called = (call.func for call in module.within(within, cst.Call))
    return any(isinstance(func, cst.Attribute) and func.attr.value in names for func in called)
