"""Comments that say what is left to decide, above the statement that it is about. Putting them twice adds nothing."""

from __future__ import annotations

import libcst as cst

from migration.rewriter.edits import Edits, Undecided
from migration.rewriter.finding import DOCS

PREFIX = "# fsdp2:"


def put(edits: Edits, problems: list[Undecided]) -> None:
    module = edits.module
    wanted: dict[int, tuple[cst.CSTNode, list[str]]] = {}
    for problem in problems:
        statement = _statement(edits, problem.node)
        if statement is None:
            continue
        why = " ".join(problem.why.split())
        line = f"{PREFIX} {problem.code} {why} ({DOCS}#{problem.code.lower()})"
        lines = wanted.setdefault(id(statement), (statement, []))[1]
        said = any(known.split(" ", 3)[3].rpartition(" (")[0] == why for known in lines)
        if not said and not marked(edits, statement, problem.code):
            lines.append(line)
    for statement, lines in wanted.values():
        if lines:
            at = module.line_span(statement)[0]
            if isinstance(statement, (cst.FunctionDef, cst.ClassDef)) and statement.decorators:
                at = module.line_span(statement.decorators[0])[0]
            text = edits.indented("\n".join(lines), module.indent(statement))
            edits.replace((at, at), text)


def marked(edits: Edits, statement: cst.CSTNode, code: str) -> bool:
    """Return whether the comments above a statement already have a code."""
    text = edits.module.text[: edits.module.line_span(statement)[0]]
    for line in reversed(text.splitlines()):
        if not line.strip().startswith("#"):
            return False
        if line.strip().startswith(f"{PREFIX} {code} "):
            return True
    return False


def _statement(edits: Edits, node: cst.CSTNode) -> cst.CSTNode | None:
    """The statement with a line of its own; of a compound one, its head."""
    found = edits.module.statement(node)
    # `else` and `elif` have no line above them that a comment could stand in.
    while isinstance(found, cst.If) and isinstance(edits.module.parent(found), cst.If):
        found = edits.module.statement(edits.module.parent(found) or found)
    return found
