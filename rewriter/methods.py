"""What is done with a sharded model, but for its state dicts: clipping, no_sync, isinstance, prefixes and the like."""

from __future__ import annotations

import re

import libcst as cst

from rewriter import instances
from rewriter.bindings import arguments
from rewriter.blocks import can_unwrap, unwrap
from rewriter.each_parameter import changes_each, is_whole
from rewriter.edits import Undecided, call
from rewriter.helpers import HELPERS
from rewriter.module import Module
from rewriter.scene import Scene
from rewriter.symbols import CLASS, PREFIX, ROWS
from rewriter.translate import FSDP, constant
from rewriter.values import string

# What FSDP1's models have of their own, and FSDP2's haven't.
ATTRIBUTES = ("process_group", "sharding_strategy", "mixed_precision", "cpu_offload", "compute_device",
              "training_state", "_handle", "_handles", "_flat_param", "params", "_streams")  # fmt: skip
# What a body under summon_full_params may call and still only read.
READING = {
    "abs", "all", "allclose", "any", "append", "barrier", "buffers", "clone", "cpu", "data_ptr", "detach", "dict",
    "enumerate", "equal", "eval", "float", "format", "generate", "get_rank", "int", "item", "items", "len", "list",
    "max", "mean", "min", "named_buffers", "named_parameters", "no_grad", "norm", "numel", "parameters", "print",
    "save", "size", "sorted", "std", "str", "sum", "tolist", "update", "zip",
}  # fmt: skip


def move(scene: Scene) -> list[Undecided]:
    problems: list[Undecided] = []
    for module in scene.modules:
        instances.move(scene, module)
        for attribute in module.all(cst.Attribute):
            _unwrapped(scene, module, attribute)
            try:
                _attribute(scene, module, attribute)
                _passed_on(scene, module, attribute)
            except Undecided as problem:
                problems.append(problem)
        for node in module.all(cst.Call):
            try:
                _call(scene, module, node)
            except Undecided as problem:
                problems.append(problem)
        for node, method in scene.static_calls(module):
            try:
                _static(scene, module, node, method)
            except Undecided as problem:
                problems.append(problem)
    return problems


def by_name(scene: Scene, module: Module, node: cst.Call) -> bool:
    """getattr(model, "no_sync", …), which finds nothing in FSDP2's models."""
    named = module.code(node.func) == "getattr" and len(node.args) in (2, 3) and string(node.args[1].value) == "no_sync"
    return scene.shards and named and scene.is_model(node.args[0].value, module)


def attribute_of_model(scene: Scene, module: Module, node: cst.Attribute) -> str:
    """The row about an attribute that FSDP1's models have and FSDP2's haven't; "" if it is none."""
    name = node.attr.value
    if name not in ATTRIBUTES or not scene.shards or isinstance(module.parent(node), cst.AssignTarget):
        return ""
    if name == "_streams":  # nothing else of torch's has them, but a class may have its own
        return "" if module.code(node.value) == "self" else "FC31"
    if not scene.is_model(node.value, module):
        return ""
    if name == "params" and any(re.search(r"self\.params\s*[:=]", where.text) for where in scene.modules):
        return ""  # a model's own
    return {"process_group": "FC30", "params": "FC34"}.get(name, "FC31")


def _attribute(scene: Scene, module: Module, node: cst.Attribute) -> None:
    code = attribute_of_model(scene, module, node)
    edits = scene.edits(module)
    if code == "FC30":
        scene.take(code, node, module)
        text = f"next({edits.code(node.value)}.parameters()).device_mesh.get_group(-1)"
        edits.replace(module.span(node), text)
    elif code and not edits.covers(node):
        raise Undecided(code, "FSDP2's models don't have it", node, module)


def _unwrapped(scene: Scene, module: Module, node: cst.Attribute) -> None:
    """model.module and model._fsdp_wrapped_module are the model."""
    name = node.attr.value
    if name not in ("module", PREFIX) or isinstance(module.parent(node), cst.AssignTarget):
        return
    if name == "module" and (not scene.is_model(node.value, module) or asked_for(module, node)):
        return
    edits = scene.edits(module)
    scene.take("FC08", node, module)
    if name == "module" and scene.ddp:
        inner = module.code(node.value)
        text = f'({inner}.module if hasattr({inner}, "module") else {inner})'
        edits.replace(module.span(node), text)
        return
    # From behind the value, its closing parenthesis included, to the end of the attribute.
    value_end = module.end(node.value)
    edits.replace((value_end, module.span(node)[1]), "")


