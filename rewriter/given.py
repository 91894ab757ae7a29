"""The arguments that a call of FSDP1's class has: its own, those of a partial, and of dictionaries that it spreads."""

from __future__ import annotations

import inspect

import libcst as cst
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp2.migrate.row import CLASS
from rewriter.bindings import Leaf, arguments
from rewriter.edits import Undecided
from rewriter.module import Module
from rewriter.translate import Rewriting
from rewriter.values import dictionary, string

ORDER = tuple(inspect.signature(FullyShardedDataParallel).parameters)
OLD = {"fsdp_auto_wrap_policy": "auto_wrap_policy", "ignored_parameters": "ignored_states"}
# Arguments of which a call may have one of two expressions, as a condition says.
CONDITIONAL = ("mixed_precision", "cpu_offload", "auto_wrap_policy", "sharding_strategy", "backward_prefetch",
               "forward_prefetch", "limit_all_gathers", "use_orig_params", "device_mesh",
               "ignored_modules")  # fmt: skip
# What only reads a dictionary that it gets.
READING = ("print", "pprint", "info", "debug", "warning", "log", "len", "dict", "str", "repr", "dumps", "list",
           "sorted", "items", "format", "partial", "deepcopy", "copy", "isinstance", "update")  # fmt: skip
CHANGING = ("update", "pop", "popitem", "setdefault", "clear")


