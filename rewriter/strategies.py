"""A ShardingStrategy that is chosen at run time: it becomes its own name, a string, from which the program makes
fully_shard's mesh and resharding. Only one that is written out where FSDP is called needs no such name."""

from __future__ import annotations

import libcst as cst

from rewriter.bindings import Leaf
from rewriter.edits import Undecided
from rewriter.module import Module
from rewriter.names import uses
from rewriter.scene import Scene
from rewriter.symbols import MEMBERS, name_or
from rewriter.translate import Rewriting

ENUM, KINDS = "ShardingStrategy", "StateDictType"
SETTING = ("state_dict_type", "set_state_dict_type", "get_state_dict_type")
# One of these, or one of the two, is an argument of fully_shard by itself.
RESHARDING = {f"{ENUM}.FULL_SHARD", f"{ENUM}.SHARD_GRAD_OP", ""}


def at_run_time(rewriting: Rewriting, given: list[tuple[cst.BaseExpression, Module]]) -> bool:
    """Whether one of the `sharding_strategy` arguments may be several, and not only with resharding or without."""
    for node, module in given:
        leaves = rewriting.values.leaves(node, module)
        known = {leaf.symbol for leaf in leaves if leaf.symbol.startswith(ENUM) or leaf.kind == "none"}
        if not known or len(known) < len({leaf.symbol or leaf.kind for leaf in leaves}):
            continue  # one of them isn't known
        if any(leaf.kind == "member" for leaf in leaves) or (len(known) > 1 and not known <= RESHARDING):
            return True
        if isinstance(node, cst.Attribute) and any(_field(leaf) for leaf in leaves):
            return True
    return False


def _field(leaf: Leaf) -> bool:
    """Whether a value is the default of a configuration's field, which a command line may set to another."""
    return isinstance(leaf.module.enclosing(leaf.node, cst.ClassDef, cst.FunctionDef), cst.ClassDef)


def name_of(leaf: Leaf) -> str:
    """The text of a strategy's name."""
    if leaf.kind == "none":
        return "None"
    if leaf.kind == "member" and leaf.symbol == ENUM:
        return leaf.module.code(leaf.args[0])
    head, _, member = leaf.symbol.partition(".")
    if leaf.kind != "symbol" or head != ENUM:
        raise Undecided("FA03", "which strategy is chosen isn't known here", leaf.node, leaf.module)
    return f'"{member}"'


def move(scene: Scene) -> None:
    """What else the program does with strategies: comparisons, annotations, names of them. Before the calls are moved,
    which may say some of it again."""
    for module in scene.modules if scene.rewriting.by_name else ():
        _names(scene, module, ENUM)


def move_kinds(scene: Scene) -> None:
    """The same for kinds of state dicts, once the calls that set one are moved."""
    for module in scene.modules if _all_kinds_said(scene) else ():
        _names(scene, module, KINDS)


def _all_kinds_said(scene: Scene) -> bool:
    """Whether StateDictType only tells cases apart: calls that are left say which kind they set, or set none."""
    return bool(scene.calls) and all(
        scene.edits(module).covers(call)
        or any((scene.symbol(arg.value, module) or "").startswith(f"{KINDS}.") for arg in call.args)
        for module in scene.modules
        for call, method in scene.static_calls(module)
        if method in SETTING
    )


def _names(scene: Scene, module: Module, enum: str) -> None:
    edits = scene.edits(module)
    for attribute in module.all(cst.Attribute):
        if attribute.attr.value == "name" and _is_member(attribute.value, module, scene, enum):
            scene.rewriting.consume(attribute.value)
            scene.take("FA03", attribute, module)
            edits.replace(module.span(attribute), edits.code(attribute.value))
    for node, symbol in uses(module, scene.symbol):
        head, _, member = symbol.partition(".")
        if head == enum and not edits.covers(node) and not _sets(scene, module, node):
            _use(scene, module, node, enum, member.removesuffix(".name"))


def _sets(scene: Scene, module: Module, node: cst.CSTNode) -> bool:
    """Whether this is the kind that a call of FSDP1 sets, which is left."""
    above = module.parent(node)
    call = module.parent(above) if isinstance(above, cst.Arg) else None
    return isinstance(call, cst.Call) and any(
        call is known for known, method in scene.static_calls(module) if method in SETTING
    )


def _is_member(node: cst.BaseExpression, module: Module, scene: Scene, enum: str) -> bool:
    if not isinstance(node, (cst.Name, cst.Attribute)) or enum in module.code(node):
        return False
    leaves = scene.values.leaves(node, module)
    return bool(leaves) and all(leaf.symbol.partition(".")[0] == enum for leaf in leaves)


def _use(scene: Scene, module: Module, node: cst.Name | cst.Attribute, enum: str, member: str) -> None:
    edits, above = scene.edits(module), module.parent(node)
    if not member:
        dynamic = next((leaf for leaf in _chosen(node, module, scene) if leaf.kind == "member"), None)
        call = module.parent(above) if isinstance(above, cst.Arg) else None
        if dynamic is not None:
            name = dynamic.module.code(dynamic.args[0])
            if 1 in dynamic.args:
                name = name_or(name, enum, edits.code(dynamic.args[1]))
            edits.replace(module.span(dynamic.node), name)
        elif isinstance(call, cst.Call) and module.code(call.func) == "hasattr" and call.args[0] is above:
            listed = ", ".join(f'"{name}"' for name in MEMBERS[enum])
            edits.replace(module.span(call), f"{edits.code(call.args[1].value)} in ({listed})")
        elif module.enclosing(node, cst.Annotation) is not None:
            edits.replace(module.span(node), "str")
    elif "." not in member:
        compared = module.parent(above) if isinstance(above, cst.ComparisonTarget) else None
        operator = above.operator if isinstance(above, cst.ComparisonTarget) else None
        if isinstance(compared, cst.Comparison) and isinstance(operator, (cst.Is, cst.IsNot)):
            # A string is equal and need not be the same.
            sign = "==" if isinstance(operator, cst.Is) else "!="
            edits.replace(module.span(compared), f'{edits.code(compared.left)} {sign} "{member}"')
        else:
            edits.replace(module.span(node), f'"{member}"')


def _chosen(node: cst.CSTNode, module: Module, scene: Scene) -> list[Leaf]:
    """ShardingStrategy[name] and getattr(ShardingStrategy, name), found from the enumeration in them."""
    above = module.parent(node)
    whole = module.parent(above) if isinstance(above, cst.Arg) else above
    return scene.values.leaves(whole, module) if isinstance(whole, (cst.Subscript, cst.Call)) else []
