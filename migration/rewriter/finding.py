"""The findings of `check`, and their forms."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp2.units import printable
from migration.options import Row
from migration.rewriter.account import Entry
from migration.rewriter.edits import BLOCKS, KEPT, MARKED, MOVED, WAITS
from migration.rewriter.symbols import BY_CODE

DOCS = "docs/migration-options.md"
IMPORTS = ("FC01", "FX07")
LEVELS = {MOVED: "notice", KEPT: "notice", WAITS: "notice", MARKED: "warning", BLOCKS: "error"}
MANY = {KEPT: "work as they are", WAITS: "wait for a decision"}
SARIF_LEVELS = {outcome: level.replace("notice", "note") for outcome, level in LEVELS.items()}


@dataclass(frozen=True, order=True)
class Finding:
    """One use of FSDP1, and what `rewrite` makes of it. Lines, columns and the cells of a notebook count from 1."""

    file: str
    cell: int | None
    line: int
    col: int
    code: str
    status: str
    message: str
    replacement: str

    @property
    def link(self) -> str:
        return f"{DOCS}#{self.code.lower()}"

    @property
    def place(self) -> str:
        cell = f"cell {self.cell}:" if self.cell is not None else ""
        return f"{printable(self.file)}:{cell}{self.line}:{self.col}"

    @property
    def line_of_text(self) -> str:
        return f"{self.place} {self.code} [{self.status}] {self.message} -> {self.replacement} ({self.link})"


def make(file: str, place: tuple[int | None, int, int], code: str, what: str, status: str, why: str = "") -> Finding:
    """A finding, in the words of the table's row unless it has its own. `what` is the code that was found."""
    row = BY_CODE[code]
    cell, line, col = place
    why = " ".join(why.split()) or row.note
    return Finding(file, cell, line, col, code, status, printable(f"{what}: {why}" if why else what), row.becomes)


def of(entries: Sequence[Entry]) -> list[Finding]:
    return sort(make(str(e.source.path), e.source.place(e.start), e.code, e.shown, e.outcome, e.why) for e in entries)


def sort(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(set(findings), key=lambda f: (f.file, f.cell or 0, f.line, f.col, f.code, f.message))


def text(findings: Sequence[Finding], everything: bool = False) -> str:
    """List the decisions, then a line for each file's imports; with `everything` also what needs no decision."""
    if not findings:
        return "nothing of FSDP1 is left to move"
    shown = [f for f in findings if f.status in (MARKED, BLOCKS)]
    imports = [f for f in findings if f.code in IMPORTS and f not in shown]
    rest = [f for f in findings if f not in shown and f not in imports]
    lines_of: dict[str, list[str]] = {}
    for f in imports:
        line = f.place.removeprefix(f"{printable(f.file)}:").rpartition(":")[0]
        lines_of.setdefault(printable(f.file), []).append(line)
    lines = [f.line_of_text for f in shown]
    lines += [f"{file}: imports of FSDP1 in lines {', '.join(dict.fromkeys(at))}" for file, at in lines_of.items()]
    lines += [f.line_of_text for f in rest if everything]
    files = len({f.file for f in findings})
    hidden = "" if everything or not rest else f" (--all lists {'them' if len(rest) > 1 else 'it'})"
    counts = [(sum(f.status == status for f in shown), status) for status in (BLOCKS, MARKED)]
    counts += [(len(imports), "import" + "s" * (len(imports) != 1))]
    others = [(sum(f.status == status for f in rest), status) for status in (MOVED, KEPT, WAITS)]
    counts += [(count, MANY.get(status, status) if count > 1 else status) for count, status in others]
    if hidden:
        last = max(place for place, (count, _) in enumerate(counts) if count)
        counts[last] = (counts[last][0], counts[last][1] + hidden)
    end = f"{len(findings)} use{'s' * (len(findings) != 1)} of FSDP1 in {files} file{'s' * (files != 1)}: "
    end += ", ".join(f"{count} {name}" for count, name in counts if count)
    return "\n".join([*lines, f"{end}; `rewrite` shows what it moves"])


def as_json(findings: Sequence[Finding]) -> str:
    def entry(f: Finding) -> dict[str, Any]:
        keys = ("file", "line", "col", "code", "status", "message", "replacement")
        made: dict[str, Any] = {key: getattr(f, key) for key in keys}
        return made if f.cell is None else {**made, "cell": f.cell}

    return json.dumps([entry(f) for f in findings], indent=2)


def github(findings: Sequence[Finding]) -> str:
    """GitHub's workflow commands: each becomes a remark beside the line in a pull request."""

    def data(value: str) -> str:
        return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    def attribute(value: str) -> str:
        return data(value).replace(":", "%3A").replace(",", "%2C")

    return "\n".join(
        f"::{LEVELS[f.status]} file={attribute(printable(f.file))},line={f.line},col={f.col},title={f.code}::"
        + data(f"{f.message} -> {f.replacement} ({f.link})")
        for f in findings
    )


def sarif(findings: Sequence[Finding]) -> str:
    """SARIF 2.1.0, which code scanning and editors read."""
    codes = sorted({f.code for f in findings})

    def rule(row: Row) -> dict[str, Any]:
        said = {"shortDescription": {"text": f"{row.name} -> {row.becomes}"}, "help": {"text": row.note or row.becomes}}
        return {"id": row.code, "name": row.name, **said, "helpUri": f"{DOCS}#{row.code.lower()}"}

    def result(f: Finding) -> dict[str, Any]:
        at = {"artifactLocation": {"uri": f.file}, "region": {"startLine": f.line, "startColumn": f.col}}
        said = {"level": SARIF_LEVELS[f.status], "message": {"text": f"{f.message} -> {f.replacement}"}}
        return {"ruleId": f.code, "ruleIndex": codes.index(f.code), **said, "locations": [{"physicalLocation": at}]}

    run = {
        "tool": {"driver": {"name": "fsdp2.migrate", "rules": [rule(BY_CODE[code]) for code in codes]}},
        "results": [result(f) for f in findings],
    }
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"version": "2.1.0", "$schema": schema, "runs": [run]}, indent=2)


FORMATS = {"json": as_json, "github": github, "sarif": sarif}  # which hold all findings