def asked_for(module: Module, node: cst.Attribute) -> bool:
    """Whether model.module stands behind hasattr(model, "module"): that is right as it is."""
    wanted = f"hasattr({module.code(node.value)}, "
    tests = [above.test for above in module.ancestors(node) if isinstance(above, (cst.If, cst.IfExp))]
    return any(module.code(test).startswith(wanted) for test in tests)


def _passed_on(scene: Scene, module: Module, node: cst.Attribute) -> None:
    """model.no_sync without a call: a context that is opened later."""
    above = module.parent(node)
    called = isinstance(above, cst.Call) and above.func is node
    if node.attr.value == "no_sync" and not called and scene.is_model(node.value, module):
        edits = scene.edits(module)
        scene.take("FM12", node, module)
        _no_sync_helper(scene, module, node)
        edits.modules["functools"] = "functools"
        edits.replace(module.span(node), f"functools.partial(no_sync, {edits.code(node.value)})")


def _call(scene: Scene, module: Module, node: cst.Call) -> None:
    symbol = scene.symbol(node.func, module)
    if symbol == "ShardedGradScaler":
        _scaler(scene, module, node)
    if module.code(node.func) == "getattr" and len(node.args) == 3 and string(node.args[1].value) == PREFIX:
        if module.code(node.args[0].value) == module.code(node.args[2].value):
            edits = scene.edits(module)
            edits.replace(module.span(node), edits.code(node.args[0].value))
        return
    if by_name(scene, module, node):
        edits, called, model = scene.edits(module), module.parent(node), node.args[0].value
        scene.take("FM12", node, module)
        _no_sync_helper(scene, module, node)
        if isinstance(called, cst.Call) and called.func is node:
            edits.replace(module.span(called), f"no_sync({edits.code(model)})")
        else:
            edits.modules["functools"] = "functools"
            edits.replace(module.span(node), f"functools.partial(no_sync, {edits.code(model)})")
        return
    if asks_for_method(scene, module, node):
        edits = scene.edits(module)
        scene.take("FC03", node, module)
        text = f"isinstance({edits.code(node.args[0].value)}, FSDPModule)"
        if scene.ddp and string(node.args[1].value) == "no_sync":  # which DDP has
            text = f"({text} or {edits.code(node)})"
        edits.need(FSDP, "FSDPModule")
        edits.replace(module.span(node), text)
        return
    if not isinstance(node.func, cst.Attribute):
        return
    receiver, method = node.func.value, node.func.attr.value
    if method in ("replace", "removeprefix") and node.args and PREFIX in (string(node.args[0].value) or ""):
        prefix = (string(node.args[0].value) or "").strip(".")
        if prefix == PREFIX and (method == "removeprefix" or string(node.args[-1].value) in ("", ".")):
            edits = scene.edits(module)
            line, assign = module.statement(node), module.parent(node)
            alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
            target = assign.targets[0].target if isinstance(assign, cst.Assign) and len(assign.targets) == 1 else None
            if line is not None and alone and target is not None and module.code(target) == edits.code(receiver):
                edits.remove(line)  # name = name
                return
            end = module.end(receiver)
            edits.replace((end, module.span(node)[1]), "")
        return
    if forward(scene, module, node):
        return
    if symbol is not None or method not in ("clip_grad_norm_", "no_sync", "register_comm_hook"):
        return
    if not scene.is_model(receiver, module):
        return
    scene.take(ROWS[f"{CLASS}.{method}()"].code, node, module)
    if method == "clip_grad_norm_":
        _clip(scene, module, node, receiver)
    elif method == "no_sync":
        _no_sync(scene, module, node, receiver)
    elif scene.calls:
        raise Undecided("FM22", "a communication hook has no equivalent", node, module, blocking=False)


def asks_for_method(scene: Scene, module: Module, node: cst.Call) -> bool:
    """hasattr(model, "no_sync") and the like, by which a program knows FSDP1's models."""
    return (
        scene.shards
        and module.code(node.func) == "hasattr"
        and len(node.args) == 2
        and string(node.args[1].value) in ("no_sync", "clip_grad_norm_", "summon_full_params", "_fsdp_wrapped_module")
        and scene.is_model(node.args[0].value, module)
    )


