"""Imports after a rewrite: what became unused goes, what is needed comes, next to where FSDP1 was imported."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass

import libcst as cst

from migration.rewriter.edits import Edits, call
from migration.rewriter.module import Module
from migration.rewriter.scopes import module_name
from migration.rewriter.source import Source
from migration.rewriter.symbols import AROUND, canonical


@dataclass(frozen=True)
class Name:
    """One imported name: the statement, its package, its own name and what it is called here."""

    statement: cst.Import | cst.ImportFrom
    alias: cst.ImportAlias
    package: str
    name: str
    bound: str


def imported(module: Module) -> list[Name]:
    found = []
    for statement in module.all(cst.Import, cst.ImportFrom):
        if isinstance(statement, cst.ImportFrom) and isinstance(statement.names, cst.ImportStar):
            continue
        package = ""
        if isinstance(statement, cst.ImportFrom):
            package = module_name(statement)
        for alias in statement.names:
            assert isinstance(alias, cst.ImportAlias)
            bound = alias.evaluated_alias or alias.evaluated_name
            found.append(Name(statement, alias, package, alias.evaluated_name, bound))
    return found


def packages(statement: cst.Import | cst.ImportFrom) -> list[str]:
    """The modules that a statement may import: `from a import b` may be of a, or of a.b."""
    if isinstance(statement, cst.Import):
        return [alias.evaluated_name for alias in statement.names]
    package = module_name(statement)
    if isinstance(statement.names, cst.ImportStar):
        return [package]
    between = "" if package.endswith(".") else "."
    return [package, *(f"{package}{between}{alias.evaluated_name}" for alias in statement.names)]


def used(module: Module, name: Name) -> bool:
    """Return whether anything reads an imported name. Names that a module exports by __all__ are read."""
    head = name.bound.partition(".")[0]
    bindings = module.scope(name.statement).find(head)
    if any(binding.references for binding in bindings if binding.node is name.statement):
        # `import a.b` and `import a.c` share the name a.
        if "." in name.bound and not name.alias.asname:
            return any(module.code(node).startswith(name.bound) for node in module.all(cst.Attribute))
        return True
    return f'"{head}"' in module.text and "__all__" in module.text


def fsdp1(name: Name) -> bool:
    qualified = f"{name.package}.{name.name}" if name.package else name.name
    known = canonical(qualified)
    return known is not None and not known.startswith(("library:", "fairscale:")) and qualified not in AROUND


def tidy(edits: Edits, text: str, exported: set[str], lost: Collection[str] = ()) -> str:
    """The text with its imports in order. `exported`: names that other files import from here; `lost`: names that
    were FSDP1's class in another file, which has it no more."""
    source = edits.module.source
    before = {(n.package, n.name, n.bound) for n in imported(edits.module) if not used(edits.module, n)}
    module = Module(Source(source.path, text, source.encoding, source.bom, notebook=source.notebook))
    changes = Edits(module)
    gone = [
        name
        for name in imported(module)
        if not used(module, name)
        and (name.bound not in exported or name.bound in lost)
        and (name.bound in lost or fsdp1(name) or (name.package, name.name, name.bound) not in before)
    ]
    there = {(n.package, n.name): n.bound for n in imported(module) if module.function(n.statement) is None}
    lines = _lines(edits, there)
    anchor = _anchor(module)
    placed = False
    standard = [line for line in lines if line.startswith("import ") and line.split()[1].split(".")[0] != "torch"]
    if standard and (first := _first(module)) is not None:
        lines = [line for line in lines if line not in standard]
        at = module.line_span(first)[0]
        changes.replace((at, at), changes.indented("\n".join(standard), ""))
    for statement in {id(name.statement): name.statement for name in gone}.values():
        rest = without(statement, gone, module)
        line = module.parent(statement)
        if not isinstance(line, cst.SimpleStatementLine) or len(line.body) > 1:
            continue
        whole = "\n".join(rest) if "\n" not in module.code(statement) else _kept_lines(statement, gone, module)
        if line is anchor and lines:
            placed = True
            changes.replace(
                module.line_span(line), changes.indented("\n".join([*([whole] if rest else []), *lines]), "")
            )
        elif rest:
            changes.replace(module.line_span(line), changes.indented(whole, module.indent(line)))
        else:
            changes.remove(line)
    if lines and not placed:
        at = module.line_span(anchor)[1] if anchor is not None else _top(module)
        changes.replace((at, at), changes.indented("\n".join(lines), ""))
    made = changes.render((0, len(text)))
    return _helpers(edits, made)


def without(statement: cst.Import | cst.ImportFrom, gone: list[Name], module: Module) -> list[str]:
    """The statement's lines without the names that go; none if nothing is left of it."""
    lost = [name.alias for name in gone]
    assert not isinstance(statement.names, cst.ImportStar)
    kept = [alias for alias in statement.names if not any(alias is known for known in lost)]
    if not kept:
        return []
    names = [module.code(alias).rstrip(", ") for alias in kept]
    if isinstance(statement, cst.Import):
        return [f"import {', '.join(names)}"]
    package = "." * len(statement.relative) + (module.code(statement.module) if statement.module else "")
    return [from_line(package, names)]


