"""partial(FSDP, …) that is returned or passed on, spelled out as a function that shards what it is given: whoever gets
it calls it with a model, and may do that in another file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import libcst as cst

from rewriter.edits import Edits
from rewriter.module import Module
from rewriter.program import Program
from rewriter.source import Source
from rewriter.symbols import CLASS
from rewriter.values import Values, is_partial


def spelled_out(program: Program) -> dict[Path, Source]:
    """Files of the program with such functions, by their paths; none if there are no such partials."""
    values, made = Values(program), {}
    for module in program.relevant():
        edits = Edits(module)
        for node in module.all(cst.Call) if module.source.notebook is None else ():
            if is_partial(module, node) and node.args and program.symbol(node.args[0].value, module) == CLASS:
                _spell(values, edits, node)
        if edits.changed:
            made[module.path.resolve()] = dataclasses.replace(module.source, text=edits.render((0, len(module.text))))
    return made


def _spell(values: Values, edits: Edits, node: cst.Call) -> None:
    module = edits.module
    above, line = module.parent(node), module.statement(node)
    target = above.targets[0].target if isinstance(above, cst.Assign) and len(above.targets) == 1 else None
    simple = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
    if line is None or not simple or module.function(node) is None or not (
        isinstance(above, cst.Return) or (isinstance(target, cst.Name) and _escapes(module, target))
    ):  # fmt: skip
        return
    if not _called_with_a_model(values, node) or any(arg.keyword is None and not arg.star for arg in node.args[1:]):
        return
    name = target.value if isinstance(target, cst.Name) else "sharded"
    words = {found.value for found in module.within(module.function(node) or module.tree, cst.Name)}
    argument = next(word for word in ("module", "model", "unit", "to_shard") if word not in words or word == "to_shard")
    if not isinstance(target, cst.Name) and name in words:
        return
    given = ""
    if len(node.args) > 1:
        start, end = module.span(node.args[1])[0], module.span(node)[1] - 1
        given = module.text[start:end].rstrip()
        given = f"\n        {given}" + ("" if given.endswith(",") else ",")
    shards = f"    return {module.code(node.args[0].value)}(\n        {argument},{given}\n    )"
    text = f"def {name}({argument}):\n{shards}\n" + (f"\nreturn {name}" if isinstance(above, cst.Return) else "")
    edits.replace(module.line_span(line), edits.indented(text, module.indent(line)))


def _escapes(module: Module, target: cst.Name) -> bool:
    """Whether the variable is read in another way than to be called."""
    calls = [(module.parent(read), read) for read in module.references(target)]
    return any(not (isinstance(call, cst.Call) and call.func is read) for call, read in calls)


def _called_with_a_model(values: Values, node: cst.Call) -> bool:
    """Whether each call of it that the program has gives it one thing, and there is one."""
    found = []
    for module in values.program.parsed:
        for call in module.all(cst.Call):
            if isinstance(call.func, (cst.Name, cst.Call)):
                leaves = values.leaves(call.func, module)
                found += [call] if any(leaf.node is node for leaf in leaves) else []
    return bool(found) and all(
        len(call.args) == 1 and not call.args[0].star and call.args[0].keyword is None for call in found
    )
