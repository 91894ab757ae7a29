"""What a program does with each of a sharded model's parameters: they are DTensors now, element by element the same."""

from __future__ import annotations

import libcst as cst

from rewriter.helpers import HELPERS
from rewriter.module import Module, last_name
from rewriter.scene import Scene
from rewriter.taken import KEPT
from rewriter.values import assignment, string

IN_PLACE = ("mul_", "add_", "copy_", "lerp_", "sub_", "div_", "clamp_", "normal_", "zero_", "fill_")
LISTS = ("list", "tuple", "dict", "sorted", "enumerate", "zip", "filter", "iter", "reversed", "chain")
REDUCING = ("norm", "vector_norm", "sum", "max", "min", "amax", "isnan", "isinf", "isfinite", "numel", "dot",
            "count_nonzero")  # fmt: skip
SAME_ELEMENTS = ("detach", "float", "double", "abs", "pow", "square", "clone", "cpu", "to", "flatten", "view",
                 "reshape")  # fmt: skip
SHAPES = ("ndim", "dim", "shape", "size")


def over_parameters(scene: Scene, module: Module, node: cst.CSTNode) -> bool:
    """Whether something is done with each of the parameters of a sharded model, and they aren't whole there."""
    if _summoned(scene, module, node):
        return False
    for above in module.ancestors(node):
        if isinstance(above, cst.FunctionDef):
            return False
        loops: list[cst.BaseExpression] = []
        if isinstance(above, cst.For):
            loops.append(above.iter)
        elif isinstance(above, (cst.GeneratorExp, cst.ListComp, cst.SetComp, cst.DictComp)):
            loops.append(above.for_in.iter)
        for over in loops:
            if _lists_parameters(scene, module, over):
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
            if own and id(module.function(over)) in scene.called_on_models:
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
    """Whether a gradient's value is computed with, in a loop over a sharded model's parameters."""
    above = module.parent(node)
    listed = isinstance(above, (cst.ListComp, cst.GeneratorExp)) and above.elt is node
    if node.attr.value != "grad" or not (isinstance(above, cst.Attribute) or listed or _reduced(module, node)):
        return False
    shown = above.attr.value if isinstance(above, cst.Attribute) else ""
    if shown in ("dtype", "device", "is_cuda", "requires_grad", "numel") or _scaled(module, node):
        return False
    return over_parameters(scene, module, node)


def _scaled(module: Module, node: cst.BaseExpression) -> bool:
    """Whether each element of a tensor is changed by a number, which is the same for a shard."""
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
    """Whether nothing but a number is made of a tensor: its norm, a sum, a test."""
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
    """What is summed over ranks by hand was a sum over this rank's shards, and stays that."""
    edits, homes = scene.edits(module), []
    for node in module.all(cst.Attribute):
        home = module.function(node)
        if home is None or not gradient(scene, module, node) or not _reduced(module, node):
            continue
        if _goes_to_all_ranks(module, node, home):
            homes.append(home)
            scene.take("FC26", node, module)
            edits.replace(module.span(node), f"local_shard({module.code(node)})")
            edits.helpers["local_shard"] = HELPERS["local_shard"]
    for node in module.all(cst.Attribute) if homes else ():  # whether this rank has a part of it
        counted, above = node.value, module.parent(node)
        asked = node.attr.value == "numel" and isinstance(above, cst.Call) and module.code(counted).endswith(".grad")
        beside = asked and any(module.function(node) is home for home in homes)
        if beside and over_parameters(scene, module, counted):
            scene.take("FC26", node, module)
            edits.replace(module.span(counted), f"local_shard({module.code(counted)})")


def _goes_to_all_ranks(module: Module, node: cst.CSTNode, home: cst.FunctionDef) -> bool:
    """Whether what is made of a tensor is reduced over ranks in the same function."""
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
    """Whether dimensions are asked of each of a sharded model's parameters."""
    if node.attr.value not in SHAPES or not isinstance(node.value, cst.Name):
        return False
    if module.enclosing(node, cst.FormattedStringExpression) is not None:
        return False
    return over_parameters(scene, module, node) or _asked_by(scene, module, node.value)


