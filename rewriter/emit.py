"""Where the lines of a moved constructor go: in place of the statement that it stands in."""

from __future__ import annotations

import re
import textwrap

import libcst as cst

from rewriter.construct import Construction
from rewriter.edits import Undecided, call
from rewriter.placement import Plan
from rewriter.translate import FSDP

DOTTED = re.compile(r"[A-Za-z_][\w.]*")


def keyword(name: str, text: str) -> str:
    return f"**{text}" if name == "**" else f"{name}={text}"


class Emission:
    """`entries`: methods that gather as forward does, and whether the model may be one that has no such method."""

    def __init__(self, construction: Construction, entries: dict[str, bool]) -> None:
        self.entries = entries
        self.made = construction
        self.node, self.module = construction.node, construction.module
        self.edits = construction.edits
        statement = self.module.statement(self.node)
        self.statement = statement if isinstance(statement, cst.SimpleStatementLine) else None

    def emit(self) -> None:
        """Register the edits. Raises Undecided before any of the call's own edits are made."""
        shape, target = self._shape()
        given = self.made.rewriting.code(self.made.args["module"], self.module)
        named = DOTTED.fullmatch(given) is not None
        model = given if named else target if target else self._name("model")
        self.made.rewriting.named.setdefault(id(self.statement), set()).add(model)
        plan = self.made.plan(model)
        for name, maybe in () if plan.replicated else self.entries.items():
            self.edits.need(FSDP, "register_fsdp_forward_method")
            guard = f'if hasattr({model}, "{name}"):\n    ' if maybe else ""
            plan.after.append(f'{guard}register_fsdp_forward_method({model}, "{name}")')
        if plan.simple:
            self._simple(shape, target, given, plan)
            return
        if self.statement is None or shape == "deep" or len(self.statement.body) > 1:
            raise Undecided(
                "FA01",
                "it stands where no further lines can be put: give the sharded model a name of its own first",
                self.node,
                self.module,
            )
        self._remark()
        lines = [] if named else [f"{model} = {given}"]
        lines += self._lines(plan, model)
        if plan.initial:
            lines.append(f"initialise({model}, {plan.initial})")
        root = self._call(plan, model, {**plan.options, **plan.root})
        if shape == "assign":
            lines.append(root if target == model else f"{target} = {root}")
            lines += plan.after
        else:
            lines += [root, *plan.after, f"return {model}"] if plan.after else [f"return {root}"]
        self._put("\n".join(lines))

    def _remark(self) -> None:
        """Comments inside of the statement go above it."""
        assert self.statement is not None
        self.comments: list[str] = []
        for _, comment in self.module.comments(self.statement):
            words = comment.lstrip("# ")
            # A line of code that was commented out in the call makes no sense outside of it.
            if not re.match(r"[\w.*]+\s*[=(]|[\w.*]+,\s*$|\w+$", words) and comment not in self.comments:
                self.comments.append(comment)

    def _put(self, lines: str) -> None:
        assert self.statement is not None
        indent = self.module.indent(self.statement)
        text = "\n".join([*self.comments, lines])
        self.edits.replace(self.module.line_span(self.statement), self.edits.indented(text, indent))

    def _simple(self, shape: str, target: str, given: str, plan: Plan) -> None:
        """No line but the call itself: it stays where it stands."""
        root = self._call(plan, given, {**plan.options, **plan.root})
        if shape == "assign" and target == given and not plan.replicated and self.statement is not None:
            self._remark()
            self._put(root)
            return
        if "\n" in root and self.statement is not None:
            indent = self.module.indent(self.statement)
            first, *rest = root.split("\n")
            root = "\n".join([first, *(indent + line for line in rest)])
        self.edits.replace(self.module.span(self.node), root.replace("\n", self.module.source.newline))

    def _shape(self) -> tuple[str, str]:
        """How the call stands in its statement, and what it is assigned to."""
        above = self.module.parent(self.node)
        if isinstance(above, cst.Assign) and len(above.targets) == 1:
            target = self.module.code(above.targets[0].target)
            return ("assign", target) if DOTTED.fullmatch(target) else ("deep", "")
        if isinstance(above, cst.AnnAssign) and isinstance(above.target, (cst.Name, cst.Attribute)):
            return "assign", self.module.code(above.target)
        if isinstance(above, cst.Return):
            return "return", ""
        return "deep", ""

    def _name(self, wanted: str) -> str:
        function = self.module.function(self.node) or self.module.tree
        taken = {name.value for name in self.module.within(function, cst.Name)}
        # Another call in the same statement has its model under its name until the statement is done.
        taken |= self.made.rewriting.named.get(id(self.statement), set())
        for name in (wanted, f"sharded_{wanted}", f"fsdp_{wanted}", *(f"{wanted}_{n}" for n in range(2, 10))):
            if name not in taken:
                return name
        raise Undecided("FA01", f"no name is free for the {wanted}", self.node, self.module)

    def _call(self, plan: Plan, model: str, options: dict[str, str]) -> str:
        if plan.replicated:
            return call("DistributedDataParallel", [model, *(f"{k}={v}" for k, v in options.items())])
        self.edits.need(FSDP, "fully_shard")
        order = ("**", "mesh", "reshard_after_forward", "mp_policy", "offload_policy", "ignored_params")
        return call("fully_shard", [model, *(keyword(name, options[name]) for name in order if name in options)])

    def _lines(self, plan: Plan, model: str) -> list[str]:
        lines = list(plan.before)
        groups = bool(plan.condition or plan.chosen_by or plan.norms)
        for name, text in list(plan.options.items()):
            if groups and not re.fullmatch(r"[\w.]+", text):
                fresh = self.made._fresh(name)
                lines.append(f"{fresh} = {text}")
                plan.options[name] = fresh
        var = self.made.variable
        beside = f"{var} not in {plan.ignored} and " if plan.ignored else ""
        if beside and " or " in plan.condition:
            plan.condition = f"({plan.condition})"
        if plan.norms:
            options = {k: v for k, v in plan.options.items() if k not in ("mp_policy",)} | {"mp_policy": plan.norms}
            lines.append(
                f"for {var} in list({model}.modules()):  # FSDP1 left batch norm in full precision\n"
                f"    if {beside}isinstance({var}, torch.nn.modules.batchnorm._BatchNorm):\n"
                + textwrap.indent(self._initialised(plan, var, options), "        ")
            )
        inner = {**plan.options, **plan.inner}
        if plan.chosen_by:
            shard = call(plan.chosen_by, [*plan.choose, *(keyword(name, text) for name, text in inner.items())])
            guard = f"if {plan.optional} is not None:\n" if plan.optional else ""
            lines.append(guard + textwrap.indent(shard, "    " * bool(guard)))
        elif plan.condition:
            # Which is initialised first decides which random numbers it gets.
            order = f"inner_first({model})" if plan.initial else f"reversed(list({model}.modules())[1:])"
            lines.append(
                f"for {var} in {order}:\n"
                f"    if {beside}{plan.condition}:\n" + textwrap.indent(self._initialised(plan, var, inner), "        ")
            )
        return lines

    def _initialised(self, plan: Plan, module: str, options: dict[str, str]) -> str:
        """The call, behind that of the helper that gives the group its initial values, if there is one."""
        sharded = self._call(plan, module, options)
        return f"initialise({module}, {plan.initial})\n{sharded}" if plan.initial else sharded
