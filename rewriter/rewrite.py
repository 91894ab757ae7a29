"""A program moved to FSDP2, as far as it can be with certainty."""

from __future__ import annotations

import contextlib
import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path

import libcst as cst

from fsdp2.checkpoint.refusal import printable
from rewriter import (
    account,
    beyond,
    cleared,
    each_parameter,
    imports,
    marks,
    methods,
    names,
    optimizers,
    partials,
    policies,
    precision,
    sharded_reads,
    spawn,
    spreads,
    statedicts,
    strategies,
    unpacked,
)
from rewriter.account import Entry
from rewriter.bindings import Leaf
from rewriter.construct import Construction
from rewriter.edits import Edits, Undecided
from rewriter.emit import Emission
from rewriter.given import Given
from rewriter.module import Module, last_name
from rewriter.placement import meta_calls
from rewriter.program import Program
from rewriter.scene import Scene
from rewriter.source import Source
from rewriter.symbols import CLASS
from rewriter.taken import KEPT
from rewriter.tracked import Tracked
from rewriter.translate import Rewriting
from rewriter.values import Values

LIBRARY = re.compile(r"^\s*(from|import) (accelerate|lightning|pytorch_lightning|composer)\b", re.MULTILINE)


@dataclass
class Rewritten:
    """What became of a file: its new bytes, and the difference for a reader."""

    source: Source
    data: bytes
    diff: str


@dataclass
class Result:
    files: list[Rewritten] = field(default_factory=list)
    undecided: list[Undecided] = field(default_factory=list)
    account: list[Entry] = field(default_factory=list)


def constructions(program: Program, values: Values) -> list[tuple[cst.Call, Module, Leaf | None]]:
    """Every call of FSDP1's class, and of a partial of it, inner ones first."""
    found: list[tuple[cst.Call, Module, Leaf | None]] = []
    held = names.holders(program)
    for module in program.relevant():
        for node in module.all(cst.Call):
            if program.symbol(node.func, module) == CLASS:
                found.append((node, module, None))
            elif last_name(node) in held and isinstance(node.func, (cst.Name, cst.Attribute)):
                presets = [leaf for leaf in _called(values, node.func, module) if leaf.kind in ("partial", "symbol")]
                ours = [leaf for leaf in presets if leaf.symbol == CLASS]
                if ours:
                    found.append((node, module, ours[0] if ours[0].kind == "partial" else None))
    return sorted(found, key=lambda item: item[1].span(item[0])[1] - item[1].span(item[0])[0])


def _called(values: Values, node: cst.Name | cst.Attribute, module: Module) -> list[Leaf]:
    """What a called name may be, where that is worth asking: functions and classes aren't FSDP1's class."""
    if isinstance(node, cst.Attribute) and not (isinstance(node.value, cst.Name) and node.value.value == "self"):
        return []
    return values.leaves(node, module)


def rewrite(program: Program) -> Result:
    """Move what can be moved. Of files that import each other nothing is changed if a constructor in one of them can't
    be decided: only comments are added then, so that no model is half of one kind and half of the other."""
    spelled = program
    for step in (unpacked, spreads, partials):
        if made := step.spelled_out(spelled):
            spelled = Program([made.get(path, source) for path, source in spelled.sources.items()], spelled)
    if spelled is not program:
        result = _rewrite(spelled, program)
        if not any(problem.blocking for problem in result.undecided):
            return result
    return _rewrite(program, program)


def _rewrite(program: Program, given: Program) -> Result:
    """`given`: the program as it is on disk, from which the differences are shown."""
    scene, undecided = _attempt(program)
    rewriting = scene.rewriting
    together = _together(program)
    blocked = {together[id(problem.module)] for problem in undecided if problem.blocking}
    undecided = [p for p in undecided if not (p.leftover and together[id(p.module)] in blocked)]
    result = Result(undecided=undecided, account=_account(scene, undecided, together, blocked, given))
    exported = _exported(program)
    for module in program.parsed:
        stays = together[id(module)] in blocked
        edits = Edits(module) if stays else rewriting.edits(module)
        marks.put(edits, [problem for problem in undecided if problem.module is module])
        if stays and not edits.changed:
            continue
        path = module.path.resolve()
        lost = [] if stays else [name.bound for name in imports.imported(module) if _lost(program, module, name)]
        made = _finished(edits, given.sources[path], exported.get(path, set()), lost, tidy=not stays)
        if made is not None:
            result.files.append(made)
    return result


def _account(
    scene: Scene, undecided: list[Undecided], together: dict[int, int], blocked: set[int], given: Program
) -> list[Entry]:
    program = scene.rewriting.program
    found = account.entries(scene, undecided)
    found = account.held_back(found, {str(m.path) for m in program.parsed if together[id(m)] in blocked})
    if program is not given:
        found = account.placed(found, program, given)
    return found + account.imported(given, found)


def _together(program: Program) -> dict[int, int]:
    """A number for each module; those that import one another, directly or not, have the same."""
    group = {id(module): number for number, module in enumerate(program.parsed)}
    for module in program.parsed:
        for statement in module.all(cst.Import, cst.ImportFrom):
            for dotted in imports.packages(statement):
                path = program.file_of(dotted, module)
                other = program.known(path) if path is not None else None
                if other is not None:
                    old, new = group.get(id(other), -1), group[id(module)]
                    group.update({key: new for key, number in group.items() if number == old})
    return group


