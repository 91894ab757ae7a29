"""Options that are collected in a dictionary, `options["mixed_precision"] = …`, and then given to FSDP1's class by
`**options`: spelled out as variables, one for each, before anything is moved. So each can be followed by itself.

A dictionary that a function returns becomes a function which shards what it is given.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import libcst as cst
from torch.distributed.fsdp import FullyShardedDataParallel

from rewriter.edits import Edits
from rewriter.given import CONDITIONAL, ORDER, added
from rewriter.imports import imported, tidy
from rewriter.module import Module
from rewriter.program import Program
from rewriter.source import Source
from rewriter.symbols import CLASS, PACKAGE
from rewriter.values import Values, assignment, dictionary, is_partial, string

DEFAULTS = {name: known.default for name, known in inspect.signature(FullyShardedDataParallel).parameters.items()}
Entries = Sequence[tuple[str, cst.BaseExpression]]


class _Unclear(Exception):
    """A use that isn't one of those that can be spelled out."""


@dataclass
class _Options:
    """A dictionary of options, and all that is done with it.

    Attributes:
        line: where it is made, of `entries`.
        changes: lines that set further ones.
        spreads: `**options` of calls of FSDP1's class.
        reads: `options["mixed_precision"]`.
        returned: the statement that returns it.
    """

    module: Module
    line: cst.SimpleStatementLine
    entries: Entries
    changes: list[tuple[cst.SimpleStatementLine, Entries]] = field(default_factory=list)
    spreads: list[cst.Arg] = field(default_factory=list)
    reads: list[tuple[cst.Subscript, str]] = field(default_factory=list)
    returned: cst.Return | None = None

    @property
    def keys(self) -> list[str]:
        every = [self.entries, *(entries for _, entries in self.changes)]
        return list(dict.fromkeys(key for entries in every for key, _ in entries))


def spelled_out(program: Program) -> dict[Path, Source]:
    """Files of the program without such dictionaries, by their paths; none if there are none."""
    return _Spelling(program).made


