"""Calls on a sharded model, but for its state dicts: clipping, no_sync, whole parameters and the like."""

from __future__ import annotations

import re

import libcst as cst

from migration.rewriter.edits import Undecided, call, guarded
from migration.rewriter.module import Module
from migration.rewriter.names import compared, in_annotation
from migration.rewriter.rewriting import FSDP, constant
from migration.rewriter.scene import Scene
from migration.rewriter.symbols import BY_CODE, CLASS, PREFIX, ROWS
from migration.rewriter.values import arguments, string

# What FSDP1's models have of their own, and FSDP2's haven't.
ATTRIBUTES = ("process_group", "sharding_strategy", "mixed_precision", "cpu_offload", "compute_device",
              "training_state", "_handle", "_handles", "_flat_param", "params", "_is_root", "_lazy_init")  # fmt: skip
# Those that nothing else of torch's has: whose they are need not be known.
INNER = ("_streams", "_all_handles", "flat_param", "_reset_lazy_init", "_state_dict_type")
METHODS = ("no_sync", "clip_grad_norm_", "summon_full_params", "register_comm_hook")
OWN_TYPE = "model.module is the model, so that its type is FSDP's: isinstance() finds its own class"
OPTIMIZER = re.compile(r"(Adam\w*|SGD\w*|Adagrad|Adadelta|RMSprop|Lion|LAMB|Lamb|Adafactor|\w*Optimizer)$")
EVALUATES = re.compile(r"\.eval\(|no_grad|inference_mode")  # after which a group may be gathered


def move(scene: Scene) -> list[Undecided]:
    problems: list[Undecided] = []
    for module in scene.modules:
        _instances(scene, module)
        for attribute in module.all(cst.Attribute):
            guarded(problems, _attribute, scene, module, attribute)
        for node in module.all(cst.Call):
            guarded(problems, _call, scene, module, node)
    for node, module in scene.calls:
        for made in optimizers_before(module, node):
            problems.append(Undecided("FC14", BY_CODE["FC14"].note, made, module, blocking=False))
    return problems


def attribute_of_model(scene: Scene, module: Module, node: cst.Attribute | cst.Call) -> str:
    """The row about an attribute that FSDP1's models have and FSDP2's haven't, also asked for by getattr or hasattr; ""
    if it is none."""
    if isinstance(node, cst.Attribute):
        name, owner = node.attr.value, node.value
    else:
        name, owner = asked(module, node), node.args[0].value if node.args else node
    if name not in ATTRIBUTES + INNER or not scene.shards or isinstance(module.parent(node), cst.AssignTarget):
        return ""
    if name in INNER:  # a class may have its own
        return "" if module.code(owner) == "self" else "FC31"
    if not scene.is_model(owner, module):
        return ""
    if name == "params" and any(re.search(r"self\.params\s*[:=]", where.text) for where in scene.modules):
        return ""  # a model's own
    return {"process_group": "FC30", "params": "FC34"}.get(name, "FC31")


def _attribute(scene: Scene, module: Module, node: cst.Attribute) -> None:
    name, edits = node.attr.value, scene.edits(module)
    if code := attribute_of_model(scene, module, node):
        raise Undecided(code, "FSDP2's models don't have it", node, module)
    if name in METHODS and (scene.calls or scene.is_model(node.value, module)) and not scene.symbol(node, module):
        _method(scene, module, node, name)
    elif name in ("module", PREFIX) and scene.is_model(node.value, module):
        if scene.ddp or isinstance(module.parent(node), cst.AssignTarget):
            raise Undecided("FC08", "whether it is a wrapper turns out at run time", node, module)
        if asks_type(module, node):
            raise Undecided("FC08", OWN_TYPE, node, module)
        scene.take("FC08", node, module)
        edits.replace((module.end(node.value), module.span(node)[1]), "")


def asks_type(module: Module, node: cst.Attribute) -> bool:
    """Return whether the class of what was wrapped is asked for, and not by isinstance()."""
    code, said = module.code(node), module.code(module.statement(node) or node)
    return f"type({code})" in said or f"{code}.__class__" in said