def _asked_by(scene: Scene, module: Module, name: cst.Name) -> bool:
    """Whether a name is the argument of a function that is called with each of the parameters."""
    function = next((a for a in module.ancestors(name) if isinstance(a, (cst.FunctionDef, cst.Lambda))), None)
    own = [] if function is None else [p.name.value for p in function.params.params]
    if name.value not in own:
        return False
    place = own.index(name.value)
    if isinstance(function, cst.FunctionDef):
        calls = scene.values.calls(function, module)
    else:
        above = module.parent(function) if function is not None else None
        target = above.targets[0].target if isinstance(above, cst.Assign) else None
        reads = module.references(target) if isinstance(target, cst.Name) else []
        calls = [(c, module) for r in reads if isinstance(c := module.parent(r), cst.Call) and c.func is r]
    return any(
        place < len(call.args)
        and isinstance(call.args[place].value, cst.Name)
        and over_parameters(scene, where, call.args[place].value)
        for call, where in calls
    )


def frozen(scene: Scene, module: Module, target: cst.AssignTarget) -> bool:
    """Whether each parameter's requires_grad is set by assignment."""
    node = target.target
    return (
        isinstance(node, cst.Attribute) and node.attr.value == "requires_grad" and over_parameters(scene, module, node)
    )


def changed_by_hand(scene: Scene, module: Module, called: cst.Attribute) -> list[cst.BaseExpression]:
    """The sharded models over whose parameters a loop goes that changes them: an EMA, mostly."""
    if called.attr.value not in IN_PLACE or isinstance(called.value, cst.Call):
        return []
    if "grad" in module.code(called.value):
        return []
    loop = module.enclosing(called, cst.For)
    if loop is None or _summoned(scene, module, called):
        return []
    return [
        model
        for over in (loop, *(made.value for made in _listed_before(module, loop)))
        if over is not None
        for model in _models(scene, module, over)
    ]


def _summoned(scene: Scene, module: Module, node: cst.CSTNode) -> bool:
    """Whether summon_full_params is open, and stays: then parameters aren't sharded."""
    opened = [above for above in module.ancestors(node) if isinstance(above, cst.With)]
    whole = [w for w in opened if any("summon_full_params" in module.code(item.item) for item in w.items)]
    return any(not changes_each(scene, module, block) or is_whole(scene, module, block) for block in whole)


def changes_each(scene: Scene, module: Module, block: cst.With) -> bool:
    """Whether all that a block does is to change parameters of sharded models element by element, in place. What is
    whole isn't needed for that."""
    for loop in block.body.body:
        models = _models(scene, module, loop) if isinstance(loop, cst.For) else []
        if (
            not models
            or not isinstance(loop, cst.For)
            or len(models)
            != len(
                [
                    c
                    for c in module.within(loop.iter, cst.Attribute)
                    if c.attr.value in ("parameters", "named_parameters")
                ]
            )
        ):
            return False
        for line in loop.body.body:
            made = line.body[0] if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else None
            called = made.value.func if isinstance(made, cst.Expr) and isinstance(made.value, cst.Call) else None
            if not isinstance(called, cst.Attribute) or called.attr.value not in IN_PLACE:
                return False
    return True


def keeps_copies(scene: Scene, module: Module, block: cst.With) -> bool:
    """Whether a block keeps copies of whole parameters: what is added to them later has to be whole too."""
    assigned = module.within(block.body, cst.Assign, cst.AnnAssign)
    calls = [call for line in assigned if line.value is not None for call in module.within(line.value, cst.Call)]
    copied = [c for c in calls if last_name(c) in ("clone", "deepcopy")]
    return bool(copied) and not changes_each(scene, module, block)


def is_whole(scene: Scene, module: Module, block: cst.With) -> bool:
    """Whether a block changes copies that another one has kept of whole parameters. One decision for both."""
    return _changes_others(scene, module, block) and any(keeps_copies(scene, m, other) for other, m in scene.summoned)


