"""One parsed file: where its nodes are, what encloses them, and what its names are bound to."""

from __future__ import annotations

import ast
import bisect
import functools
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from fsdp2.units import printable
from migration.rewriter.scopes import Binding, Scope, Scopes, children
from migration.rewriter.source import Source, Unreadable

Node = TypeVar("Node", bound=cst.CSTNode)
Span = tuple[int, int]


TOO_DEEP = "is nested too deeply to be parsed"


def too_deep(text: str) -> bool:
    """Return whether Python's own parser gives up on how deeply a text is nested, which it counts.

    libcst's doesn't count: its process dies of the stack, or works for ever, on what Python refuses. What else Python
    refuses is libcst's to say.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the text, about escapes and literals
        try:
            compile(text, "<text>", "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        except (RecursionError, MemoryError):
            return True
        except SyntaxError as error:
            return "too many nested parentheses" in str(error)
    return False


class _Wrapper(MetadataWrapper):
    """libcst walks the whole file for providers that work together, even if there are none."""

    def visit_batched(self, *visitors: Any, **hooks: Any) -> cst.CSTNode:
        return self.module


class Module:
    """A Python file and libcst's knowledge of it.

    Raises Unreadable if the text isn't Python of this interpreter's or an older version.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        text = source.parsable()
        if too_deep(text):
            raise Unreadable(TOO_DEEP)
        try:
            self.tree = cst.parse_module(text)
            # libcst has providers of parents and of qualified names too; each walks all of the file once more.
            self._parents: dict[cst.CSTNode, cst.CSTNode] = {}
            self._all: list[cst.CSTNode] = []
            self._spans: dict[int, Span] = {}  # of a node and all below it, among all nodes
            self._of_type: dict[type, list[int]] = {}
            self._number(self.tree)
        except cst.ParserSyntaxError as error:
            starts = self._line_starts(text)
            cell, line, _ = source.place(starts[min(max(error.raw_line, 1), len(starts)) - 1])
            where = f"cell {cell}, line {line}" if cell is not None else f"line {line}"
            raise Unreadable(f"{where}: not Python: {printable(error.message)}") from None
        except RecursionError:
            raise Unreadable(TOO_DEEP) from None
        self.text = source.text
        self._lines = self._line_starts(text)
        self._of_kinds: dict[tuple[type, ...], list[Any]] = {}

    @functools.cached_property
    def _positions(self) -> Mapping[cst.CSTNode, CodeRange]:
        return _Wrapper(self.tree, unsafe_skip_copy=True).resolve(PositionProvider)

    @functools.cached_property
    def _scopes(self) -> Scopes:
        return Scopes(self.tree)

    @staticmethod
    def _line_starts(text: str) -> list[int]:
        # Not splitlines(): Python's lines end at \n, \r\n or \r alone.
        return [0, *(match.end() for match in re.finditer(r"\r\n|\n|\r", text))]

    @property
    def path(self) -> Path:
        return self.source.path

    @functools.cached_property
    def file(self) -> Path:
        return self.path.resolve()

    # --- where things are ---

    def span(self, node: cst.CSTNode) -> Span:
        """First and last position in the text, without surrounding parentheses and comments."""
        where = self._positions[node]
        return (
            self._lines[where.start.line - 1] + where.start.column,
            self._lines[where.end.line - 1] + where.end.column,
        )

    def order(self, node: cst.CSTNode) -> int:
        """A node's number among all nodes, which is known before its position is."""
        return self._spans[id(node)][0]

    def code(self, node: cst.CSTNode) -> str:
        if type(node) is cst.Name:
            return node.value
        names, root = [], node
        while type(root) is cst.Attribute and not root.value.lpar:
            names.append(root.attr.value)
            root = root.value
        if names and type(root) is cst.Name:  # as most are, for which no positions are needed
            return ".".join([root.value, *reversed(names)])
        start, end = self.span(node)
        return self.text[start:end]

    def end(self, node: cst.BaseExpression) -> int:
        """The position behind an expression and the parentheses around it."""
        end = self.span(node)[1]
        for _ in node.rpar:
            end = self.text.index(")", end) + 1
        return end

    def line(self, node: cst.CSTNode) -> int:
        return int(self._positions[node].start.line)

    def line_span(self, node: cst.CSTNode) -> Span:
        """Whole lines of a statement, its last line's end included, and a function's or class's decorators."""
        start, end = self.span(node)
        if decorators := getattr(node, "decorators", ()):
            start = self.span(decorators[0])[0]
        first = self._lines[bisect.bisect_right(self._lines, start) - 1]
        index = bisect.bisect_right(self._lines, max(start, end - 1))
        return first, self._lines[index] if index < len(self._lines) else len(self.text)

    def indent(self, node: cst.CSTNode) -> str:
        first, _ = self.line_span(node)
        line = self.text[first:]
        return line[: len(line) - len(line.lstrip(" \t"))]

    # --- what encloses what ---

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        return self._parents.get(node)

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        above = self._parents.get(node)
        while above is not None:
            yield above
            above = self._parents.get(above)

    def exclusive(self, one: cst.CSTNode, other: cst.CSTNode) -> bool:
        """Return whether only one of two nodes is reached, as one stands in the else of the other's branch."""
        for above in self.ancestors(one):
            if isinstance(above, cst.If) and above.orelse is not None:
                held = [[self._holds(part, node) for part in (above.body, above.orelse)] for node in (one, other)]
                if held in ([[True, False], [False, True]], [[False, True], [True, False]]):
                    return True
        return False

    def _holds(self, outer: cst.CSTNode, inner: cst.CSTNode) -> bool:
        start, end = self._spans[id(outer)]
        return start <= self.order(inner) < end

    def enclosing(self, node: cst.CSTNode, *kinds: type[Node]) -> Node | None:
        above = self._parents.get(node)
        while above is not None and not isinstance(above, kinds):
            above = self._parents.get(above)
        return above

    def function(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        return self.enclosing(node, cst.FunctionDef)

    def statement(self, node: cst.CSTNode) -> cst.SimpleStatementLine | cst.BaseCompoundStatement | None:
        """The statement that holds a node, with a line or lines of its own."""
        for above in (node, *self.ancestors(node)):
            if isinstance(above, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
                return above
        return None

    def block_of(self, statement: cst.CSTNode) -> list[cst.CSTNode]:
        """The statements beside a statement, itself included."""
        above = self._parents.get(statement)
        body = getattr(above, "body", ())
        return list(body) if isinstance(body, (list, tuple)) else []

    def all(self, *kinds: type[cst.CSTNode]) -> list[Any]:
        """Every node of these kinds, in the text's order."""
        if kinds not in self._of_kinds:
            self._of_kinds[kinds] = self._between(0, len(self._all), kinds)
        return self._of_kinds[kinds]

    @functools.cached_property
    def _named(self) -> dict[tuple[type, str], list[Any]]:
        found: dict[tuple[type, str], list[Any]] = {}
        for node in self.all(cst.FunctionDef, cst.ClassDef, cst.Attribute, cst.Call, cst.Name):
            found.setdefault((type(node), last_name(node)), []).append(node)
        return found

    def named(self, kind: type[cst.CSTNode], name: str) -> list[Any]:
        """Functions, classes, attributes, names and calls by their last name; "" for calls of what has none."""
        return self._named.get((kind, name), [])

    def within(self, node: cst.CSTNode, *kinds: type[cst.CSTNode]) -> list[Any]:
        return self._between(*self._spans[id(node)], kinds)

    def _between(self, start: int, end: int, kinds: tuple[type[cst.CSTNode], ...]) -> list[cst.CSTNode]:
        lists = [numbers for kind, numbers in self._of_type.items() if issubclass(kind, kinds)]
        found = [n for one in lists for n in one[bisect.bisect_left(one, start) : bisect.bisect_left(one, end)]]
        return [self._all[number] for number in (sorted(found) if len(lists) > 1 else found)]

    def comments(self, node: cst.CSTNode) -> list[tuple[int, str]]:
        """Comments between the first and the last position of a node, each with its own position."""
        start, end = self.span(node)
        strings = [self.span(known) for known in self.within(node, cst.SimpleString, cst.FormattedString)]
        return [
            (start + found.start(), found[0].rstrip("\r"))
            for found in re.finditer(r"#[^\n]*", self.text[start:end])
            if not any(first <= start + found.start() < last for first, last in strings)
        ]

    def _number(self, node: cst.CSTNode) -> None:
        """Once, since asking libcst for the nodes below a node is slow."""
        start = len(self._all)
        self._all.append(node)
        self._of_type.setdefault(type(node), []).append(start)
        for child in children(node):
            self._parents[child] = node
            self._number(child)
        self._spans[id(node)] = start, len(self._all)

    # --- what names are ---

    def qualified(self, node: cst.CSTNode) -> list[tuple[str, bool]]:
        """Qualified names that a name or attribute may have, and whether they come from an import."""
        return self._scopes.qualified(node)

    def scope(self, node: cst.CSTNode) -> Scope:
        return next(
            self._scopes.of[id(above)] for above in (node, *self.ancestors(node)) if id(above) in self._scopes.of
        )

    def dotted(self, node: cst.CSTNode) -> tuple[Scope, str] | None:
        """A name, or attributes of one, and where it is looked up: what is the same for all that are spelled so."""
        names: list[str] = []
        while type(node) is cst.Attribute:
            names.append(node.attr.value)
            node = node.value
        scope = self._scopes.of.get(id(node)) if type(node) is cst.Name else None
        return None if scope is None else (scope, ".".join([node.value, *reversed(names)]))  # type: ignore[attr-defined]

    def assignments(self, name: cst.Name) -> list[Binding]:
        """List the bindings of a name that is read here."""
        return self.scope(name).find(name.value)

    def references(self, name: cst.Name) -> list[cst.CSTNode]:
        """All reads of the variable that a name is, whatever binding they see."""
        return list({id(read): read for known in self.assignments(name) for read in known.references}.values())


def last_name(node: cst.CSTNode) -> str:
    """The part of a name behind its last dot; of a call, of its function's."""
    if isinstance(node, cst.Attribute):
        return node.attr.value
    if isinstance(node, cst.Call):
        return "" if isinstance(node.func, cst.Call) else last_name(node.func)
    if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
        return node.name.value
    return node.value if isinstance(node, cst.Name) else ""