def _method(scene: Scene, module: Module, node: cst.Attribute, name: str) -> None:
    """A method that FSDP1's models have, of a model that is known; libraries have methods of these names too."""
    called = module.parent(node)
    code = ROWS[f"{CLASS}.{name}()"].code
    if not scene.is_model(node.value, module):
        library = re.compile(rf"(?<![\w.]){re.escape(module.code(node.value))}(:.*)? = [\w.]*Accelerator\(")
        own = any(where.named(cst.FunctionDef, name) or library.search(where.text) for where in scene.modules)
        if not own and not any(imported for _, imported in module.qualified(node)):
            raise Undecided(code, f"which model {module.code(node.value)} is turns out at run time", node, module)
        return
    if not isinstance(called, cst.Call) or called.func is not node or scene.ddp or name == "register_comm_hook":
        raise Undecided(code, ROWS[f"{CLASS}.{name}()"].note, node, module)
    edits, receiver = scene.edits(module), node.value
    scene.take(code, called, module)
    if name == "clip_grad_norm_":
        edits.need("torch")
        rest = "".join(f", {edits.code(arg).rstrip(', ')}" for arg in called.args)
        # The norm is a DTensor; who only clips doesn't need it whole.
        whole = "" if isinstance(module.parent(called), cst.Expr) else ".full_tensor()"
        text = f"torch.nn.utils.clip_grad_norm_({edits.code(receiver)}.parameters(){rest}){whole}"
    else:
        edits.helper(name, called, "FM12")
        text = f"{name}({edits.code(receiver)})"
    edits.replace(module.span(called), text)


def _call(scene: Scene, module: Module, node: cst.Call) -> None:
    symbol = scene.symbol(node.func, module)
    if symbol == "ShardedGradScaler":
        _scaler(scene, module, node)
    elif symbol == f"{CLASS}.summon_full_params":
        _summon(scene, module, node)
    elif scene.calls and (name := by_name(module, node)):
        code = "FC03" if module.code(node.func) == "hasattr" else ROWS[f"{CLASS}.{name}()"].code
        raise Undecided(code, f"whether there is a {name} is asked at run time", node, module)
    elif code := attribute_of_model(scene, module, node):
        raise Undecided(code, "FSDP2's models don't have it", node, module)
    elif isinstance(node.func, cst.Attribute) and node.func.attr.value == "zero_grad":
        if scene.is_model(node.func.value, module):
            scene.take("FC35", node, module)
            if EVALUATES.search(module.text) or between(module, node, node.func.value):
                raise Undecided("FC35", "zero_grad() clears nothing of a group that is gathered", node, module)
    else:
        forward(scene, module, node)


def by_name(module: Module, node: cst.Call) -> str:
    """Move `getattr(model, "no_sync", …)` and `hasattr(model, "clip_grad_norm_")`, where the name is FSDP1's."""
    return name if (name := asked(module, node)) in METHODS else ""


def asked(module: Module, node: cst.Call) -> str:
    """The name that getattr or hasattr asks for; "" for other calls."""
    by_string = module.code(node.func) in ("getattr", "hasattr") and len(node.args) > 1
    return (string(node.args[1].value) if by_string else None) or ""


def between(module: Module, node: cst.Call, model: cst.BaseExpression) -> bool:
    """Return whether a call stands between the model's and a backward below it."""
    at, text = module.span(node)[0], re.escape(module.code(model))
    block = module.block_of(module.statement(node) or node)
    above = any(re.search(rf"\b{text}\(", module.code(one)) for one in block if module.span(one)[1] <= at)
    return above and any(".backward(" in module.code(one) for one in block if module.span(one)[0] > at)


def forward(scene: Scene, module: Module, node: cst.Call) -> None:
    """`model.forward(x)` as `model(x)`, since FSDP2's hooks gather in __call__: of a model, or of a part of one.

    FSDP1's wrapper gathers in its own forward, so with it that was the same.
    """
    called = node.func
    if not isinstance(called, cst.Attribute) or called.attr.value != "forward" or not scene.shards:
        return
    base = called.value
    while isinstance(base, (cst.Attribute, cst.Subscript)):
        base = base.value
    part = base is not called.value and isinstance(base, cst.Name) and base.value == "self"
    owner = module.enclosing(called, cst.ClassDef)
    own = part and owner is not None and any(module.code(b.value).endswith("Module") for b in owner.bases)
    if scene.symbol(called, module) is None and (own or scene.is_model(called.value, module)):
        scene.take("FM08", node, module)
        scene.edits(module).replace((module.end(called.value), module.span(called)[1]), "")


