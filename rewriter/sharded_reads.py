"""load_sharded_optimizer_state_dict: it makes ShardedTensors, which an optimizer of DTensors takes and fails with in
its next step. What FSDP2's own state dict returns is filled instead."""

from __future__ import annotations

import libcst as cst

from fsdp2.migrate.row import CLASS
from rewriter.bindings import arguments
from rewriter.module import Module
from rewriter.scene import Scene

NAME = "load_sharded_optimizer_state_dict"
PLACES = ("model_state_dict", "optimizer_key", "storage_reader", "planner")


def reads(module: Module, node: cst.Call) -> bool:
    return any(name.endswith(f".{NAME}") for name, _ in module.qualified(node.func))


def move(scene: Scene) -> None:
    """Where the state is given to `optim_state_dict_to_load` in the same function, whose model and optimizer it is."""
    for module in scene.modules:
        for node in module.all(cst.Call) if NAME in module.text else ():
            if reads(module, node):
                _move(scene, module, node)


def _move(scene: Scene, module: Module, node: cst.Call) -> None:
    edits, assign, line = scene.edits(module), module.parent(node), module.statement(node)
    target = assign.targets[0].target if isinstance(assign, cst.Assign) and len(assign.targets) == 1 else None
    given, spread = arguments(node)
    named = {PLACES[key] if isinstance(key, int) else key: value for key, value in given.items()}
    if not isinstance(target, cst.Name) or line is None or spread or set(named) != set(PLACES[:3]):
        return
    of = _loaded(scene, module, node, target.value)
    if of is None:
        return
    scene.take("FC29", node, module)
    edits.need("torch.distributed.checkpoint.state_dict", "get_optimizer_state_dict")
    edits.need("torch.distributed.checkpoint")
    key, reader = (edits.code(named[name]) for name in ("optimizer_key", "storage_reader"))
    state = f"get_optimizer_state_dict({', '.join(edits.code(one) for one in of)})"
    made = (
        f"{target.value} = {{{key}: {state}}}\n"
        f"torch.distributed.checkpoint.load({target.value}, storage_reader={reader})"
    )
    edits.replace(module.line_span(line), edits.indented(made, module.indent(line)))


def _loaded(scene: Scene, module: Module, node: cst.Call, name: str) -> list[cst.BaseExpression] | None:
    """The model and the optimizer that a state by this name is loaded into."""
    home = module.function(node) or module.tree
    for call in module.within(home, cst.Call):
        if scene.symbol(call.func, module) != f"{CLASS}.optim_state_dict_to_load":
            continue
        given, _ = arguments(call)
        state = [key for key, value in given.items() if module.code(value).startswith(f"{name}[")]
        others = {key: value for key, value in given.items() if key not in state}
        rest = [value for key, value in others.items() if isinstance(key, int) or key in ("model", "optim")]
        if len(state) == 1 and len(rest) == 2:
            return rest
    return None
