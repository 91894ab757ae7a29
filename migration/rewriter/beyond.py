"""The rest after all rules: uses of FSDP1 that no rule has taken, and code whose meaning changes."""

from __future__ import annotations

import re
from dataclasses import replace

import libcst as cst

from migration.options import CLASS
from migration.rewriter import each_parameter, libraries
from migration.rewriter.edits import KEPT, Undecided
from migration.rewriter.module import Module
from migration.rewriter.names import code_of, how_it_travels, uses
from migration.rewriter.rewriting import constant
from migration.rewriter.scene import Scene
from migration.rewriter.symbols import AROUND, BY_CODE, OPTIONS, PACKAGE, PREFIX
from migration.rewriter.values import string

# Asked for by name, to be shared among models.
STREAMS = ("_unshard_stream", "_post_backward_stream", "_pre_unshard_stream", "_all_reduce_stream")


def _why(symbol: str, node: cst.CSTNode, module: Module, scene: Scene) -> str:
    """Name the decision about a use that no rule has taken."""
    row = BY_CODE[code_of(symbol, node, module, scene.symbol)]
    if row.code == "FC04" and symbol == CLASS:
        return how_it_travels(node, module)
    if row.status == "exact" or not row.note:
        return f"the rewriter has no plain lines for it; by hand: {row.becomes}"
    return row.note


def undecided(scene: Scene, known: list[Undecided]) -> list[Undecided]:
    """Uses of FSDP1's names that no rule has taken."""
    problems: list[Undecided] = []
    said = {id(problem.module.statement(problem.node)) for problem in known}
    for module in scene.modules:
        edits = scene.edits(module)
        for node, symbol in uses(module, scene.symbol):
            if symbol in AROUND.values() or edits.covers(node):
                continue
            statement = module.statement(node)
            if id(statement) in said and not isinstance(statement, (cst.FunctionDef, cst.ClassDef)):
                continue  # a rule has said what there is to decide
            code = code_of(symbol, node, module, scene.symbol)
            if symbol.partition(".")[0] in OPTIONS and (scene.calls or scene.fsdp2):
                if (problem := refused(scene, module, node, symbol)) is not None:
                    problems.append(problem)
                if symbol == "default_auto_wrap_policy":  # its name before torch 1.12
                    edits.need(f"{PACKAGE}.wrap", "size_based_auto_wrap_policy")
                    edits.replace(module.span(node), "size_based_auto_wrap_policy")
                    scene.take(code, node, module)
                elif scene.calls:
                    scene.take(code, node, module, KEPT)
                continue
            why = _why(symbol, node, module, scene)
            problem = Undecided(code, why, node, module, blocking=code in ("FC04", "FC05"))
            # A model is never half moved: nor is what another function, or a class derived from FSDP1's, makes of it.
            problem.leftover = not problem.blocking
            problems.append(problem)
    return problems


def changed(scene: Scene, known: list[Undecided]) -> list[Undecided]:
    """Code that names nothing of FSDP1, and whose meaning changes with a sharded model's parameters."""
    problems: list[Undecided] = []
    said = {id(problem.module.statement(problem.node)) for problem in known}
    scene = replace(scene, travels=False)  # what may be a model gets no mark, since most of it is none
    for module in scene.modules:
        edits = scene.edits(module)
        for call in module.all(cst.Call):
            problems += changed_calls(scene, module, call)
            if (kept := around(scene, module, call)) is not None:
                scene.take(kept, call, module, KEPT)
        for target in module.all(cst.AssignTarget):
            if each_parameter.frozen(scene, module, target):
                scene.take("FC18", target, module, KEPT)
        for attribute in module.all(cst.Attribute):
            if each_parameter.shape_of_parameter(scene, module, attribute):
                problems.append(Undecided("FC28", BY_CODE["FC28"].note, attribute, module, blocking=False))
            if each_parameter.gradient(scene, module, attribute) and not edits.covers(attribute):
                problems.append(Undecided("FC26", BY_CODE["FC26"].note, attribute, module, blocking=False))
        for text in module.all(cst.SimpleString):
            if string(text) in STREAMS and scene.shards and id(line := module.statement(text)) not in said:
                said.add(id(line))
                problems.append(Undecided("FC31", "FSDP2's models don't have it", text, module))
            if PREFIX in (string(text) or "") and not isinstance(module.parent(text), cst.Expr):
                if scene.shards:
                    scene.take("FC09", text, module, KEPT)
                if not scene.interface and not _stripped(module, text):
                    problems.append(Undecided("FC09", BY_CODE["FC09"].note, text, module, blocking=False))
    return problems


