"""The lines of a moved constructor, which take the place of the statement that it stands in."""

from __future__ import annotations

import re
import textwrap

import libcst as cst

from migration.rewriter.constructor_calls import Construction, Plan
from migration.rewriter.edits import Undecided, call
from migration.rewriter.module import Module
from migration.rewriter.rewriting import FSDP
from migration.rewriter.scene import Scene

DOTTED = re.compile(r"[A-Za-z_][\w.]*")


class Emission:
    def __init__(self, construction: Construction) -> None:
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
        model = given if named else target if target else self._name()
        self.made.rewriting.named.setdefault(id(self.statement), set()).add(model)
        plan = self.made.plan(model)
        if not (plan.before or plan.condition or plan.least or plan.after):
            self._simple(shape, target, given, plan)
            return
        if self.statement is None or shape == "deep" or len(self.statement.body) > 1:
            raise Undecided("FA01", "it stands where no further lines can be put", self.node, self.module)
        self._remark()
        lines = [] if named else [f"{model} = {given}"]
        lines += self._lines(plan, model)
        root = self._call(model, plan.options)
        if shape == "assign":
            lines.append(root if target == model else f"{target} = {root}")
            lines += plan.after
        else:
            lines += [root, *plan.after, f"return {model}"] if plan.after else [f"return {root}"]
        self._put("\n".join(lines))

    def _remark(self) -> None:
        """Comments inside of the statement and behind it go above it."""
        assert self.statement is not None
        self.comments: list[str] = []
        behind = self.statement.trailing_whitespace.comment
        inside = [comment for _, comment in self.module.comments(self.statement)]
        for comment in inside if behind is None else [*inside, behind.value]:
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
        root = self._call(given, plan.options)
        assigned = self.module.parent(self.node)
        if shape == "assign" and target == given and self.statement is not None and assigned is not None:
            self._remark()
            if "\n" not in root and not any(self.module.comments(self.statement)):
                # What else is on its line stays: other statements, and a comment.
                self.edits.replace(self.module.span(assigned), root)
                return
            if len(self.statement.body) == 1:
                self._put(root)
                return
        if "\n" in root and self.statement is not None:
            indent = self.module.indent(self.statement)
            first, *rest = root.split("\n")
            root = "\n".join([first, *(indent + line for line in rest)])
        self.edits.replace(self.module.span(self.node), root.replace("\n", self.module.source.newline))

    def _shape(self) -> tuple[str, str]:
        """The way in which the call stands in its statement, and what it is assigned to."""
        above = self.module.parent(self.node)
        if isinstance(above, cst.Assign) and len(above.targets) == 1:
            target = self.module.code(above.targets[0].target)
            return ("assign", target) if DOTTED.fullmatch(target) else ("deep", "")
        if isinstance(above, cst.AnnAssign) and isinstance(above.target, (cst.Name, cst.Attribute)):
            return "assign", self.module.code(above.target)
        if isinstance(above, cst.Return):
            return "return", ""
        return "deep", ""

    def _name(self) -> str:
        # Another call in the same statement has its model under its name until the statement is done.
        taken = self.made.taken | self.made.rewriting.named.get(id(self.statement), set())
        for name in ("model", "sharded_model", "fsdp_model", *(f"model_{n}" for n in range(2, 10))):
            if name not in taken:
                return name
        raise Undecided("FA01", "no name is free for the model", self.node, self.module)

    def _call(self, model: str, options: dict[str, str]) -> str:
        self.edits.need(FSDP, "fully_shard")
        order = ("mesh", "reshard_after_forward", "mp_policy", "offload_policy", "ignored_params")
        return call("fully_shard", [model, *(f"{name}={options[name]}" for name in order if name in options)])

    def _lines(self, plan: Plan, model: str) -> list[str]:
        lines = list(plan.before)
        for name, text in plan.options.items():
            if (plan.condition or plan.least) and not re.fullmatch(r"[\w.]+", text):
                plan.options[name] = self.made.fresh(name)
                lines.append(f"{plan.options[name]} = {text}")
        if plan.least:
            self.edits.need(FSDP, "fully_shard")
            options = [f"{name}={text}" for name, text in {**plan.options, **plan.inner}.items()]
            lines.append(call("shard_by_size", [model, plan.least, *options]))
        elif plan.condition:
            shard = self._call(self.made.variable, {**plan.options, **plan.inner})
            lines.append(
                f"for {self.made.variable} in reversed(list({model}.modules())[1:]):\n"
                f"    if {plan.condition}:\n" + textwrap.indent(shard, "        ")
            )
        return lines


def make(scene: Scene, node: cst.Call, module: Module) -> list[Undecided]:
    """A call of FSDP1's class as calls of fully_shard."""
    try:
        Emission(Construction(scene.rewriting, node, module)).emit()
    except Undecided as problem:
        return [problem]
    return []
