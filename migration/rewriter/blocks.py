"""A with statement that goes while its body stays."""

from __future__ import annotations

import textwrap

import libcst as cst

from migration.rewriter.edits import Edits
from migration.rewriter.module import Module


def can_unwrap(module: Module, block: cst.With) -> bool:
    """True if the lines of the body can be moved to the left: not those of one on the same line, nor of a string."""
    strings = module.within(block.body, cst.SimpleString, cst.FormattedString)
    return isinstance(block.body, cst.IndentedBlock) and not any("\n" in module.code(text) for text in strings)


def unwrap(edits: Edits, block: cst.With, *items: cst.WithItem) -> None:
    """Take items from a with statement, or all of it away if nothing is left of it. Ask `can_unwrap` first."""
    module = edits.module
    rest = [other for other in block.items if not any(other is item for item in items)]
    if rest:
        span = module.span(block.items[0])[0], module.span(block.items[-1])[1]
        edits.replace(span, ", ".join(module.code(other).rstrip(", ") for other in rest))
        return
    assert isinstance(block.body, cst.IndentedBlock)
    outer = module.indent(block)
    start, end = _body_start(module, block), module.line_span(block.body.body[-1])[1]

    def body() -> str:
        inner = edits.render((start - 1, end))[1:]  # with what is put above the first statement
        return textwrap.indent(textwrap.dedent(inner), outer, lambda line: bool(line.strip()))

    edits.replace((module.line_span(block)[0], end), body, kept=(start, end))


def _body_start(module: Module, block: cst.With) -> int:
    """Behind the colon's line, so that comments above the first statement are kept."""
    colon = max(module.span(item)[1] for item in block.items)
    position = module.text.index(":", colon)
    return module.text.index("\n", position) + 1