class _Spelling:
    def __init__(self, program: Program) -> None:
        self.program, self.values = program, Values(program)
        self.edits: dict[int, Edits] = {}
        done: set[int] = set()
        for module in program.relevant():
            for call in module.all(cst.Call) if module.source.notebook is None else ():
                for arg in call.args if self._shards(call, module) else ():
                    if arg.star == "**":
                        self._spell(arg.value, module, done)
        self.made = {}
        for edits in self.edits.values():
            text = tidy(edits, edits.render((0, len(edits.module.text))), set())
            self.made[edits.module.path.resolve()] = dataclasses.replace(edits.module.source, text=text)

    def _spell(self, node: cst.BaseExpression, module: Module, done: set[int]) -> None:
        """All that is done with the dictionary that a call spreads, or none of it."""
        try:
            found = self._function(node, module)
            if found is None:
                found = self._variable(node, module)
                if found.returned is not None:
                    raise _Unclear  # somebody else gets it too
        except _Unclear:
            return
        if id(found.line) not in done:
            done.add(id(found.line))
            self._write(found)

    def _shards(self, call: cst.Call, module: Module) -> bool:
        symbol = self.program.symbol(call.func, module)
        if is_partial(module, call) and call.args:
            symbol = self.program.symbol(call.args[0].value, module)
        return symbol in (CLASS, "enable_wrap")

    # --- what is done with a dictionary ---

    def _variable(self, node: cst.BaseExpression, module: Module) -> _Options:
        """Of a variable, or of an attribute of `self`, that one statement makes."""
        if isinstance(node, cst.Name):
            targets: list[cst.CSTNode] = [binding.node for binding in module.assignments(node)]
            reads = module.references(node)
        elif isinstance(node, cst.Attribute) and module.code(node.value) == "self":
            name = node.attr.value
            uses = [(n, m) for m in self.program.parsed for n in m.all(cst.Attribute) if n.attr.value == name]
            if self.program.said_elsewhere(name) or any(
                m is not module or module.code(use.value) != "self" for use, m in uses
            ):
                raise _Unclear
            targets = [use for use, _ in uses if isinstance(module.parent(use), (cst.AssignTarget, cst.AnnAssign))]
            reads = [use for use, _ in uses if not any(use is target for target in targets)]
        else:
            raise _Unclear
        made = assignment(targets[0], module) if len(targets) == 1 else None
        entries = dictionary(made.value) if made is not None and made.value is not None else None
        line = module.statement(made) if made is not None else None
        if entries is None or not isinstance(line, cst.SimpleStatementLine) or len(line.body) > 1:
            raise _Unclear
        found = _Options(module, line, _known(entries))
        for read in reads:
            self._use(found, read)
        if not self._needed(found, node):
            raise _Unclear
        return found

    def _use(self, found: _Options, read: cst.CSTNode) -> None:
        module, above = found.module, found.module.parent(read)
        line = module.statement(read)
        alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
        outer = module.parent(above) if above is not None else None
        if isinstance(above, cst.Arg) and above.star == "**" and isinstance(outer, cst.Call):
            if not self._shards(outer, module):
                raise _Unclear
            found.spreads.append(above)
        elif isinstance(above, cst.Return) and found.returned is None:
            found.returned = above
        elif isinstance(above, cst.Subscript) and len(above.slice) == 1:
            index = above.slice[0].slice
            key = string(index.value) if isinstance(index, cst.Index) else None
            if key is None:
                raise _Unclear
            if not isinstance(outer, cst.AssignTarget):
                if isinstance(outer, (cst.AugAssign, cst.Del)):
                    raise _Unclear
                found.reads.append((above, key))
                return
            set_ = module.parent(outer)
            single = isinstance(set_, cst.Assign) and len(set_.targets) == 1
            if not single or not alone or not isinstance(line, cst.SimpleStatementLine):
                raise _Unclear
            assert isinstance(set_, cst.Assign)
            found.changes.append((line, _known([(key, set_.value)])))
        elif isinstance(above, cst.Attribute) and above.attr.value == "update" and isinstance(outer, cst.Call):
            given = dictionary(outer.args[0].value) if len(outer.args) == 1 and not outer.args[0].keyword else None
            named = [(arg.keyword.value, arg.value) for arg in outer.args if arg.keyword is not None]
            if given is None and len(named) < len(outer.args):
                raise _Unclear
            if not alone or not isinstance(line, cst.SimpleStatementLine) or not isinstance(line.body[0], cst.Expr):
                raise _Unclear
            found.changes.append((line, _known(given if given is not None else named)))
        else:
            raise _Unclear

    def _needed(self, found: _Options, node: cst.BaseExpression) -> bool:
        """Whether a call can't be read as it stands: one beside which all is said needs no variables."""
        module = found.module
        if found.returned is not None:
            return True
        if isinstance(node, cst.Attribute):
            return bool(found.changes)
        plain = (
            {id(module.statement(read)) for read, _, _ in added(node, module)} if isinstance(node, cst.Name) else set()
        )
        beside = module.block_of(found.line)
        for line, entries in found.changes:
            under_condition = not any(line is known for known in beside)
            if under_condition and any(key not in CONDITIONAL for key, _ in entries):
                return True
            block = module.parent(line)
            above = module.parent(block) if block is not None else None
            simple = any(line is known for known in beside) or (
                isinstance(above, cst.If)
                and block is above.body
                and above.orelse is None
                and any(above is known for known in beside)
            )
            if id(line) not in plain or not simple:
                return True
        return False

    def _function(self, node: cst.BaseExpression, module: Module) -> _Options | None:
        """Of a function that is called where it is spread, or of whose result a variable is spread."""
        made = node
        if isinstance(node, cst.Name):
            bindings = module.assignments(node)
            bound = assignment(bindings[0].node, module) if len(bindings) == 1 else None
            made = bound.value if bound is not None and bound.value is not None else node
        place = self.values.function_in(made.func, module) if isinstance(made, cst.Call) else None
        if place is None:
            return None
        function, where = place
        if self.program.said_elsewhere(function.name.value):
            raise _Unclear
        returns = [r for r in where.within(function, cst.Return) if where.function(r) is function]
        if (
            len(returns) != 1
            or where.source.notebook is not None
            or where.statement(returns[0]) is not function.body.body[-1]
        ):
            raise _Unclear
        value = returns[0].value
        if isinstance(value, cst.Name):
            found = self._variable(value, where)
            if found.spreads or found.reads:
                raise _Unclear
        else:
            entries = dictionary(value) if value is not None else None
            line = where.statement(returns[0])
            if entries is None or not isinstance(line, cst.SimpleStatementLine):
                raise _Unclear
            found = _Options(where, line, _known(entries), returned=returns[0])
        self._sites(function, where, found)
        return found

    def _sites(self, function: cst.FunctionDef, where: Module, found: _Options) -> None:
        """Every call of the function: what is spread of it goes to FSDP1's class, with the same other arguments."""
        spread: list[tuple[cst.Arg, Module]] = []
        for made, module in self.values.calls(function, where):
            above = module.parent(made)
            bound = above.targets[0].target if isinstance(above, cst.Assign) and len(above.targets) == 1 else None
            reads = module.references(bound) if isinstance(bound, cst.Name) else [made]
            if isinstance(bound, cst.Name) and len(module.assignments(bound)) > 1:
                raise _Unclear
            for read in reads:
                arg = module.parent(read)
                if not isinstance(arg, cst.Arg) or arg.star != "**":
                    raise _Unclear
                spread.append((arg, module))
        others = set()
        for arg, module in spread:
            call = module.parent(arg)
            if not isinstance(call, cst.Call) or self.program.symbol(call.func, module) != CLASS:
                raise _Unclear
            rest = [other for other in call.args if other is not arg]
            named = [other.keyword.value for other in rest if other.keyword is not None]
            if any(other.star for other in rest) or len(rest) - len(named) != 1 or rest[0].keyword is not None:
                raise _Unclear
            others.add(tuple(sorted(named)))
        if len(others) != 1 or found.returned is None or any(set(names) & set(found.keys) for names in others):
            raise _Unclear
        for arg, module in spread:
            call = module.parent(arg)
            assert isinstance(call, cst.Call)
            given = [module.code(other).rstrip(", \n") for other in call.args if other is not arg]
            shards = module.code(arg.value)
            self._edits(module).replace(module.span(call), f"{shards}({', '.join(given)})")
        self._return_function(function, where, found, sorted(others.pop()))

    def _return_function(self, function: cst.FunctionDef, module: Module, found: _Options, others: list[str]) -> None:
        """A function that shards is returned, with parameters for the arguments that its calls have beside."""
        edits, names = self._edits(module), self._names(found)
        words = {name.value for name in module.within(function, cst.Name)} | set(found.keys)
        argument = next(
            word for word in ("module", "model", "unit", "to_shard") if word not in words or word == "to_shard"
        )
        shards = next((n.bound for n in imported(module) if (n.package, n.name) == (PACKAGE, CLASS)), "")
        if not shards:
            edits.need(PACKAGE, CLASS)
        options = [argument, *(f"{name}={name}" for name in others), *(f"{k}={v}" for k, v in names.items())]
        text = f"def sharded({', '.join([argument, *others])}):\n    return {shards or CLASS}({', '.join(options)})\n\n"
        text = f"\n{text}return sharded"
        line = module.statement(found.returned) if found.returned is not None else None
        assert line is not None
        if line is found.line:
            text = "\n".join([*self._assigned(found, found.entries, names), text])
        edits.replace(module.line_span(line), edits.indented(text, module.indent(line)))

    # --- variables instead ---

    def _edits(self, module: Module) -> Edits:
        return self.edits.setdefault(id(module), Edits(module))

    def _names(self, found: _Options) -> dict[str, str]:
        """A variable for each option, by a name that nothing else has there."""
        module = found.module
        first = found.line.body[0]
        target = first.targets[0].target if isinstance(first, cst.Assign) else getattr(first, "target", None)
        if isinstance(target, cst.Attribute):
            known = {n.attr.value for m in self.program.parsed for n in m.all(cst.Attribute)}
            return {key: f"self.{key if key not in known else f'fsdp_{key}'}" for key in found.keys}
        home = module.function(found.line) or module.tree
        bound = {module.code(name) for name in module.within(home, cst.Name) if not _keyword(module, name)}
        return {key: key if key not in bound else f"fsdp_{key}" for key in found.keys}

    def _assigned(self, found: _Options, entries: Entries, names: dict[str, str]) -> list[str]:
        edits, module, lines = self._edits(found.module), found.module, []
        for key, value in entries:
            text = edits.code(value)
            rest = module.text[module.end(value) :].partition("\n")[0]
            comment = re.fullmatch(r"\s*[,)}]*\s*(#.*)", rest)
            wrapped = f"({text})" if "\n" in text and not text.endswith((")", "]", "}")) else text
            lines.append(f"{names[key]} = {wrapped}" + (f"  {comment[1]}" if comment else ""))
        return lines

    def _write(self, found: _Options) -> None:
        edits, module, names = self._edits(found.module), found.module, self._names(found)
        for line, entries in found.changes:
            text = "\n".join(self._assigned(found, entries, names))
            edits.replace(module.line_span(line), edits.indented(text, module.indent(line)))
        if found.returned is None or module.statement(found.returned) is not found.line:
            lines = self._assigned(found, found.entries, names)
            beside = module.block_of(found.line)
            always = [entries for line, entries in found.changes if any(line is known for known in beside)]
            there = {key for entries in (found.entries, *always) for key, _ in entries}
            lines += [f"{names[key]} = {_default(key)}" for key in found.keys if key not in there]
            edits.replace(module.line_span(found.line), edits.indented("\n".join(lines), module.indent(found.line)))
        for arg in found.spreads:
            edits.replace(module.span(arg), ", ".join(f"{key}={name}" for key, name in names.items()))
        for read, key in found.reads:
            edits.replace(module.span(read), names[key])


def _known(entries: Sequence[tuple[str | None, cst.BaseExpression]]) -> Entries:
    found = [(key, value) for key, value in entries if key in ORDER and key is not None]
    if len(found) < len(entries):
        raise _Unclear
    return found


def _default(key: str) -> str:
    """FSDP1's own default; prefetching has none that would matter to FSDP2."""
    return repr(DEFAULTS[key]) if isinstance(DEFAULTS[key], bool) else "None"


def _keyword(module: Module, name: cst.Name) -> bool:
    """Whether a name is only what an argument or an attribute is called."""
    above = module.parent(name)
    named = isinstance(above, cst.Arg) and above.keyword is name
    return named or (isinstance(above, cst.Attribute) and above.attr is name)