def _attempt(program: Program) -> tuple[Scene, list[Undecided]]:
    """All changes of a program, and what stopped some of them."""
    rewriting = Rewriting(program)
    calls = constructions(program, rewriting.values)
    tracked = Tracked(program, rewriting.values, [(node, module) for node, module, _ in calls])
    scene = Scene(rewriting, tracked, [(node, module) for node, module, _ in calls])
    if not calls and (library := _by_library(program)):
        return scene, library
    undecided: list[Undecided] = []
    rewriting.by_name = strategies.at_run_time(rewriting, _strategies(rewriting, calls))
    for step in (methods.move, statedicts.move):
        undecided += step(scene)
    strategies.move(scene)
    for node, module, preset in calls:
        try:
            called = {}
            for name, made, where in scene.entries(node, module):
                called[name] = scene.maybe_without(node, module, name)
                scene.take("FC16", made, where)
            Emission(Construction(rewriting, node, module, preset), called).emit()
            if preset is not None:
                rewriting.take("FA01", node.func, module)
                rewriting.drop(node.func, module)
        except Undecided as problem:
            undecided.append(problem)
    undecided += optimizers.move(scene)
    strategies.move_kinds(scene)
    if calls:
        precision.move_unread(rewriting)
        for module in program.parsed:
            for made in meta_calls(module):
                scene.take("FC20", made, module, KEPT)
    sharded_reads.move(scene)
    each_parameter.move(scene)
    cleared.move(scene)
    undecided += rewriting.unaccounted()
    rewriting.remove_unread()
    policies.move(scene)
    spawn.move(scene)
    undecided += beyond.undecided(scene, undecided)
    return scene, _unique(undecided)


def _strategies(
    rewriting: Rewriting, calls: list[tuple[cst.Call, Module, Leaf | None]]
) -> list[tuple[cst.BaseExpression, Module]]:
    """The sharding_strategy of each call that has one, as far as its arguments are known."""
    found = []
    probe = Rewriting(rewriting.program)  # nothing is changed yet
    for node, module, preset in calls:
        with contextlib.suppress(Undecided):  # which the call itself raises again
            given = Given(probe, node, module, preset).args.get("sharding_strategy")
            found += [] if given is None else [(given, module)]
    return found


def _by_library(program: Program) -> list[Undecided]:
    """One for each file with a name of FSDP1, where no call makes a sharded model and a library may."""
    if not any(LIBRARY.search(module.text) for module in program.parsed):
        return []
    why = "a library shards the model, by FSDP1 or FSDP2 as its configuration says: move that first"
    found = [(module, names.uses(module, program.symbol)) for module in program.parsed]
    return [Undecided("FC21", why, known[0][0], module) for module, known in found if known]


def _unique(problems: list[Undecided]) -> list[Undecided]:
    seen: dict[tuple[int, str], Undecided] = {}
    for problem in problems:
        seen.setdefault((id(problem.node), problem.code), problem)
    return list(seen.values())


def _exported(program: Program) -> dict[Path, set[str]]:
    """Names that files of the program import from one another."""
    found: dict[Path, set[str]] = {}
    for module in program.parsed:
        for name in imports.imported(module):
            if name.package and (path := program.file_of(name.package, module)) is not None:
                found.setdefault(path, set()).add(name.name)
    return found


def _lost(program: Program, module: Module, name: imports.Name) -> bool:
    """Whether another file of the program gives its class of FSDP1 under this name."""
    if not name.package or imports.fsdp1(name):
        return False
    dotted = f"{name.package}{'' if name.package.endswith('.') else '.'}{name.name}"
    return program.symbol_of(dotted, module) == CLASS


def _finished(edits: Edits, source: Source, exported: set[str], lost: list[str], tidy: bool) -> Rewritten | None:
    text = edits.render((0, len(edits.module.text)))
    if tidy:
        text = imports.tidy(edits, text, exported, lost)
    if text == source.text:
        return None
    cells: list[str] = [f" cell {cell.index}" for cell in source.cells] or [""]
    shown = "".join(
        diff(source.path, old, new, where)
        for where, old, new in zip(cells, source.pieces(source.text), source.pieces(text), strict=True)
        if old != new
    )
    return Rewritten(source, source.encoded(text), shown)


def diff(path: Path, before: str, after: str, where: str = "") -> str:
    """A unified diff. Control characters of the file are shown as they are escaped, but for tabs."""
    name = printable(str(path)) + where
    lines = difflib.unified_diff(
        before.replace("\r\n", "\n").splitlines(keepends=True),
        after.replace("\r\n", "\n").splitlines(keepends=True),
        f"a/{name}",
        f"b/{name}",
    )
    made = []
    for line in lines:
        body = line.rstrip("\n")
        made.append("".join(c if c.isprintable() or c == "\t" else printable(c) for c in body) + "\n")
        if not line.endswith("\n"):
            made.append("\\ No newline at end of file\n")
    return "".join(made)