def _changes_others(scene: Scene, module: Module, block: cst.With) -> bool:
    """Whether a block that `changes_each` changes something else than the parameters of sharded models: an average."""
    others = []
    for loop in module.within(block.body, cst.For):
        names = [name.value for name in module.within(loop.target, cst.Name)]
        given = loop.iter.args if isinstance(loop.iter, cst.Call) and module.code(loop.iter.func) == "zip" else ()
        listed = [name for name, arg in zip(names, given, strict=False) if _models(scene, module, arg.value)]
        own = listed if given else names
        for call in module.within(loop.body, cst.Call):
            root = call.func
            while isinstance(root, (cst.Attribute, cst.Call, cst.Subscript)):
                root = root.func if isinstance(root, cst.Call) else root.value
            changed = last_name(call) in IN_PLACE and isinstance(root, cst.Name)
            others += [root.value not in own] if changed else []
    return bool(others) and all(others)


def _models(scene: Scene, module: Module, over: cst.CSTNode) -> list[cst.BaseExpression]:
    """The sharded models whose parameters an expression lists; of a loop, those that it goes over."""
    within = over.iter if isinstance(over, cst.For) else over
    return [
        call.func.value
        for call in module.within(within, cst.Call)
        if isinstance(call.func, cst.Attribute)
        and call.func.attr.value in ("parameters", "named_parameters")
        and scene.is_model(call.func.value, module)
    ]


def _listed_before(module: Module, loop: cst.For) -> list[cst.Assign | cst.AnnAssign]:
    """Statements of the same function that make what the loop goes over, or looks names up in."""
    names = module.within(loop, cst.Name)
    read = [n for n in names if isinstance(module.parent(n), (cst.Subscript, cst.Attribute, cst.Arg)) or n is loop.iter]
    found: dict[int, cst.Assign | cst.AnnAssign] = {}
    for name in read:
        for binding in module.assignments(name):
            made = assignment(binding.node, module)
            before = made is not None and module.span(made)[0] < module.span(loop)[0]
            if made is not None and before and module.function(made) is module.function(loop):
                found[id(made)] = made
    return list(found.values())


def move(scene: Scene) -> None:
    """What is done with each rank's shards, and what is written to parameters by hand."""
    for module in scene.modules if scene.shards else ():
        local_gradients(scene, module)
        for call in module.all(cst.Call) if scene.interface else ():  # where models are sharded after an evaluation
            if isinstance(call.func, cst.Attribute) and changed_by_hand(scene, module, call.func):
                scene.take("FC27", call, module, KEPT)
    if not scene.interface:
        _reshard_before_changes(scene)


def _reshard_before_changes(scene: Scene) -> None:
    """Before a loop that changes parameters, groups that an evaluation has left gathered are sharded again: what is
    written to a gathered group is lost."""
    for module in scene.modules if scene.calls else ():
        loops: dict[int, tuple[cst.For, list[str]]] = {}
        for call in module.all(cst.Call):
            loop = module.enclosing(call, cst.For)
            models = changed_by_hand(scene, module, call.func) if isinstance(call.func, cst.Attribute) else []
            if loop is not None and models:
                scene.take("FC27", call, module)
                known = loops.setdefault(id(loop), (loop, []))[1]
                texts = dict.fromkeys(scene.edits(module).code(model) for model in models)
                known += [text for text in texts if text not in known]
        for loop, shown in loops.values():
            lists = [made for made in _listed_before(module, loop) if made.value and _models(scene, module, made.value)]
            # Copies that are made beside it have to be of the same kind.
            copies = [one for one in module.block_of(loop) if _models(scene, module, one)]
            first = min(
                (module.statement(one) or one for one in (*lists, *copies, loop)), key=lambda one: module.span(one)[0]
            )
            scene.take("FC27", first, module)
            reshard(scene, module, first, shown, "what is written to a gathered group is lost")


def reshard(scene: Scene, module: Module, statement: cst.CSTNode, models: list[str], why: str) -> None:
    """Lines above a statement that shard all groups of some models again."""
    edits = scene.edits(module)
    edits.need("torch.distributed.fsdp", "FSDPModule")
    taken = {name.value for name in module.within(module.function(statement) or module.tree, cst.Name)}
    taken |= {text.partition(".")[0] for text in models}
    name = next(n for n in ("module", "group", "submodule", "fsdp_module") if n not in taken or n == "fsdp_module")
    over = f"{models[0]}.modules()" if len(models) == 1 else f"[{', '.join(f'*{m}.modules()' for m in models)}]"
    edits.before(
        statement,
        f"for {name} in {over}:  # {why}\n    if isinstance({name}, FSDPModule):\n        {name}.reshard()",
    )
