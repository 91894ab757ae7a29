"""Every call that makes a sharded model, whatever name the class has by then, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from rewriter import beside, names
from rewriter.bindings import Leaf
from rewriter.construct import Construction, code_of, named
from rewriter.edits import Undecided
from rewriter.emit import Emission
from rewriter.module import Module, last_name
from rewriter.program import Program
from rewriter.scene import Scene
from rewriter.symbols import CLASS
from rewriter.values import Values

SHARD = "shard_like_fsdp1"


@dataclass
class Made:
    """`through`: the reads of FSDP1's class from which it goes to this call, by node; none if the call names it."""

    node: cst.Call
    module: Module
    through: frozenset[int] = frozenset()
    by_wrap: bool = False  # wrap(module), with the class and the options of enable_wrap


def constructions(program: Program, values: Values) -> list[Made]:
    """Every call of FSDP1's class, of a partial of it, and of what may be either; inner ones first."""
    found: list[Made] = []
    if not any(symbol == CLASS for module in program.relevant() for _, symbol in names.uses(module, program.symbol)):
        return []
    held = names.holders(program)
    for module in program.relevant():
        for node in module.all(cst.Call):
            symbol = program.symbol(node.func, module)
            if symbol in (CLASS, "wrap"):
                found.append(Made(node, module, by_wrap=symbol == "wrap"))
            elif symbol is None and _name(node.func) in held:
                through = frozenset(_origins(values, values.leaves(node.func, module)))
                found += [Made(node, module, through)] if through else []
    return sorted(found, key=lambda made: made.module.span(made.node)[1] - made.module.span(made.node)[0])


def _name(node: cst.BaseExpression) -> str:
    """The last name in what is called: of a dictionary, or of a function, where that holds or returns it."""
    while isinstance(node, (cst.Subscript, cst.Call)):
        node = node.value if isinstance(node, cst.Subscript) else node.func
    if isinstance(node, cst.Attribute) and node.attr.value in ("get", "pop"):
        node = node.value
    return last_name(node)


def _origins(values: Values, leaves: list[Leaf]) -> list[int]:
    found = []
    for leaf in leaves:
        if leaf.symbol != CLASS:
            continue
        if leaf.kind == "symbol":
            found.append(id(leaf.node))
        elif leaf.kind == "partial" and isinstance(leaf.node, cst.Call):
            found += _origins(values, values.leaves(leaf.node.args[0].value, leaf.module))
    return found


def make(scene: Scene, made: Made) -> list[Undecided]:
    """As calls of fully_shard. What stops it is decided at run time."""
    node, module = made.node, made.module
    try:
        if made.through or made.by_wrap:
            raise Undecided("FC04", names.how_it_travels(node, module), node, module)
        entries = {}
        for name, call, where in scene.entries(node, module):
            entries[name] = scene.maybe_without(node, module, name)
            scene.take("FC16", call, where)
        Emission(Construction(scene.rewriting, node, module), entries).emit()
    except Undecided as problem:
        problem.at_run_time = True
        return [problem]
    return []


def make_at_run_time(scene: Scene, made: Made) -> list[Undecided]:
    """As a call of `shard_like_fsdp1`, with the options that it has."""
    node, module = made.node, made.module
    if beside.taken(module):
        why = f"{beside.NAME}.py beside it is another file; rename it, since the options need a file of that name"
        return [Undecided("FC07", why, node, module)]
    edits = scene.edits(module)
    home = beside.package(scene.rewriting.program, module)
    if not made.through and not made.by_wrap:
        edits.need(home, SHARD)
        scene.take("FA01", node.func, module)
        edits.replace(module.span(node.func), SHARD)
    for name, arg in named(node):
        scene.take(code_of(name), arg, module)
    entries = list(dict.fromkeys(name for name, _, _ in scene.entries(node, module)))
    for _, call, where in scene.entries(node, module):
        scene.take("FC16", call, where)
    if entries:
        edits.need(home, "gather_in")
        start, end = module.span(node)
        edits.replace((start, start), "gather_in(")
        edits.replace((end, end), "".join(f', "{name}"' for name in entries) + ")")
    return []


def pass_on(scene: Scene, node: cst.BaseExpression, module: Module) -> None:
    """The class where a program passes it on to a call that is known."""
    above = module.parent(node)
    outer = module.parent(above) if isinstance(above, cst.Arg) else None
    called = isinstance(outer, cst.Call) and last_name(outer) == "partial"
    name = SHARD if called else "ShardedLikeFSDP1"
    edits = scene.edits(module)
    edits.need(beside.package(scene.rewriting.program, module), name)
    scene.take("FC04", node, module)
    edits.replace(module.span(node), name)