def refused(scene: Scene, module: Module, node: cst.CSTNode, symbol: str) -> Undecided | None:
    """An option that FSDP2 can't honour, wherever it is given."""
    call = module.parent(node)
    if symbol != "MixedPrecision" or not isinstance(call, cst.Call) or call.func is not node:
        return None
    for arg in call.args:
        named = arg.keyword is not None and arg.keyword.value == "keep_low_precision_grads"
        if named and constant(arg.value) is True:  # what isn't written out is refused at run time
            return Undecided("FP04", BY_CODE["FP04"].note, arg.value, module)
    return None


def _stripped(module: Module, text: cst.SimpleString) -> bool:
    """Return whether a prefix is taken off, which isn't there any more."""
    call = module.parent(module.parent(text) or text)
    named = isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute) and call.func.attr.value
    return named in ("replace", "removeprefix")


def changed_calls(scene: Scene, module: Module, node: cst.Call) -> list[Undecided]:
    """Calls that go on running and mean something else, or run no more."""

    def left(code: str) -> list[Undecided]:
        return [Undecided(code, BY_CODE[code].note, node, module, blocking=False)]

    names = [name for name, _ in module.qualified(node.func)]
    if scene.shards and any(name.endswith(".load_sharded_optimizer_state_dict") for name in names):
        if scene.interface:  # which reads them
            scene.take("FC29", node, module, KEPT)
        return [] if scene.interface or scene.edits(module).covers(node) else left("FC29")
    told = libraries.told(scene.rewriting.program, bool(scene.calls), module, node)
    if found := [Undecided(code, said + BY_CODE[code].note, place, module, False) for code, place, said in told]:
        return found
    first = node.args[0].value if node.args and not node.args[0].star else None
    if any(name.endswith(("utils.clip_grad_norm_", "utils.clip_grad.clip_grad_norm_")) for name in names):
        called = first.func if isinstance(first, cst.Call) else None
        ours = isinstance(called, cst.Attribute) and scene.is_model(called.value, module)
        return left("FC13") if ours and not _other_branch(module, node, called) else []
    if "copy.deepcopy" in names and first is not None and scene.is_model(first, module):
        return left("FC15")
    if isinstance(node.func, cst.Attribute) and _draws(scene, module, node, node.func):
        return left("FC32")
    if isinstance(node.func, cst.Attribute) and not scene.edits(module).covers(node):
        receiver, method = node.func.value, node.func.attr.value
        if method == "apply" and scene.shards and not scene.interface and scene.is_model(receiver, module):
            return left("FM04")
        if (
            method == "numel"
            and not node.args
            and "grad" not in module.code(receiver)
            and each_parameter.over_parameters(scene, module, node)
        ):
            return left("FC17")
    return []


DRAWING = re.compile(r"_?(re)?(set|init(iali[sz]e)?)_?(param(eter)?s?|weights?)", re.IGNORECASE)
DRAWN = re.compile(r"(\w+_)?(normal|uniform|orthogonal)_")  # in place, or by torch.nn.init


def _draws(scene: Scene, module: Module, node: cst.Call, called: cst.Attribute) -> bool:
    """Return whether a model is given drawn values after it has been sharded, by its method or one by one."""
    if DRAWN.fullmatch(called.attr.value):
        return not isinstance(called.value, cst.Call) and each_parameter.over_parameters(scene, module, node)
    if not scene.shards or not DRAWING.fullmatch(called.attr.value) or module.code(called.value) == "self":
        return False
    here, home = module.span(node)[0], module.function(node)
    given = [
        call.args[0].value
        for call, where in scene.calls
        if where is module and module.function(call) is home and module.span(call)[0] < here and call.args
        if not module.exclusive(call, node)
    ]
    return scene.is_model(called.value, module) or module.code(called.value) in [module.code(one) for one in given]


def around(scene: Scene, module: Module, node: cst.Call) -> str | None:
    """List calls on a sharded model that still work, and belong in another place."""
    first = node.args[0].value if node.args and not node.args[0].star else None
    names = [name for name, _ in module.qualified(node.func)]
    wrapping = [name for name in names if name.endswith((".apply_activation_checkpointing", "torch.compile"))]
    if wrapping and first is not None and scene.is_model(first, module):
        return "FC25" if "torch.compile" in wrapping else "FC23"
    called = node.func if isinstance(node.func, cst.Attribute) else None
    if called is None or called.attr.value != "requires_grad_":
        return None
    each = each_parameter.over_parameters(scene, module, node)
    return "FC18" if each or scene.is_model(called.value, module) else None


def _other_branch(module: Module, node: cst.Call, called: cst.CSTNode | None) -> bool:
    """True if FSDP1's own clipping stands in the branch above this one: then this is for models that aren't sharded."""
    model = module.code(called.value) if isinstance(called, cst.Attribute) else ""
    below: cst.CSTNode = node
    for above in module.ancestors(node):
        if (
            isinstance(above, cst.If)
            and below is above.orelse
            and f"{model}.clip_grad_norm_(" in module.code(above.body)
        ):
            return True
        below = above
    return False