def forward(scene: Scene, module: Module, node: cst.Call) -> bool:
    """`model.forward(x)` as `model(x)`, and whether it is one."""
    called = node.func
    if not isinstance(called, cst.Attribute) or not _past_the_hooks(scene, module, called):
        return False
    scene.take("FM08", node, module)
    scene.edits(module).replace((module.end(called.value), module.span(called)[1]), "")
    return True


def _past_the_hooks(scene: Scene, module: Module, called: cst.Attribute) -> bool:
    """Whether forward is called past __call__, where FSDP2's hooks gather: on a model, or on a part of one.

    FSDP1's wrapper gathers in its own forward, so with it that was the same.
    """
    if called.attr.value != "forward" or not scene.shards or scene.symbol(called, module) is not None:
        return False
    if scene.is_model(called.value, module):
        return True
    base = called.value
    while isinstance(base, (cst.Attribute, cst.Subscript)):
        base = base.value
    part = base is not called.value and isinstance(base, cst.Name) and base.value == "self"
    owner = module.enclosing(called, cst.ClassDef)
    return part and owner is not None and any(module.code(b.value).endswith("Module") for b in owner.bases)


def _scaler(scene: Scene, module: Module, node: cst.Call) -> None:
    """ShardedGradScaler is GradScaler; behind the second place their arguments stand in another order."""
    order = ("device", "init_scale", "backoff_factor", "growth_factor", "growth_interval", "enabled", "process_group")
    made, edits = [], scene.edits(module)
    for place, arg in enumerate(node.args):
        if arg.star:
            raise Undecided("FX01", "its arguments can't be followed", node, module, blocking=False)
        name = arg.keyword.value if arg.keyword is not None else order[place] if place >= 2 else ""
        if name == "process_group":
            continue
        text = edits.code(arg.value)
        made.append(f"{name}={text}" if name else text)
    edits.need("torch")
    edits.replace(module.span(node), call("torch.amp.GradScaler", made))


def _clip(scene: Scene, module: Module, node: cst.Call, receiver: cst.BaseExpression) -> None:
    edits = scene.edits(module)
    edits.need("torch")
    given = module.text[module.span(node.args[0])[0] : module.span(node.args[-1])[1]] if node.args else ""
    # The norm is a DTensor; who only clips doesn't need it whole.
    whole = "" if isinstance(module.parent(node), cst.Expr) else ".full_tensor()"
    text = f"torch.nn.utils.clip_grad_norm_({edits.code(receiver)}.parameters(), {given.rstrip(', ')}){whole}"
    edits.replace(module.span(node), text)


def _no_sync(scene: Scene, module: Module, node: cst.Call, receiver: cst.BaseExpression) -> None:
    edits = scene.edits(module)
    _no_sync_helper(scene, module, node)
    edits.replace(module.span(node), f"no_sync({edits.code(receiver)})")


def _no_sync_helper(scene: Scene, module: Module, node: cst.CSTNode) -> None:
    if "no_sync" in module.top_level:
        raise Undecided("FM12", "no_sync is a function of this file already", node, module, blocking=False)
    edits = scene.edits(module)
    edits.modules["contextlib"] = "contextlib"
    if scene.ddp:
        edits.need(FSDP, "FSDPModule")
    edits.helpers["no_sync"] = HELPERS["no_sync or DDP" if scene.ddp else "no_sync"]