def _scaler(scene: Scene, module: Module, node: cst.Call) -> None:
    """ShardedGradScaler is GradScaler; behind the second place their arguments stand in another order."""
    edits = scene.edits(module)
    if any(arg.star or (arg.keyword is None and place > 1) for place, arg in enumerate(node.args)):
        raise Undecided("FX01", "its arguments stand in another order than GradScaler's", node, module)
    kept = [arg for arg in node.args if arg.keyword is None or arg.keyword.value != "process_group"]
    edits.need("torch")
    edits.replace(module.span(node), call("torch.amp.GradScaler", [edits.code(arg).rstrip(", ") for arg in kept]))


def _summon(scene: Scene, module: Module, node: cst.Call) -> None:
    """Whole parameters to be read, by a helper that unshards."""
    args, spread = arguments(node)
    model, block = args.get(0, args.get("module")), module.parent(module.parent(node) or node)
    plain = set(args) <= {0, "module", "writeback", "recurse"} and constant(args.get("writeback"), True) is False
    if model is None or spread or not plain or not isinstance(block, cst.With) or scene.lowered:
        raise Undecided("FM09", ROWS[f"{CLASS}.summon_full_params()"].note, node, module)
    names = {
        made.func.attr.value for made in module.within(block.body, cst.Call) if isinstance(made.func, cst.Attribute)
    }
    if constant(args.get("recurse"), True) is not True or names & {"state_dict", "save_pretrained"}:
        raise Undecided("FM09", "a state dict shards again what was gathered", node, module)
    edits = scene.edits(module)
    edits.helper("full_params", node, "FM09")
    edits.need(FSDP, "FSDPModule")
    edits.replace(module.span(node), f"full_params({edits.code(model)})")


def optimizers_before(module: Module, node: cst.Call) -> list[cst.Call]:
    """Optimizers of a model that are made above its construction: fully_shard puts other parameters in its place."""
    model, start = module.code(node.args[0].value) if node.args else "", module.span(node)[0]
    given = re.compile(rf"(?<![\w.]){re.escape(model)}\.(named_)?parameters\(")
    return [
        made
        for made in module.all(cst.Call)
        if module.function(made) is module.function(node) and module.span(made)[1] < start
        if OPTIMIZER.search(module.code(made.func)) and given.search(module.code(made))
    ]


def _instances(scene: Scene, module: Module) -> None:
    """FSDP1's class where it is only asked about: isinstance, annotations, comparisons of types."""
    for node in module.all(cst.Name, cst.Attribute):
        _class(scene, module, node)
    compare(scene, module)
    for text in module.all(cst.SimpleString):
        if word := in_annotation(text, module, scene.symbol):
            edits = scene.edits(module)
            edits.need(FSDP, "FSDPModule")
            edits.replace(module.span(text), re.sub(rf"\b{word}\b", "FSDPModule", module.code(text)))


def _class(scene: Scene, module: Module, node: cst.Name | cst.Attribute) -> None:
    """FSDP1's class, and that of its precision, in isinstance and in annotations."""
    above = module.parent(node)
    if isinstance(above, (cst.Attribute, cst.ImportAlias, cst.ImportFrom)):
        return
    symbol = scene.symbol(node, module)
    if symbol != CLASS and not (symbol == "MixedPrecision" and scene.calls):
        return
    checked = False
    for outer in module.ancestors(node):
        if isinstance(outer, cst.Annotation):
            checked = True
            break
        if isinstance(outer, cst.Call):
            checked = module.code(outer.func) in ("isinstance", "issubclass") and node is not outer.func
            break
        if not isinstance(outer, (cst.Arg, cst.Tuple, cst.Element, cst.Subscript, cst.SubscriptElement, cst.Index,
                                  cst.BinaryOperation)):  # fmt: skip
            break
    if checked:
        edits = scene.edits(module)
        name = "FSDPModule" if symbol == CLASS else "MixedPrecisionPolicy"
        edits.need(FSDP, name)
        edits.replace(module.span(node), name)


def compare(scene: Scene, module: Module) -> None:
    """`type(model) is FSDP`, in whatever words: the class of a sharded model is its own, and an FSDPModule."""
    for node in module.all(cst.Comparison):
        model = compared(node, module, scene.symbol)
        operator = node.comparisons[0].operator
        if model is not None and isinstance(operator, (cst.Is, cst.IsNot, cst.Equal, cst.NotEqual)):
            edits = scene.edits(module)
            edits.need(FSDP, "FSDPModule")
            differs = "not " if isinstance(operator, (cst.IsNot, cst.NotEqual)) else ""
            edits.replace(module.span(node), f"{differs}isinstance({edits.code(model)}, FSDPModule)")
