"""FSDP1's values as FSDP2's, each where it is written: strategies, precision, offload and wrapping policies.

A value that a name, a dictionary, an argument or another file holds is translated there, and only if everything that
reads it is translated too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import libcst as cst

from rewriter.bindings import Leaf
from rewriter.conditions import Conditions
from rewriter.edits import Edits, Undecided
from rewriter.module import Module
from rewriter.program import Program
from rewriter.symbols import name_or, row_of
from rewriter.taken import MOVED, Taken
from rewriter.values import Values, assignment, by_key, dictionary, held, is_none, string

FSDP = "torch.distributed.fsdp"
LOOPS = (cst.For, cst.CompFor, cst.SimpleStatementLine, cst.BaseCompoundStatement)  # and what else may bind a name
Translate = Callable[[Leaf], str]


class Rewriting(Conditions):
    """The changes of a program while they are made: edits of each file, and which reads are accounted for."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.values = Values(program)
        self._edits: dict[int, Edits] = {}
        self.account: list[Taken] = []  # what the rules have taken
        self.consumed: set[int] = set()
        self._watched: list[tuple[cst.Name | cst.Attribute, Module, str]] = []
        self._droppable: list[tuple[cst.Name | cst.Attribute, Module]] = []
        self._dropped: set[int] = set()  # values that stand in the new calls, or need not
        self.casting: dict[int, bool] = {}  # a precision's node: whether it says itself if groups' inputs are cast
        self.named: dict[int, set[str]] = {}  # a statement's number: variables for models that are sharded above it
        self.by_name = False  # a sharding strategy is chosen at run time, so that all of them become their names

    def edits(self, module: Module) -> Edits:
        return self._edits.setdefault(id(module), Edits(module))

    def take(self, code: str, node: cst.CSTNode, module: Module, outcome: str = MOVED) -> None:
        self.account.append(Taken(code, node, module, outcome))

    @property
    def all(self) -> list[Edits]:
        return list(self._edits.values())

    def code(self, node: cst.CSTNode, module: Module) -> str:
        return self.edits(module).code(node)

    # --- translating in place ---

    def in_place(self, node: cst.BaseExpression, module: Module, translate: Translate, code: str) -> str:
        """Translate all that an expression may be, where it is written; the expression's own text after that.

        `translate` makes a leaf's new text and raises Undecided for what it can't.
        """
        if isinstance(node, cst.IfExp):
            body = self.in_place(node.body, module, translate, code)
            orelse = self.in_place(node.orelse, module, translate, code)
            body = f"({body})" if body.startswith("lambda") else body
            return f"{body} if {self.code(node.test, module)} else {orelse}"
        if isinstance(node, cst.Subscript) and (entries := dictionary(node.value)) is not None:
            for _, value in entries:
                self._put(value, module, translate, code)
            return self.code(node, module)
        leaves = self.values.leaves(node, module)
        if not leaves:
            raise Undecided(code, "no value of it was found", node, module)
        for leaf in leaves:
            if leaf.kind == "unknown":
                raise Undecided(code, leaf.why, node, module)
        own = next((leaf for leaf in leaves if leaf.node is node), None)
        if own is not None and own.kind == "member" and 1 in own.args:
            other = self.in_place(own.args[1], module, translate, code)
            return name_or(translate(own), own.symbol, other)
        if own is not None and len(leaves) == 1:
            return translate(own)
        if isinstance(node, cst.Subscript):
            for value, where in self.values.written(node.value, module):
                for _, entry in held(value) or ():
                    self._put(entry, where, translate, code)
            self._watch(node.value, module, code)
            return module.code(node)
        if isinstance(node, cst.Call):
            returned = self.values.returns(node, module)
            if returned is None:
                if isinstance(node.func, cst.Attribute) and node.func.attr.value == "get":
                    for value, where in self.values.written(node.func.value, module):
                        for _, entry in dictionary(value) or ():
                            self._put(entry, where, translate, code)
                    self._watch(node.func.value, module, code)
                    return module.code(node)
                raise Undecided(code, "it is made in a way that isn't followed", node, module)
            for value, where in returned:
                self._put(value, where, translate, code)
            return module.code(node)
        if isinstance(node, (cst.Name, cst.Attribute)):
            self._behind(node, module, translate, code)
            return module.code(node)
        raise Undecided(code, "it is made in a way that isn't followed", node, module)

    def _behind(self, node: cst.Name | cst.Attribute, module: Module, translate: Translate, code: str) -> None:
        sources, why = self.values.sources(node, module)
        if sources is None:
            raise Undecided(code, why, node, module)
        self._watch(node, module, code)
        for binding in module.assignments(node) if isinstance(node, cst.Name) else ():
            loop = next((a for a in module.ancestors(binding.node) if isinstance(a, LOOPS)), None)
            for name in module.within(loop.iter, cst.Name) if isinstance(loop, (cst.For, cst.CompFor)) else ():
                self.consume(name)  # the variable's values are the loop's
        for source, where in sources:
            if isinstance(source, (cst.FunctionDef, cst.ClassDef)):
                translate(Leaf("function", source, where))
            else:
                self._put(source, where, translate, code)

    def _put(self, node: cst.BaseExpression, module: Module, translate: Translate, code: str) -> None:
        made = self.in_place(node, module, translate, code)
        # Where only parts of it have changed, they have been put into it, each in its own place.
        if made not in (module.code(node), self.code(node, module)) and not self.edits(module).has(module.span(node)):
            indent = module.indent(module.statement(node) or node)
            if "\n" in made and not made.rpartition("\n")[2].startswith(indent):
                made = made.replace("\n", "\n" + indent)
            self.edits(module).replace(module.span(node), made)

    def _watch(self, node: cst.BaseExpression, module: Module, code: str) -> None:
        """Remember that what this reads has changed, so that all who read it must have been translated."""
        self.consume(node)
        if isinstance(node, (cst.Name, cst.Attribute)):
            self._watched.append((node, module, code))

    def consume(self, node: cst.CSTNode) -> None:
        self.consumed.add(id(node))
        if isinstance(node, cst.Attribute):
            self.consumed.add(id(node.value))

    def unaccounted(self) -> list[Undecided]:
        """Reads of translated values that would now find something of FSDP2 and don't expect it."""
        found = []
        for node, module, code in self._watched:
            name = node.value if isinstance(node, cst.Name) else node.attr.value
            if isinstance(node, cst.Name):
                readers: Iterable[tuple[cst.CSTNode, Module]] = [(n, module) for n in module.references(node)]
            else:
                readers = [
                    (n, m)
                    for m in self.program.parsed
                    for n in m.all(cst.Attribute)
                    if n.attr.value == name and not isinstance(m.parent(n), (cst.AssignTarget, cst.AnnAssign))
                ]
            for reader, where in readers:
                if id(reader) in self.consumed or (self._is_dictionary(node, module) and by_key(reader, where)):
                    continue
                if not self._harmless(reader, where):
                    why = f"{name} is also read in line {where.line(reader)} of {where.path.name}"
                    found.append(Undecided(code, why, node, module))
                    break
        return found

    def _is_dictionary(self, node: cst.Name | cst.Attribute, module: Module) -> bool:
        sources = self.values.sources(node, module)[0]
        return bool(sources) and all(
            isinstance(source, cst.BaseExpression) and dictionary(source) is not None for source, _ in sources or ()
        )

    def _harmless(self, node: cst.CSTNode, module: Module) -> bool:
        """A read that only shows the value, compares it with None, or stands in what is replaced."""
        if self.edits(module).covers(node):
            return True
        above = module.parent(node)
        if isinstance(above, cst.FormattedStringExpression):
            return True
        if isinstance(above, cst.Arg) and isinstance(call := module.parent(above), cst.Call):
            return module.code(call.func).rpartition(".")[2] in ("print", "info", "debug", "rank0_print", "log")
        if isinstance(above, cst.Comparison) and len(above.comparisons) == 1:
            other = above.comparisons[0].comparator
            among = [e.value for e in other.elements] if isinstance(other, (cst.Tuple, cst.List, cst.Set)) else [other]
            strategies = [(self.program.symbol(one, module) or "").startswith("ShardingStrategy.") for one in among]
            return is_none(other) or (self.by_name and all(strategies))
        return isinstance(above, (cst.If, cst.AssignTarget))

    # --- values that go away ---

    def only(self, node: cst.BaseExpression, module: Module) -> Leaf | None:
        """The one value that an expression can be, if it is written where the expression sees the same names."""
        leaves = self.values.leaves(node, module)
        if len(leaves) != 1 or leaves[0].module is not module:
            return None
        leaf = leaves[0]
        if isinstance(leaf.node, cst.FunctionDef):
            return leaf
        home = module.function(leaf.node)
        return leaf if home is None or any(above is home for above in module.ancestors(node)) else None

    def drop(self, node: cst.BaseExpression, module: Module) -> None:
        """An expression isn't read any more; a variable that only it read is removed in the end."""
        self.consume(node)
        self._dropped.update(id(leaf.node) for leaf in self.values.leaves(node, module))
        for name in module.within(node, cst.Name):
            self.consumed.add(id(name))
        if isinstance(node, cst.Subscript) and isinstance(node.value, cst.Name):
            self._droppable.append((node.value, module))
        if isinstance(node, cst.Attribute) and module.code(node.value) == "self":
            self._droppable.append((node, module))
        if isinstance(node, cst.Name):
            self._droppable.append((node, module))
            for binding in module.assignments(node):
                value = self._value_of(binding.node, module)
                if isinstance(value, cst.Name):
                    self.drop(value, module)

    def passed_by(self, node: cst.CSTNode) -> bool:
        """Whether a value was dropped because the new calls say it."""
        return id(node) in self._dropped

    @staticmethod
    def _value_of(target: cst.CSTNode, module: Module) -> cst.BaseExpression | None:
        assign = assignment(target, module)
        return None if assign is None else assign.value

    def remove_unread(self) -> None:
        """Statements that assign to a variable, or to an attribute of `self`, that nothing reads any more."""
        for name, module in self._droppable:
            edits = self.edits(module)
            if isinstance(name, cst.Name):
                targets = [binding.node for binding in module.assignments(name)]
                reads = [(read, module) for read in module.references(name)]
            elif (found := self._uses(name, module)) is not None:
                targets, reads = found
            else:
                continue
            if any(not self._gone(read, where) for read, where in reads):
                continue
            for target in targets:
                assign = assignment(target, module)
                line = None if assign is None else module.parent(assign)
                if (
                    isinstance(line, cst.SimpleStatementLine)
                    and len(line.body) == 1
                    and assign is not None
                    and assign.value is not None
                    and self.pure(assign.value, module)
                ):
                    edits.remove(line)

    def _gone(self, read: cst.CSTNode, module: Module) -> bool:
        """Whether a read is accounted for, and what took its place doesn't read it again."""
        edits = self.edits(module)
        return edits.goes(read) if edits.covers(read) else id(read) in self.consumed

    def _uses(
        self, name: cst.Attribute, module: Module
    ) -> tuple[list[cst.CSTNode], list[tuple[cst.CSTNode, Module]]] | None:
        """Where attributes of a name are set in this file and where they are read; None if it isn't all known."""
        if self.program.said_elsewhere(name.attr.value):
            return None
        uses = [(n, m) for m in self.program.parsed for n in m.all(cst.Attribute) if n.attr.value == name.attr.value]
        set_ = [(n, m) for n, m in uses if isinstance(m.parent(n), (cst.AssignTarget, cst.AnnAssign))]
        if any(m is not module or m.code(n.value) != "self" for n, m in set_):
            return None
        targets = [node for node, _ in set_]
        return targets, [(node, where) for node, where in uses if not any(node is target for target in targets)]

    def pure(self, node: cst.BaseExpression, module: Module) -> bool:
        """Whether leaving out an expression leaves out nothing but a value of FSDP1."""
        return all(
            self.program.symbol(call.func, module) is not None
            or module.code(call.func) in ("dict", "set", "tuple", "getattr", "int", "torch.device")
            or module.code(call.func).endswith(("partial", "current_device"))
            for call in module.within(node, cst.Call)
            if not any(isinstance(above, cst.Lambda) and above is not node for above in self._above(call, node, module))
        )

    @staticmethod
    def _above(inner: cst.CSTNode, outer: cst.CSTNode, module: Module) -> Iterable[cst.CSTNode]:
        for above in module.ancestors(inner):
            if above is outer:
                return
            yield above

    # --- the other leaves ---

    def strategy(self, leaf: Leaf) -> str:
        """reshard_after_forward for a strategy."""
        if leaf.kind == "none" or leaf.symbol == "ShardingStrategy.FULL_SHARD":
            return "None"
        if leaf.symbol == "ShardingStrategy.SHARD_GRAD_OP":
            return "False"
        row = row_of(leaf.symbol) if leaf.kind == "symbol" else None
        if row is None or row.code == "FA03":
            raise Undecided("FA03", "which strategy is chosen isn't known here", leaf.node, leaf.module)
        raise Undecided(row.code, f"{leaf.symbol} is one of several; {row.note}", leaf.node, leaf.module)

    def offload(self, leaf: Leaf) -> str:
        edits = self.edits(leaf.module)
        if leaf.kind == "none":
            return "None"
        if leaf.kind != "call" or leaf.symbol != "CPUOffload" or leaf.spread:
            raise Undecided("FA04", "what is passed isn't a CPUOffload that is written out", leaf.node, leaf.module)
        flag = leaf.args.get(0, leaf.args.get("offload_params"))
        wanted = self.code(flag, leaf.module) if flag is not None else "False"
        on = "CPUOffloadPolicy(pin_memory=torch.cuda.is_available())"
        if wanted == "False":
            edits.need(FSDP, "OffloadPolicy")
            return "OffloadPolicy()"
        edits.need(FSDP, "CPUOffloadPolicy")
        edits.need("torch")
        if wanted == "True":
            return on
        edits.need(FSDP, "OffloadPolicy")
        return f"{on} if {wanted} else OffloadPolicy()"


def constant(node: cst.BaseExpression | None, default: object = None) -> object:
    """True, False, None or a string that is written out; Ellipsis for anything else."""
    if node is None:
        return default
    if isinstance(node, cst.Name) and node.value in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[node.value]
    text = string(node)
    return text if text is not None else ...
