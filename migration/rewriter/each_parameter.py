"""Uses of each of a sharded model's parameters: they are DTensors now, element by element the same."""

from __future__ import annotations

import libcst as cst

from migration.rewriter.edits import KEPT, Undecided
from migration.rewriter.module import Module
from migration.rewriter.scene import Scene
from migration.rewriter.values import assignment, string

IN_PLACE = ("mul_", "add_", "copy_", "lerp_", "sub_", "div_", "clamp_", "zero_", "fill_")
LISTS = ("list", "tuple", "dict", "sorted", "enumerate", "zip", "filter", "iter", "reversed", "chain")
REDUCING = ("norm", "vector_norm", "sum", "max", "min", "amax", "isnan", "isinf", "isfinite", "numel", "dot",
            "count_nonzero")  # fmt: skip
SAME_ELEMENTS = ("detach", "float", "double", "abs", "pow", "square", "clone", "cpu", "to", "flatten", "view",
                 "reshape")  # fmt: skip
SHARDED_AGAIN = "the interface shards a model again after an evaluation without gradients; else unit.reshard() first"
SHAPES = ("ndim", "dim", "shape", "size")


def over_parameters(scene: Scene, module: Module, node: cst.CSTNode) -> bool:
    """Return whether something is done with each of the parameters of a sharded model, and they aren't whole there."""
    if _summoned(module, node):
        return False
    for above in module.ancestors(node):
        if isinstance(above, cst.FunctionDef):
            return False
        over = above if isinstance(above, cst.For) else getattr(above, "for_in", None)  # which comprehensions have
        if over is not None and _lists_parameters(scene, module, over.iter):
            return True
    return False


def _lists_parameters(scene: Scene, module: Module, over: cst.BaseExpression, depth: int = 0) -> bool:
    """model.parameters(), a list of them, or what a comprehension over them was assigned to."""
    if isinstance(over, cst.Subscript) and scene.shards:  # of an optimizer's group
        index = over.slice[0].slice
        return isinstance(index, cst.Index) and string(index.value) == "params"
    called = over.func if isinstance(over, cst.Call) else None
    if isinstance(called, cst.Attribute):
        if called.attr.value in ("parameters", "named_parameters"):
            own = isinstance(called.value, cst.Name) and called.value.value == "self"
            home = module.function(over)
            if own and home is not None and home.name.value in scene.called_on_models:
                return True
            return scene.may_be_model(called.value, module)
        if called.attr.value in ("items", "values"):
            return _lists_parameters(scene, module, called.value, depth)
    if isinstance(over, cst.Call) and module.code(over.func).rpartition(".")[2] in LISTS and depth < 4:
        return any(_lists_parameters(scene, module, arg.value, depth + 1) for arg in over.args)
    if isinstance(over, (cst.DictComp, cst.ListComp)) and depth < 4:
        return _lists_parameters(scene, module, over.for_in.iter, depth + 1)
    if isinstance(over, cst.Name) and depth < 4:
        for binding in module.assignments(over):
            assign = assignment(binding.node, module)
            made = assign.value if assign is not None else None
            listed = isinstance(made, (cst.DictComp, cst.ListComp, cst.Call))
            if made is not None and listed and _lists_parameters(scene, module, made, depth + 1):
                return True
    return False


def gradient(scene: Scene, module: Module, node: cst.Attribute) -> bool:
    """Return whether a gradient's value is computed with, in a loop over a sharded model's parameters."""
    above = module.parent(node)
    listed = isinstance(above, (cst.ListComp, cst.GeneratorExp)) and above.elt is node
    if node.attr.value != "grad" or not (isinstance(above, cst.Attribute) or listed or _reduced(module, node)):
        return False
    shown = above.attr.value if isinstance(above, cst.Attribute) else ""
    if shown in ("dtype", "device", "is_cuda", "is_sparse", "requires_grad", "numel") or _scaled(module, node):
        return False
    return over_parameters(scene, module, node)


def _scaled(module: Module, node: cst.BaseExpression) -> bool:
    """Return whether each element of a tensor is changed by a number, which is the same for a shard."""
    above = module.parent(node)
    name = above.attr.value if isinstance(above, cst.Attribute) else ""
    call = module.parent(above) if above is not None else None
    called = isinstance(call, cst.Call) and call.func is above
    if name in ("mul_", "div_", "clamp_", "zero_", "nan_to_num_"):
        return called
    if name == "data" and isinstance(above, cst.Attribute):
        return _scaled(module, above)
    return name == "detach" and isinstance(call, cst.Call) and _scaled(module, call)


def _reduced(module: Module, node: cst.BaseExpression) -> bool:
    """Return whether nothing but a number is made of a tensor: its norm, a sum, a test."""
    above = module.parent(node)
    if isinstance(above, cst.Arg):
        call = module.parent(above)
        if not isinstance(call, cst.Call) or call.args[0] is not above:
            return False
        return module.code(call.func).rpartition(".")[2] in REDUCING
    if isinstance(above, cst.BinaryOperation):
        return isinstance(above.operator, cst.Power) and above.left is node and _reduced(module, above)
    if not isinstance(above, cst.Attribute):
        return False
    name, call = above.attr.value, module.parent(above)
    if not isinstance(call, cst.Call) or call.func is not above:
        return name == "data" and _reduced(module, above)
    return name in REDUCING or (name in SAME_ELEMENTS and _reduced(module, call))


