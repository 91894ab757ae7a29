"""A program moved to FSDP2, as far as it can be with certainty."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace
from pathlib import Path

import libcst as cst

from fsdp2.units import printable
from migration.rewriter import (
    account,
    beyond,
    carried,
    each_parameter,
    faults,
    imports,
    interface,
    libraries,
    methods,
    names,
    statedicts,
)
from migration.rewriter.account import Entry
from migration.rewriter.constructor_calls import ORDER, code_of, constructions, meta_calls, named
from migration.rewriter.edits import KEPT, MOVED, WAITS, Edits, Undecided
from migration.rewriter.emit import make
from migration.rewriter.finding import DOCS
from migration.rewriter.flow import Flow
from migration.rewriter.module import Module
from migration.rewriter.program import Program
from migration.rewriter.rewriting import Rewriting
from migration.rewriter.scene import Scene
from migration.rewriter.source import Source
from migration.rewriter.symbols import CLASS

MARK = "# fsdp2:"


@dataclass
class Rewritten:
    """A rewritten file: its new bytes, and the difference for a reader."""

    source: Source
    data: bytes
    diff: str


@dataclass
class Result:
    files: list[Rewritten] = field(default_factory=list)
    undecided: list[Undecided] = field(default_factory=list)
    account: list[Entry] = field(default_factory=list)
    kept: list[list[Undecided]] = field(default_factory=list)  # of each program that keeps FSDP1's interface: why
    faults: list[tuple[cst.CSTNode, Module, str]] = field(default_factory=list)  # of FSDP1, that it may have met


def rewrite(program: Program, *, texts: bool = True) -> Result:
    """Move what can be moved. Files that import each other go one way together: to plain FSDP2 if all that they do with
    FSDP1 can be said in it, else they keep FSDP1's interface, on FSDP2. Without `texts` there is the account alone."""
    calls = constructions(program)
    scene = Scene(Rewriting(program), calls, Flow(program, calls))
    plain = _plain(scene)
    group = _together(program)  # which may have more files by now: rules ask for the file that a name comes from
    ways: list[Way] = []
    for number in dict.fromkeys(group.values()):
        modules = [module for module in program.parsed if group.get(id(module)) == number]
        if interface.kept(program, modules):
            continue
        way = plain.of(modules)
        own = any(module is where for _, where in calls for module in modules)
        library = libraries.imported(program, modules) - ({"accelerate"} if own else set())  # which has other uses too
        told = library <= {"accelerate"} and program.by_fsdp2(modules)
        if library and not told and (by_library := _by_library(program, modules)):
            left = [one for one in way.problems if one.code in carried.CODES + libraries.CODES]
            way = replace(way, problems=by_library + left)
        elif way.problems and not (library and told):
            other = _interface(scene, modules)
            known = {(id(problem.node), problem.code) for problem in other.problems}
            reasons = [problem for problem in way.problems if (id(problem.node), problem.code) not in known]
            if reasons:
                way = replace(other, reasons=reasons)
        ways.append(way)
    result = Result()
    exported = _exported(program)
    for way in ways:
        stays = any(problem.blocking for problem in way.problems)
        problems = [p for p in way.problems if not (stays and p.leftover)]
        result.undecided += problems
        result.kept += [way.reasons] if way.home is not None else []
        result.account += _account(way, problems, stays)
        result.faults += faults.suspected(way.scene, way.modules)
        for module in way.modules if texts else ():
            edits = Edits(module) if stays else way.scene.edits(module)
            _mark(edits, [problem for problem in problems if problem.module is module])
            if stays and not edits.changed:
                continue
            path, plain_here = module.file, not stays and way.home is None
            lost = [n.bound for n in imports.imported(module) if plain_here and _lost(program, module, n)]
            made = _finished(edits, program.sources[path], exported.get(path, set()), lost, tidy=not stays)
            if made is not None:
                result.files.append(made)
    for way in ways if texts else ():
        if way.home is not None and not any(problem.blocking for problem in way.problems):
            for source, text in way.home.sources():
                result.files.append(Rewritten(source, text.encode(), diff(source.path, "", text)))
    return result


@dataclass
class Way:
    """The outcome for files that import one another. `home`: where their interface is, if they keep FSDP1's, and
    `reasons`: what isn't plain in them."""

    scene: Scene
    modules: list[Module]
    problems: list[Undecided]
    home: interface.Home | None = None
    reasons: list[Undecided] = field(default_factory=list)

    def of(self, modules: list[Module]) -> Way:
        held = {id(module) for module in modules}
        return replace(self, modules=modules, problems=[p for p in self.problems if id(p.module) in held])