def _kept_lines(statement: cst.Import | cst.ImportFrom, gone: list[Name], module: Module) -> str:
    """The statement as it was laid out, without the lines of the names that go."""
    lost = [name.alias for name in gone]
    assert not isinstance(statement.names, cst.ImportStar)
    starts = {module.line(alias) for alias in statement.names}
    if len(starts) < len(statement.names) or module.line(statement) in starts:
        return "\n".join(without(statement, gone, module))
    dropped = {module.line(alias) for alias in statement.names if any(alias is known for known in lost)}
    first = module.line(statement)
    indent = module.indent(statement)
    lines = module.code(statement).replace("\r\n", "\n").split("\n")
    return "\n".join(line.removeprefix(indent) for number, line in enumerate(lines, first) if number not in dropped)


def _first(module: Module) -> cst.SimpleStatementLine | None:
    """The first import at the top of the file that isn't of __future__."""
    for statement in module.tree.body:
        if (
            isinstance(statement, cst.SimpleStatementLine)
            and isinstance(head := statement.body[0], (cst.Import, cst.ImportFrom))
            and "__future__" not in module.code(head)
        ):
            return statement
    return None


def from_line(package: str, names: list[str]) -> str:
    line = f"from {package} import {', '.join(names)}"
    return line if len(line) <= 100 else call(f"from {package} import ", names)


def _lines(edits: Edits, there: dict[tuple[str, str], str]) -> list[str]:
    """Import statements for what is needed and isn't there."""
    lines = []
    for package, alias in sorted(edits.modules.items()):
        head, _, last = package.rpartition(".")
        if ("", package) in there or (head, last) in there:
            continue
        lines.append(f"import {package}" + (f" as {alias}" if alias != package else ""))
    for package, names in sorted(edits.needs.items()):
        if not names:
            plain = [name for (source, name), bound in there.items() if not source and bound == name]
            below = {f"{source}.{name}".lstrip(".") for source, name in there}
            loaded = any(name == package or name.startswith(package + ".") for name in below)
            # Loaded under whatever name, it is an attribute of the package above, if that has its own name here.
            if not (loaded and any(name.partition(".")[0] == package.partition(".")[0] for name in plain)):
                lines.append(f"import {package}")
            continue
        missing = sorted(name for name in names if (package, name) not in there)
        if missing:
            lines.append(from_line(package, missing))
    return sorted(lines, key=lambda line: line.startswith("from"))


def _anchor(module: Module) -> cst.SimpleStatementLine | None:
    """The import after which new ones come: FSDP1's first one at the top of the file, or the last of all there."""
    ours, last = None, None
    for name in imported(module):
        line = module.parent(name.statement)
        if isinstance(line, cst.SimpleStatementLine) and module.parent(line) is module.tree and len(line.body) == 1:
            head = module.enclosing(name.statement, cst.Module)
            if head is not None and (name.package.startswith("torch.distributed.fsdp") or fsdp1(name)):
                ours = ours or line
            if _leading(module, line):
                last = line
    return ours or last


def _leading(module: Module, line: cst.SimpleStatementLine) -> bool:
    """Return whether only imports, strings, assignments and try blocks stand above."""
    above = itertools.takewhile(lambda one: one is not line, module.tree.body)
    return not any(isinstance(one, (cst.FunctionDef, cst.ClassDef, cst.For, cst.While)) for one in above)


def _top(module: Module) -> int:
    """Behind the docstring and `from __future__`."""
    at = module.span(module.tree.body[0])[0] if module.tree.body else 0
    for statement in module.tree.body:
        first = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
        if isinstance(first, cst.Expr) and isinstance(first.value, cst.SimpleString):
            at = module.line_span(statement)[1]
        else:
            break
    return at


def _helpers(edits: Edits, text: str) -> str:
    """The functions that are added, behind the imports."""
    wanted = [made for made in edits.helpers.values() if made not in text]
    if not wanted:
        return text
    source = edits.module.source
    module = Module(Source(source.path, text, notebook=source.notebook))
    last: cst.CSTNode | None = None
    for statement in module.tree.body:
        if isinstance(statement, cst.SimpleStatementLine) and isinstance(
            statement.body[0], (cst.Import, cst.ImportFrom)
        ):
            if _leading(module, statement):
                last = statement
        elif isinstance(statement, cst.Try) and _leading_try(module, statement):
            last = statement
    at = module.line_span(last)[1] if last is not None else _top(module)
    made = "\n\n" + "\n\n".join(wanted)
    rest = text[at:]
    gap = "" if rest.startswith(("\n\n", "\r\n\r\n")) else "\n" if rest.startswith(("\n", "\r\n")) else "\n\n"
    return text[:at] + (made + gap).replace("\n", source.newline) + rest


def _leading_try(module: Module, statement: cst.Try) -> bool:
    first = next((s for s in module.tree.body if isinstance(s, (cst.FunctionDef, cst.ClassDef))), None)
    imports = module.within(statement, cst.Import, cst.ImportFrom)
    return bool(imports) and (first is None or module.span(statement)[0] < module.span(first)[0])
