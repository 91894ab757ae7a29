"""Uses that may be of FSDP1, as the flow of values says and no name of it for certain; and questions by its name."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migration.rewriter.edits import KEPT, Taken, Undecided
from migration.rewriter.flow import Flow
from migration.rewriter.module import Module, last_name
from migration.rewriter.objects import A_METHOD, ALL, MAYBE, THE_CLASS
from migration.rewriter.scene import Scene
from migration.rewriter.symbols import CLASS
from migration.rewriter.values import string

# By which programs ask what they have: FSDP1's private attributes of parameters and modules.
PRIVATE = ("_fsdp_flattened", "_is_fsdp_managed_module", "_fsdp_use_orig_params", "_is_flat_param")
CODES = ("FC36", "FC37")
WORDS = (CLASS, "fully_sharded_data_parallel", "FlatParameter")


def classes(scene: Scene, modules: list[Module]) -> list[Undecided]:
    """Comparisons of the class of each module of a model: a group's is its own, whatever it was."""
    return [
        Undecided("FC37", "a module that is a group has a class of its own: ask isinstance()", node, module, False)
        for module in modules
        for node in module.all(cst.Comparison)
        if not scene.edits(module).covers(node)
        for asked in _classes_in(node, module)
        for of in _looped_over(asked, node, module)
        if isinstance(of, cst.Call) and isinstance(called := of.func, cst.Attribute)
        if called.attr.value in ("modules", "named_modules", "children", "named_children")
        if scene.is_model(called.value, module) or scene.flow.may_be(called.value, MAYBE)
    ]


def _looped_over(name: cst.Name, node: cst.CSTNode, module: Module) -> Iterator[cst.BaseExpression]:
    """Yield what the loops around an expression go through by a name."""
    for above in module.ancestors(node):
        loop = above.for_in if isinstance(above, cst.BaseComp) else above
        if isinstance(loop, cst.For | cst.CompFor):
            bound = {one.value for one in module.within(loop.target, cst.Name)}
            yield from [loop.iter] if name.value in bound else []


def _classes_in(node: cst.Comparison, module: Module) -> Iterator[cst.Name]:
    """The names in `type(name)`, `name.__class__`, and in what is made of these."""
    for one in module.within(node, cst.Call, cst.Attribute):
        if isinstance(one, cst.Attribute):
            held = one.value if one.attr.value == "__class__" else None
        else:
            held = one.args[0].value if module.code(one.func) == "type" and len(one.args) == 1 else None
        if isinstance(held, cst.Name):
            yield held


def undecided(scene: Scene, known: list[Undecided]) -> list[Undecided]:
    """For a program in plain lines: it turns out at run time, which they don't ask."""
    said = {id(problem.module.statement(problem.node)) for problem in known}
    return [
        Undecided(code, why, node, module, blocking=False)
        for module in scene.modules
        for node, code, why in (*_carried(scene, module), *_asked(module))
        if id(module.statement(node)) not in said and not scene.edits(module).covers(node)
    ]


def take(scene: Scene, module: Module) -> None:
    """For one that keeps FSDP1's interface, which has the class, its methods, and the answers of FSDP1."""
    for node, code, why in (*_carried(scene, module), *_asked(module)):
        if not scene.edits(module).covers(node):
            scene.rewriting.account.append(Taken(code, node, module, KEPT, why))


def _carried(scene: Scene, module: Module) -> Iterator[tuple[cst.CSTNode, str, str]]:
    flow, found = scene.flow, list[tuple[cst.CSTNode, str, str]]()
    for node in module.all(cst.Call, cst.ClassDef, cst.Attribute, cst.Annotation):
        if isinstance(node, cst.Attribute):
            mine = scene.symbol(node, module) is None and not scene.is_model(node.value, module)
            found = [(node, "a method of FSDP1's model", flow.may_be(node, A_METHOD))] if mine else []
        elif isinstance(node, cst.ClassDef):
            found = [(base.value, "FSDP1's class", flow.may_be(base.value, THE_CLASS)) for base in node.bases]
        elif isinstance(node, cst.Annotation):
            found = [(node.annotation, "FSDP1's class", flow.may_be(node.annotation, THE_CLASS))]
        else:
            found = _called(flow, node)
        for place, what, origin in found:
            if origin and scene.symbol(place, module) is None:
                yield place, "FC36", f"may be {what}, from {origin}"


def _called(flow: Flow, node: cst.Call) -> list[tuple[cst.CSTNode, str, str]]:
    if last_name(node.func) in ("isinstance", "issubclass") and len(node.args) == 2:
        asked = node.args[1].value
        held = [flow.values.get((box, ALL), {}).get(THE_CLASS, "") for box in flow.values.get(id(asked), ())]
        return [(asked, "FSDP1's class", next(filter(None, [flow.may_be(asked, THE_CLASS), *held]), ""))]
    found: list[tuple[cst.CSTNode, str, str]] = [(node.func, "FSDP1's class", flow.may_be(node.func, THE_CLASS))]
    if last_name(node.func) == "getattr":
        found.append((node, "a method of FSDP1's model", flow.may_be(node, A_METHOD)))
    elif not isinstance(node.func, cst.Attribute):
        found.append((node.func, "a method of FSDP1's model", flow.may_be(node.func, A_METHOD)))
    return found


def _asked(module: Module) -> Iterator[tuple[cst.CSTNode, str, str]]:
    """`"FullyShardedDataParallel" in str(type(model))`, `hasattr(p, "_fsdp_flattened")` and the like."""
    for text in module.all(cst.SimpleString):
        said, call = string(text) or "", module.parent(module.parent(text) or text)
        inside = module.enclosing(text, cst.Comparison, cst.Call, cst.SimpleStatementLine) if said else None
        if not isinstance(inside, (cst.Comparison, cst.Call)):
            continue
        if said in PRIVATE or (isinstance(inside, cst.Comparison) and any(word in said for word in WORDS)) or (
            isinstance(call, cst.Call) and last_name(call.func) in ("startswith", "endswith") and CLASS.startswith(said)
        ):  # fmt: skip
            yield text, "FC37", ""
