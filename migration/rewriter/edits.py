"""Changes of a file's text, kept by position, so that everything they don't touch stays as it is, byte for byte."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from migration.rewriter.helpers import HELPERS
from migration.rewriter.module import Module, Span

Text = str | Callable[[], str]
WIDTH = 100
# What becomes of a use.
MOVED = "moved"
KEPT = "works as it is"
MARKED = "to decide"
BLOCKS = "to decide first"
WAITS = "waits for a decision"


@dataclass(frozen=True)
class Taken:
    """The record of a rule that takes a use of FSDP1."""

    code: str
    node: cst.CSTNode
    module: Module
    outcome: str = MOVED
    why: str = ""


class Undecided(Exception):
    """Something that the rewriter can't do with certainty: the table's code, and what there is to decide.

    `blocking`: it concerns how a model is made, so that nothing that is done with the model may be moved either.
    """

    def __init__(self, code: str, why: str, node: cst.CSTNode, module: Module, blocking: bool = True) -> None:
        super().__init__(why)
        self.code, self.why, self.node, self.module = code, why, node, module
        self.blocking = blocking
        self.leftover = False  # a use that no rule has taken


def guarded(problems: list[Undecided], step: Callable[..., None], *given: Any) -> None:
    """Take a step that concerns no constructor, or note what of it is left to decide."""
    try:
        step(*given)
    except Undecided as problem:
        problem.blocking = False
        problems.append(problem)


@dataclass
class _Edit:
    start: int
    end: int
    text: Text
    kept: Span = (0, 0)  # a part that stays, with the changes inside of it

    def covers(self, start: int, end: int) -> bool:
        stays = self.kept[0] <= start and end <= self.kept[1]
        return self.start <= start and end <= self.end and not stays

    def inside(self, other: _Edit) -> bool:
        if self is other or not (other.start <= self.start and self.end <= other.end):
            return False
        if self.start == self.end and self.start in (other.start, other.end):
            return False  # an insertion at the edge belongs beside it
        return (self.start, self.end) != (other.start, other.end)


@dataclass
class Edits:
    """All changes of one module, and the imports that they need."""

    module: Module
    needs: dict[str, set[str]] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)  # imported as a module: name to alias
    helpers: dict[str, str] = field(default_factory=dict)  # functions to add, by name
    removed: list[cst.CSTNode] = field(default_factory=list)
    _edits: list[_Edit] = field(default_factory=list)
    _rendering: list[_Edit] = field(default_factory=list)

    def replace(self, span: Span, text: Text, kept: Span = (0, 0)) -> None:
        """`kept`: a part that the text holds again. Raises ValueError if the place has been given another text."""
        for known in self._edits:
            if (known.start, known.end) == span and span[0] != span[1]:
                if known.text == text:
                    return
                raise ValueError(f"two texts for one place: {self.module.text[span[0] : span[1]]!r}")
        self._edits.append(_Edit(*span, text, kept))

    def covers(self, node: cst.CSTNode) -> bool:
        start, end = self.module.span(node)
        return any(known.covers(start, end) for known in self._edits)

    def goes(self, node: cst.CSTNode) -> bool:
        """Return whether a name is covered by a change that doesn't say it again, as a variable."""
        start, end = self.module.span(node)
        word = re.compile(rf"(?<![\w.]){re.escape(self.module.code(node))}(?!\w|\s*=[^=])")
        over = [known for known in self._edits if known.covers(start, end)]
        return bool(over) and not any(word.search(self.render((known.start, known.end))) for known in over)

    def before(self, statement: cst.CSTNode, lines: str) -> None:
        """Lines, without their indent, above a statement."""
        at = self.module.line_span(statement)[0]
        self._edits.append(_Edit(at, at, self.indented(lines, self.module.indent(statement))))

    def remove(self, statement: cst.CSTNode) -> None:
        """A statement with its lines; `pass` in its place where it was alone in its block."""
        start, end = self.module.line_span(statement)
        if isinstance(statement, cst.FunctionDef) or not self.module.indent(statement):  # with the empty lines above
            above = re.search(r"(?:(?<=\n)[ \t]*\r?\n)*$", self.module.text[:start])
            start -= len(above[0]) if above else 0
        if not any((known.start, known.end) == (start, end) for known in self._edits):
            self._edits.append(_Edit(start, end, lambda: self._gone(statement)))
            self.removed.append(statement)

    def _gone(self, statement: cst.CSTNode) -> str:
        block = self.module.block_of(statement)
        nested = any(isinstance(above, cst.BaseCompoundStatement) for above in self.module.ancestors(statement))
        if nested and all(any(known is gone for gone in self.removed) for known in block):
            return self.indented("pass", self.module.indent(statement)) if statement is block[0] else ""
        return ""

    def indented(self, lines: str, indent: str) -> str:
        made = textwrap.indent(lines.rstrip("\n") + "\n", indent)
        return made.replace("\n", self.module.source.newline)

    def need(self, package: str, *names: str) -> None:
        self.needs.setdefault(package, set()).update(names)

    def helper(self, name: str, node: cst.CSTNode, code: str) -> None:
        """Give the file a function. Raises Undecided where it has another of that name."""
        if name in self.module.scope(self.module.tree).names and HELPERS[name] not in self.module.text:
            raise Undecided(code, f"{name} is a function of this file already", node, self.module)
        self.helpers[name] = HELPERS[name]
        if "contextlib" in HELPERS[name]:
            self.modules["contextlib"] = "contextlib"

    def render(self, span: Span) -> str:
        """The text of a place, with the changes inside of it."""
        inside = [e for e in self._edits if span[0] <= e.start and e.end <= span[1] and e not in self._rendering]
        if (span[0], span[1]) != (0, len(self.module.text)):
            inside = [e for e in inside if e.start != e.end or span[0] < e.start < span[1]]
        outer = [e for e in inside if not any(e.inside(other) for other in inside)]
        outer.sort(key=lambda e: (e.start, e.end))  # insertions first, in the order in which they came
        parts, position = [], span[0]
        for edit in outer:
            parts.append(self.module.text[position : edit.start])
            self._rendering.append(edit)
            parts.append(edit.text if isinstance(edit.text, str) else edit.text())
            self._rendering.pop()
            position = edit.end
        parts.append(self.module.text[position : span[1]])
        return "".join(parts)

    def code(self, node: cst.CSTNode) -> str:
        """A node's text with the changes inside of it."""
        text = self.render(self.module.span(node))
        if "\n" in text and isinstance(node, cst.BaseExpression):
            # Lines of an expression are indented for the place where it stood.
            first, *rest = text.replace("\r\n", "\n").split("\n")
            text = "\n".join([first, *textwrap.dedent("\n".join(rest)).split("\n")])
        return text

    @property
    def changed(self) -> bool:
        return bool(self._edits)


def call(function: str, arguments: list[str], indent: int = 0) -> str:
    """A call on one line, or an argument a line if that would be too long."""
    one = f"{function}({', '.join(arguments)})"
    if len(one) + indent <= WIDTH and "\n" not in one:
        return one
    body = "".join(f"    {textwrap.indent(argument, '    ').lstrip()},\n" for argument in arguments)
    return f"{function}(\n{body})"
