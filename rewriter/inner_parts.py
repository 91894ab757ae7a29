"""FSDP1's inner parts, where FSDP2 says the same by its public API: dinov2 and what is made after it use them.

`_reshard(unit, unit._handle, True)`, the attribute `sharding_strategy` beside NO_SHARD, and `params`, a unit's flat
parameters.
"""

from __future__ import annotations

import libcst as cst

from rewriter.helpers import HELPERS
from rewriter.methods import attribute_of_model
from rewriter.module import Module
from rewriter.names import uses
from rewriter.scene import Scene
from rewriter.translate import FSDP
from rewriter.values import assignment, is_none

NO_SHARD = "ShardingStrategy.NO_SHARD"
HANDLES = ("_handle", "_handles")


def move(scene: Scene) -> None:
    """What can be said by FSDP2; the rest is left to the rule about attributes."""
    for module in scene.modules if scene.calls else ():
        calls = [
            call
            for call in (module.all(cst.Call) if "_reshard" in module.text else ())
            if any(name.endswith("fsdp._runtime_utils._reshard") for name, _ in module.qualified(call.func))
        ]
        for call in calls:
            _reshard(scene, module, call)
        resharded = [call for call in calls if scene.edits(module).covers(call)]
        for node in module.all(cst.Attribute):
            name = node.attr.value
            if name == "params" and attribute_of_model(scene, module, node):
                edits = scene.edits(module)
                scene.take("FC34", node, module)
                edits.need(FSDP, "FSDPModule")
                edits.helpers["own_parameters"] = HELPERS["own_parameters"]
                edits.replace(module.span(node), f"own_parameters({edits.code(node.value)})")
            elif name == "sharding_strategy" and attribute_of_model(scene, module, node) == "FC31":
                _sharded(scene, module, node, resharded)


def _sharded(scene: Scene, module: Module, node: cst.Attribute, resharded: list[cst.Call]) -> None:
    """Whether a unit is sharded at all, where that decides whether it is resharded: FSDP2 may do that with any."""
    compared = module.parent(node)
    if not isinstance(compared, cst.Comparison) or len(compared.comparisons) != 1 or compared.left is not node:
        return
    (target,) = compared.comparisons
    differs = isinstance(target.operator, (cst.IsNot, cst.NotEqual))
    if not differs or scene.symbol(target.comparator, module) != NO_SHARD or _maybe_whole(scene):
        return
    asked: list[tuple[cst.CSTNode, Module]] = [(compared, module)]
    if isinstance(module.enclosing(compared, cst.If, cst.Return, cst.FunctionDef), cst.Return):
        function = module.function(compared)
        asked = list(scene.values.calls(function, module)) if function is not None else []
    guards = [(where.enclosing(one, cst.If), where, one) for one, where in asked]
    if not guards or not all(_guards(guard, where, one, resharded) for guard, where, one in guards):
        return
    edits = scene.edits(module)
    scene.take("FC31", node, module)
    edits.need(FSDP, "FSDPModule")
    edits.replace(module.span(compared), f"isinstance({edits.code(node.value)}, FSDPModule)")


def _maybe_whole(scene: Scene) -> bool:
    """Whether some model may not be sharded: then being an FSDPModule doesn't say that it is."""
    named = [(node, m) for m in scene.modules for node, symbol in uses(m, scene.symbol) if symbol == NO_SHARD]
    return scene.rewriting.by_name or any(not isinstance(m.parent(n), cst.ComparisonTarget) for n, m in named)


def _guards(guard: cst.If | None, module: Module, asked: cst.CSTNode, resharded: list[cst.Call]) -> bool:
    """Whether something is asked in the test of an `if` that only reshards."""
    if guard is None or not (asked is guard.test or any(above is guard.test for above in module.ancestors(asked))):
        return False
    calls = module.within(guard.body, cst.Call)
    return bool(calls) and all(any(call is known for known in resharded) for call in calls)


def _reshard(scene: Scene, module: Module, call: cst.Call) -> None:
    if len(call.args) != 3 or any(arg.star for arg in call.args):
        return
    unit, handles, free = (arg.value for arg in call.args)
    home, edits = module.function(call), scene.edits(module)
    named = [value for value in (handles, free) if isinstance(value, cst.Name) and value.value != "True"]
    lines = []
    for name in named:  # handles = unit._handles; true_list = [True for h in handles]
        bindings = module.assignments(name)
        line = module.statement(bindings[0].node) if len(bindings) == 1 else None
        made = assignment(bindings[0].node, module) if line is not None else None
        if made is None or made.value is None or module.function(made) is not home:
            return
        if not (_is_handle(made.value) or module.code(made.value).startswith("[True ")):
            return
        lines.append(line)
    tests = [
        (compared, read)
        for compared in module.within(home or module.tree, cst.Comparison)
        for read in [compared.left]
        if _is_handle(read) or any(module.code(read) == module.code(name) for name in named)
    ]
    known = {id(read) for _, read in tests} | {id(name) for name in named}
    others = [read for name in named for read in module.references(name) if id(read) not in known]
    if any(not any(a is line for line in lines for a in module.ancestors(read)) for read in others):
        return  # something else is done with them
    if not (_is_handle(handles) or named) or not all(_asks(compared) for compared, _ in tests):
        return
    for compared, _ in tests:
        edits.need(FSDP, "FSDPModule")
        edits.replace(module.span(compared), f"isinstance({module.code(unit)}, FSDPModule)")
    for line in lines:
        if line is not None:
            edits.remove(line)
    scene.take("FC33", call, module)
    for taken in (*tests, *((line, None) for line in lines if line is not None)):
        scene.take("FC31", taken[0], module)
    edits.replace(module.span(call), f"{edits.code(unit)}.reshard()")


def _asks(compared: cst.Comparison) -> bool:
    """`unit._handle is not None`"""
    last = compared.comparisons[0]
    return len(compared.comparisons) == 1 and is_none(last.comparator) and isinstance(last.operator, cst.IsNot)


def _is_handle(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Attribute) and node.attr.value in HANDLES