def local_gradients(scene: Scene, module: Module) -> None:
    """Keep a sum by hand over ranks a sum over this rank's shards."""
    edits, homes = scene.edits(module), []
    for node in module.all(cst.Attribute):
        home = module.function(node)
        if home is None or not gradient(scene, module, node) or not _reduced(module, node):
            continue
        if _goes_to_all_ranks(module, node, home):
            homes.append(home)
            scene.take("FC26", node, module)
            edits.replace(module.span(node), f"local_shard({module.code(node)})")
            edits.helper("local_shard", node, "FC26")
    for node in module.all(cst.Attribute) if homes else ():  # whether this rank has a part of it
        counted, above = node.value, module.parent(node)
        asked = node.attr.value == "numel" and isinstance(above, cst.Call) and module.code(counted).endswith(".grad")
        beside = asked and any(module.function(node) is home for home in homes)
        if beside and over_parameters(scene, module, counted):
            scene.take("FC26", node, module)
            edits.replace(module.span(counted), f"local_shard({module.code(counted)})")


def _goes_to_all_ranks(module: Module, node: cst.CSTNode, home: cst.FunctionDef) -> bool:
    """Return whether what is made of a tensor is reduced over ranks in the same function."""
    made: set[str] = set()
    lines = module.within(home, cst.Assign, cst.AugAssign, cst.AnnAssign, cst.Call)
    for _ in range(4):  # from one variable to the next
        for line in lines:
            value = line if isinstance(line, cst.Call) else line.value
            inside = value is not None and any(
                found is node or (isinstance(found, cst.Name) and found.value in made)
                for found in module.within(value, cst.Attribute, cst.Name)
            )
            if not inside:
                continue
            if isinstance(line, cst.Call):
                called = line.func
                named = isinstance(called, cst.Attribute) and called.attr.value == "append"
                targets = [called.value] if isinstance(called, cst.Attribute) and named else []
            else:
                targets = [t.target for t in line.targets] if isinstance(line, cst.Assign) else [line.target]
            made |= {target.value for target in targets if isinstance(target, cst.Name)}
    return any(
        isinstance(found, cst.Name) and found.value in made
        for call in module.within(home, cst.Call)
        if module.code(call.func).endswith("all_reduce")
        for found in module.within(call, cst.Name)
    )


def shape_of_parameter(scene: Scene, module: Module, node: cst.Attribute) -> bool:
    """Return whether dimensions are asked of each of a sharded model's parameters."""
    if node.attr.value not in SHAPES or not isinstance(node.value, cst.Name):
        return False
    if module.enclosing(node, cst.FormattedStringExpression) is not None:
        return False
    return over_parameters(scene, module, node) or _asked_by(scene, module, node.value)


def _asked_by(scene: Scene, module: Module, name: cst.Name) -> bool:
    """Return whether a name is the argument of a function that is called with each of the parameters."""
    function = next((a for a in module.ancestors(name) if isinstance(a, (cst.FunctionDef, cst.Lambda))), None)
    own = [] if function is None else [p.name.value for p in function.params.params]
    if function is None or name.value not in own:
        return False
    place = own.index(name.value)
    return any(
        place < len(call.args)
        and isinstance(call.args[place].value, cst.Name)
        and over_parameters(scene, where, call.args[place].value)
        for call, where in scene.flow.calls(function)
    )


def frozen(scene: Scene, module: Module, target: cst.AssignTarget) -> bool:
    """Return whether each parameter's requires_grad is set by assignment."""
    node = target.target
    return (
        isinstance(node, cst.Attribute) and node.attr.value == "requires_grad" and over_parameters(scene, module, node)
    )


def changed_by_hand(scene: Scene, module: Module, called: cst.Attribute) -> bool:
    """Return whether a sharded model's parameters are changed in a loop over them: an average of weights, mostly."""
    if called.attr.value not in IN_PLACE or isinstance(called.value, cst.Call) or "grad" in module.code(called.value):
        return False
    return over_parameters(scene, module, called)


def _summoned(module: Module, node: cst.CSTNode) -> bool:
    """Return whether summon_full_params is open: then parameters aren't sharded."""
    opened = [above for above in module.ancestors(node) if isinstance(above, cst.With)]
    return any("summon_full_params" in module.code(item.item) for block in opened for item in block.items)


def move(scene: Scene) -> list[Undecided]:
    """Move work on each rank's shards, and writes to parameters by hand."""
    problems = []
    for module in scene.modules if scene.shards else ():
        local_gradients(scene, module)
        for call in module.all(cst.Call):
            if not isinstance(call.func, cst.Attribute) or not changed_by_hand(scene, module, call.func):
                continue
            if scene.interface:  # where models are sharded again after an evaluation
                scene.take("FC27", call, module, KEPT, SHARDED_AGAIN)
            else:
                why = "what is written to a group that an evaluation has left gathered is lost"
                problems.append(Undecided("FC27", why, call, module, blocking=False))
    return problems
