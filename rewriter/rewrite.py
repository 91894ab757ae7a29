"""A program moved to FSDP2, as far as it can be with certainty."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path

import libcst as cst

from fsdp2.checkpoint.refusal import printable
from rewriter import (
    account,
    beside,
    beyond,
    cleared,
    each_parameter,
    imports,
    marks,
    methods,
    names,
    optimizers,
    sharded_reads,
    spawn,
    statedicts,
)
from rewriter.account import Entry
from rewriter.construct import meta_calls
from rewriter.edits import Edits, Undecided
from rewriter.making import Made, constructions, make, make_at_run_time
from rewriter.module import Module
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


def rewrite(program: Program) -> Result:
    """Move what can be moved. Of files that import each other nothing is changed if a constructor in one of them can't
    be decided: only comments are added then, so that no model is half of one kind and half of the other. And if one of
    them has options that its call doesn't say, all of them shard by a function that takes options at run time."""
    calls = constructions(program, Values(program))
    tracked = Tracked(program, Values(program), [(made.node, made.module) for made in calls])
    trial = _scene(program, calls, tracked, frozenset())
    helped = _helped(program, [problem for made in calls for problem in make(trial, made)])
    scene, undecided = _attempt(program, calls, tracked, helped)
    if more := _helped(program, undecided):
        scene, undecided = _attempt(program, calls, tracked, helped | more)
    together = _together(program)
    blocked = {together[id(problem.module)] for problem in undecided if problem.blocking}
    undecided = [p for p in undecided if not (p.leftover and together[id(p.module)] in blocked)]
    result = Result(undecided=undecided, account=_account(scene, undecided, together, blocked))
    exported = _exported(program)
    added: dict[Path, Rewritten] = {}
    for module in program.parsed:
        stays = together.get(id(module)) in blocked
        edits = Edits(module) if stays else scene.edits(module)
        marks.put(edits, [problem for problem in undecided if problem.module is module])
        if stays and not edits.changed:
            continue
        path = module.path.resolve()
        lost = [] if stays else [name.bound for name in imports.imported(module) if _lost(program, module, name)]
        made = _finished(edits, program.sources[path], exported.get(path, set()), lost, tidy=not stays)
        if made is not None:
            result.files.append(made)
            if any(package.endswith(beside.NAME) for package in edits.needs) and not beside.at(module).exists():
                source = beside.source(module)
                shown = diff(source.path, "", beside.text())
                added[source.path.resolve()] = Rewritten(source, beside.text().encode(), shown)
    result.files += added.values()
    return result


def _account(scene: Scene, undecided: list[Undecided], together: dict[int, int], blocked: set[int]) -> list[Entry]:
    program = scene.rewriting.program
    found = account.entries(scene, undecided)
    # The account parses files that names come from: one that is new has nothing of FSDP1, and stands in no group.
    found = account.held_back(found, {str(m.path) for m in program.parsed if together.get(id(m)) in blocked})
    return found + account.imported(scene, found)


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


def _scene(program: Program, calls: list[Made], tracked: Tracked, helped: frozenset[int]) -> Scene:
    return Scene(Rewriting(program), tracked, [(made.node, made.module) for made in calls], helped)


def _helped(program: Program, problems: list[Undecided]) -> frozenset[int]:
    """The files that import one another with one whose options are decided at run time."""
    together = _together(program)
    asked = {together[id(problem.module)] for problem in problems if problem.at_run_time}
    return frozenset(key for key, number in together.items() if number in asked)


def _attempt(
    program: Program, calls: list[Made], tracked: Tracked, helped: frozenset[int]
) -> tuple[Scene, list[Undecided]]:
    """All changes of a program, and what stopped some of them. `helped`: files that shard by options at run time."""
    scene = _scene(program, calls, tracked, helped)
    rewriting = scene.rewriting
    if not calls and (library := _by_library(program)):
        return scene, library
    undecided: list[Undecided] = []
    for step in (methods.move, statedicts.move):
        undecided += step(scene)
    for made in calls:
        undecided += (make_at_run_time if id(made.module) in helped else make)(scene, made)
    undecided += optimizers.move(scene)
    if calls:
        for module in program.parsed:
            for meta in meta_calls(module):
                scene.take("FC20", meta, module, KEPT)
    sharded_reads.move(scene)
    each_parameter.move(scene)
    cleared.move(scene)
    rewriting.remove_unread()
    spawn.move(scene)
    undecided += beyond.undecided(scene, undecided, _passed_on(calls))
    return scene, _unique(undecided)


def _passed_on(calls: list[Made]) -> set[int]:
    """Reads of FSDP1's class from which it goes to a call that is known."""
    return {node for made in calls for node in made.through}


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