def _static(scene: Scene, module: Module, node: cst.Call, method: str) -> None:
    args, spread = arguments(node)
    model = args.get(0, args.get("module"))
    edits = scene.edits(module)
    if method == "fsdp_modules" and model is not None and not spread:
        text = edits.code(model)
        if constant(args.get("root_only", args.get(1)), False) is True:
            edits.replace(module.span(node), f"[{text}]")
        else:
            edits.need(FSDP, "FSDPModule")
            edits.replace(module.span(node), f"[m for m in {text}.modules() if isinstance(m, FSDPModule)]")
    elif method in ("forward", "named_parameters", "named_buffers") and node.args and not spread:
        rest = [edits.code(arg).rstrip(", ") for arg in node.args[1:]]
        called = "" if method == "forward" else f".{method}"
        edits.replace(module.span(node), call(f"{edits.code(node.args[0].value)}{called}", rest))
    elif method == "summon_full_params" and model is not None:
        _summon(scene, module, node, model, args, spread)
    elif method == "clip_grad_norm_" and model is not None:
        rest = [module.code(arg).rstrip(", ") for arg in node.args[1:]]
        used = "" if isinstance(module.parent(node), cst.Expr) else ".full_tensor()"
        edits.need("torch")
        text = call("torch.nn.utils.clip_grad_norm_", [f"{edits.code(model)}.parameters()", *rest])
        edits.replace(module.span(node), text + used)


def _summon(
    scene: Scene,
    module: Module,
    node: cst.Call,
    model: cst.BaseExpression,
    args: dict[str | int, cst.BaseExpression],
    spread: bool,
) -> None:
    def stop(why: str) -> Undecided:
        return Undecided("FM09", why, node, module, blocking=False)

    with_item = module.parent(node)
    block = module.parent(with_item) if isinstance(with_item, cst.WithItem) else None
    read_only = constant(args.get("writeback"), True) is False
    whole = isinstance(block, cst.With) and is_whole(scene, module, block)
    if (
        isinstance(block, cst.With)
        and isinstance(with_item, cst.WithItem)
        and not spread
        and can_unwrap(module, block)
        and (
            (changes_each(scene, module, block) and not whole)
            or (not scene.lowered and _only_calls(scene, module, block, model))
        )
    ):
        unwrap(scene.edits(module), block, with_item)
        return
    if (
        spread
        or constant(args.get("with_grads"), False) is not False
        or constant(args.get("recurse"), True) is not True
    ):
        raise stop("some of its arguments have no equivalent")
    if scene.lowered:
        raise stop("unshard() gathers in the dtype of mixed precision, and not in the parameters' own")
    if not isinstance(block, cst.With):
        if not read_only:
            raise stop("it isn't opened by a with statement")
    elif not read_only and not whole and not _reads_only(module, block):
        raise stop("what is written to the parameters would be lost; set_model_state_dict keeps it")
    else:
        for made in module.within(block.body, cst.Call):
            name = made.func.attr.value if isinstance(made.func, cst.Attribute) else ""
            if name in ("state_dict", "save_pretrained"):
                raise stop("a state dict shards again what was gathered: get_model_state_dict, on every rank")
    edits = scene.edits(module)
    edits.modules["contextlib"] = "contextlib"
    edits.need(FSDP, "FSDPModule")
    edits.helpers["full_params"] = HELPERS["full_params"]
    edits.replace(module.span(node), f"full_params({edits.code(model)})")


def _only_calls(scene: Scene, module: Module, block: cst.With, model: cst.BaseExpression) -> bool:
    """Whether all that the body does with the model is to call it, or a method that gathers as a call does."""
    shown = module.code(model)
    reads = 0
    for name in module.within(block.body, cst.Name, cst.Attribute):
        if module.code(name) != shown:
            continue
        reads, below = reads + 1, name
        above = module.parent(below)
        if isinstance(above, cst.Attribute) and above.attr.value in ("module", PREFIX):
            below, above = above, module.parent(above)
        if isinstance(above, cst.Attribute):
            below, above = above, module.parent(above)
        if not isinstance(above, cst.Call) or above.func is not below:
            return False
        method = below.attr.value if isinstance(below, cst.Attribute) and module.code(below) != shown else "forward"
        if method not in ("forward", "eval", "train", "module", PREFIX) and id(above) not in scene.entry_points:
            return False
    return reads > 0


def _reads_only(module: Module, block: cst.With) -> bool:
    for made in module.within(block.body, cst.Call):
        name = made.func.attr.value if isinstance(made.func, cst.Attribute) else module.code(made.func)
        if name not in READING:
            return False
    for target in module.within(block.body, cst.AssignTarget, cst.AugAssign):
        if not isinstance(target.target, cst.Name) and not (
            isinstance(target.target, cst.Subscript) and not isinstance(target, cst.AugAssign)
        ):
            return False
        if isinstance(target, cst.AugAssign):
            return False
    return True