class Given:
    """`args`: the arguments by name. `made`: expressions among them that stand nowhere in the text: `a if b else c`
    for an entry that a dictionary is given under a condition."""

    def __init__(self, rewriting: Rewriting, node: cst.Call, module: Module, preset: Leaf | None) -> None:
        self.rewriting, self.node, self.module = rewriting, node, module
        self.made: dict[int, cst.IfExp] = {}
        self.args = self._named(preset)

    def _undecided(self, why: str) -> Undecided:
        return Undecided("FC07", why, self.node, self.module)

    def _named(self, preset: Leaf | None) -> dict[str, cst.BaseExpression]:
        found: dict[str | int, cst.BaseExpression] = {}
        if preset is not None:
            if preset.module is not self.module or preset.spread:
                raise self._undecided("some of its arguments are set in another place")
            found.update({key: value for key, value in preset.args.items() if isinstance(key, str)})
        for arg in self.node.args:
            if arg.star == "*":
                raise self._undecided(f"*{self.module.code(arg.value)} can't be followed")
            if arg.star == "**":
                found.update(self._spread(arg.value))
        found.update(arguments(self.node)[0])
        named: dict[str, cst.BaseExpression] = {}
        for key, value in found.items():
            if isinstance(key, int) and key >= len(ORDER):
                raise self._undecided("it has more arguments than FSDP1 takes")
            name = ORDER[key] if isinstance(key, int) else OLD.get(key, key)
            if name not in ORDER:
                raise self._undecided(f"FSDP1 has no argument {name}")
            if id(value) in self.made and name not in CONDITIONAL:
                raise self._undecided(f"{name} is given under a condition")
            named[name] = value
        if "module" not in named:
            raise self._undecided("it isn't said which module is sharded")
        return named

    def _spread(self, node: cst.BaseExpression) -> dict[str, cst.BaseExpression]:
        shown = self.module.code(node)
        entries, written = dictionary(node), None
        if entries is None and isinstance(node, (cst.Name, cst.Attribute)):
            places = self.rewriting.values.written(node, self.module)
            if len(places) == 1 and places[0][1] is self.module:
                home = self.module.function(places[0][0])
                if home is None or home is self.module.function(node):
                    entries, written = dictionary(places[0][0]), places[0][0]
        if entries is None or any(key is None for key, _ in entries):
            raise self._undecided(f"**{shown} can't be followed")
        found = {key: value for key, value in entries if key is not None}
        self.rewriting.take("FC07", written or node, self.module)
        if isinstance(node, cst.Name) and written is not None:
            self._change(found, node, written)
        self.rewriting.drop(node, self.module)
        return found

    def _change(self, found: dict[str, cst.BaseExpression], node: cst.Name, written: cst.BaseExpression) -> None:
        """Entries that the dictionary is given beside where it is made, or in an `if` there. Those lines go with it."""
        module = self.module
        for read in module.references(node):
            above = module.parent(read)
            if isinstance(above, cst.Attribute) and above.attr.value in CHANGING:
                raise self._undecided(f"{node.value} is changed in line {module.line(read)}")
        entries = added(node, module)
        if entries and (elsewhere := self._passed_on(node)):
            raise self._undecided(f"{node.value} is changed, and read in line {elsewhere} too")
        for read in module.references(node):
            above = module.parent(read)
            outer = module.parent(above) if isinstance(above, cst.Arg) and not above.star else None
            if isinstance(outer, cst.Call) and module.code(outer.func).rpartition(".")[2] not in READING:
                raise self._undecided(f"{node.value} may be changed in line {module.line(read)}")
        for read, key, value in entries:
            line = module.statement(read)
            if line is None or key is None or value is None or module.span(read)[0] > module.span(self.node)[0]:
                raise self._undecided(f"{node.value} is changed in line {module.line(read)}")
            condition = self._condition(line, written, node.value)
            self.rewriting.consume(read)
            self.rewriting.take("FC07", read if condition is None else condition, module)
            if condition is None:
                found[key] = value
                self.rewriting.edits(module).remove(line)
            else:
                found[key] = self._either(condition, value, found.get(key))
                self._remove(line, condition)

    def _passed_on(self, node: cst.Name) -> int:
        """The line in which something else than calls of FSDP1's class gets the dictionary; 0 if nothing does."""
        for read in self.module.references(node):
            above = self.module.parent(read)
            if isinstance(above, cst.Arg) and above.star == "**":
                call = self.module.parent(above)
                if isinstance(call, cst.Call) and (
                    call is self.node or self.rewriting.program.symbol(call.func, self.module) == CLASS
                ):
                    continue
            if not isinstance(above, cst.Subscript):
                return self.module.line(read)
        return 0

    def _either(self, condition: cst.If, value: cst.BaseExpression, before: cst.BaseExpression | None) -> cst.IfExp:
        made = cst.IfExp(test=condition.test, body=value, orelse=cst.Name("None") if before is None else before)
        self.made[id(made)] = made
        return made

    def _condition(self, line: cst.CSTNode, written: cst.BaseExpression, name: str) -> cst.If | None:
        """The `if` beside the dictionary in which a line stands; None if it stands beside the dictionary itself.
        Raises Undecided for any other place."""
        module = self.module
        beside = module.block_of(module.statement(written) or written)
        if any(line is known for known in beside):
            return None
        block = module.parent(line)
        above = module.parent(block) if block is not None else None
        if isinstance(above, cst.If) and any(above is known for known in beside):
            start, end = module.span(above)[0], module.span(self.node)[0]
            asked = module.within(above.test, cst.Name)
            later = [known for read in asked for known in module.assignments(read)
                     if start < module.span(known.node)[0] < end]  # fmt: skip
            if block is above.body and above.orelse is None and not later:
                return above
        raise self._undecided(f"{name} is changed in line {module.line(line)}")

    def _remove(self, line: cst.CSTNode, condition: cst.If) -> None:
        edits = self.rewriting.edits(self.module)
        edits.remove(line)
        if all(any(known is gone for gone in edits.removed) for known in condition.body.body):
            edits.remove(condition)


def added(name: cst.Name, module: Module) -> list[tuple[cst.CSTNode, str | None, cst.BaseExpression | None]]:
    """Where an entry of a dictionary is set or removed: the read of its name, the key, the value; None for what isn't
    written out."""
    found = []
    for read in sorted(module.references(name), key=lambda read: module.span(read)[0]):
        entry = module.parent(read)
        target = module.parent(entry) if isinstance(entry, cst.Subscript) else None
        if isinstance(entry, cst.Subscript) and isinstance(target, (cst.AssignTarget, cst.AugAssign, cst.Del)):
            index = entry.slice[0].slice if len(entry.slice) == 1 else None
            assign = module.parent(target)
            single = isinstance(assign, cst.Assign) and len(assign.targets) == 1
            key = string(index.value) if isinstance(index, cst.Index) else None
            found.append((read, key, assign.value if single and isinstance(assign, cst.Assign) else None))
    return found
