"""One parsed file: where its nodes are, what encloses them, and what its names are bound to."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import libcst as cst
from libcst.metadata import (
    Assignment,
    MetadataWrapper,
    PositionProvider,
    Scope,
    ScopeProvider,
)

from fsdp2.checkpoint.refusal import printable
from rewriter.source import Source, Unreadable

Node = TypeVar("Node", bound=cst.CSTNode)
Span = tuple[int, int]


class Module:
    """A Python file and libcst's knowledge of it.

    Raises Unreadable if the text isn't Python of this interpreter's or an older version.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        text = source.parsable()
        try:
            wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
            self.tree = wrapper.module
            self._positions = wrapper.resolve(PositionProvider)
            self._scopes: Mapping[cst.CSTNode, Scope | None] = wrapper.resolve(ScopeProvider)
            # libcst has providers of parents and of qualified names too; each walks all of the file once more.
            self._parents: dict[cst.CSTNode, cst.CSTNode] = {}
            self._all: list[cst.CSTNode] = []
            self._spans: dict[int, Span] = {}  # of a node and all below it, among all nodes
            self._number(self.tree)
        except cst.ParserSyntaxError as error:
            cell, line, _ = source.place(self._offset_in(text, error.raw_line, 0))
            where = f"cell {cell}, line {line}" if cell is not None else f"line {line}"
            raise Unreadable(f"{where}: not Python: {printable(error.message)}") from None
        except RecursionError:
            raise Unreadable("is nested too deeply to be parsed") from None
        self.text = source.text
        self._lines = self._line_starts(text)
        self._of_kinds: dict[tuple[type, ...], list[Any]] = {}

    @staticmethod
    def _line_starts(text: str) -> list[int]:
        # Not splitlines(): Python's lines end at \n, \r\n or \r alone.
        return [0, *(match.end() for match in re.finditer(r"\r\n|\n|\r", text))]

    def _offset_in(self, text: str, line: int, column: int) -> int:
        starts = self._line_starts(text)
        return starts[min(max(line, 1), len(starts)) - 1] + column

    @property
    def path(self) -> Path:
        return self.source.path

    # --- where things are ---

    def span(self, node: cst.CSTNode) -> Span:
        """First and last position in the text, without surrounding parentheses and comments."""
        where = self._positions[node]
        return (
            self._lines[where.start.line - 1] + where.start.column,
            self._lines[where.end.line - 1] + where.end.column,
        )

    def code(self, node: cst.CSTNode) -> str:
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

    def enclosing(self, node: cst.CSTNode, *kinds: type[Node]) -> Node | None:
        return next((above for above in self.ancestors(node) if isinstance(above, kinds)), None)

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
            self._of_kinds[kinds] = [node for node in self._all if isinstance(node, kinds)]
        return self._of_kinds[kinds]

    def within(self, node: cst.CSTNode, *kinds: type[cst.CSTNode]) -> list[Any]:
        if id(node) in self._spans:
            start, end = self._spans[id(node)]
            return [found for found in self._all[start:end] if isinstance(found, kinds)]
        return [found for found in self._walk(node) if isinstance(found, kinds)]  # one that isn't of the text

    def _number(self, node: cst.CSTNode) -> None:
        """Once, since asking libcst for the nodes below a node is slow."""
        start = len(self._all)
        self._all.append(node)
        for child in node.children:
            self._parents[child] = node
            self._number(child)
        self._spans[id(node)] = start, len(self._all)

    def _walk(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        yield node
        for child in node.children:
            yield from self._walk(child)

    # --- what names are ---

    def qualified(self, node: cst.CSTNode) -> list[tuple[str, bool]]:
        """Qualified names that a name or attribute may have, and whether they come from an import."""
        scope = self._scopes.get(node)
        found = scope.get_qualified_names_for(node) if scope is not None else ()
        return sorted((name.name, name.source.name == "IMPORT") for name in found)

    def scope(self, node: cst.CSTNode) -> Scope | None:
        for above in (node, *self.ancestors(node)):
            scope = self._scopes.get(above)
            if scope is not None:
                return scope
        return None

    def assignments(self, name: cst.Name) -> list[Assignment]:
        """What binds a name that is read here."""
        scope = self.scope(name)
        if scope is None:
            return []
        return [known for known in scope[name.value] if isinstance(known, Assignment)]

    def references(self, name: cst.Name) -> list[cst.CSTNode]:
        """All reads of the variable that a name is, whatever binding they see."""
        found: dict[int, cst.CSTNode] = {}
        for known in self.assignments(name):
            for access in known.references:
                found[id(access.node)] = access.node
        return list(found.values())