def _account(way: Way, problems: list[Undecided], stays: bool) -> list[Entry]:
    found = account.entries(way.scene, problems, way.modules)
    if stays:  # changes wait for a decision in the same program
        found = [replace(entry, outcome=WAITS) if entry.outcome in (MOVED, KEPT) else entry for entry in found]
    return found + account.imported(way.scene, found, way.modules)


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


def _plain(scene: Scene) -> Way:
    """The whole program in FSDP2's own words."""
    program, calls = scene.rewriting.program, scene.calls
    problems: list[Undecided] = []
    for step in (methods.move, statedicts.move):
        problems += step(scene)
    for node, module in calls:
        problems += make(scene, node, module)
    for module in program.parsed if calls else ():
        for meta in meta_calls(module):
            scene.take("FC20", meta, module, KEPT)
    problems += each_parameter.move(scene)
    scene.rewriting.remove_unread()
    problems += beyond.undecided(scene, problems)
    problems += beyond.changed(scene, problems)
    problems += carried.undecided(scene, problems) + carried.classes(scene, program.parsed)
    return Way(scene, program.parsed, _unique(problems))


def _interface(plain: Scene, modules: list[Module]) -> Way:
    """Files that keep FSDP1's interface."""
    program, calls = plain.rewriting.program, plain.calls
    travels = any(
        symbol == CLASS and names.code_of(symbol, node, module, program.symbol) in ("FC04", "FC05")
        for module in modules
        for node, symbol in names.uses(module, program.symbol)
    )
    scene = replace(plain, rewriting=Rewriting(program), interface=True, travels=travels)
    home, problems = interface.move(scene, modules)
    each_parameter.move(scene)
    problems += beyond.changed(scene, problems)
    for node, module in calls:
        for name, arg in named(node):
            scene.take(code_of(name), arg, module)
            for key, entry, where in scene.flow.entries(arg.value) if arg.star else ():
                if key in ORDER:
                    scene.take(code_of(key), entry, where)
    problems += carried.classes(scene, modules)
    for module in modules:
        carried.take(scene, module)
        for meta in meta_calls(module) if calls else ():
            scene.take("FC20", meta, module, KEPT)
    return Way(scene, program.parsed, _unique(problems), home).of(modules)


def _by_library(program: Program, modules: list[Module]) -> list[Undecided]:
    """One for each file with a name of FSDP1, where a library makes the models."""
    known = [(module, names.uses(module, program.symbol)) for module in modules]
    return [Undecided("FC21", libraries.HOW, uses[0][0], module) for module, uses in known if uses]


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
    """Return whether another file of the program gives its class of FSDP1 under this name."""
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


def _mark(edits: Edits, problems: list[Undecided]) -> None:
    """Put comments that say what is left to decide above the statements. Putting them twice adds nothing."""
    module = edits.module
    wanted: dict[int, tuple[cst.CSTNode, list[str]]] = {}
    for problem in problems:
        statement = _statement(edits, problem.node)
        if statement is None:
            continue
        why = " ".join(problem.why.split())
        line = f"{MARK} {problem.code} {why} ({DOCS}#{problem.code.lower()})"
        lines = wanted.setdefault(id(statement), (statement, []))[1]
        said = any(known.split(" ", 3)[3].rpartition(" (")[0] == why for known in lines)
        if not said and not _marked(edits, statement, problem.code):
            lines.append(line)
    for statement, lines in wanted.values():
        if lines:
            at = module.line_span(statement)[0]
            if isinstance(statement, (cst.FunctionDef, cst.ClassDef)) and statement.decorators:
                at = module.line_span(statement.decorators[0])[0]
            text = edits.indented("\n".join(lines), module.indent(statement))
            edits.replace((at, at), text)


def _marked(edits: Edits, statement: cst.CSTNode, code: str) -> bool:
    """Return whether the comments above a statement already have a code."""
    text = edits.module.text[: edits.module.line_span(statement)[0]]
    for line in reversed(text.splitlines()):
        if not line.strip().startswith("#"):
            return False
        if line.strip().startswith(f"{MARK} {code} "):
            return True
    return False


def _statement(edits: Edits, node: cst.CSTNode) -> cst.CSTNode | None:
    """The statement with a line of its own; of a compound one, its head."""
    found = edits.module.statement(node)
    # `else` and `elif` have no line above them that a comment could stand in.
    while isinstance(found, cst.If) and isinstance(edits.module.parent(found), cst.If):
        found = edits.module.statement(edits.module.parent(found) or found)
    return found
