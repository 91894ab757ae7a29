"""Where a program sets the kind of its state dicts: with statements, calls that hold from there on, and functions of
the program that do either."""

from __future__ import annotations

import libcst as cst

from rewriter.blocks import can_unwrap, unwrap
from rewriter.edits import Undecided
from rewriter.kinds import Kind, kind_of
from rewriter.module import Module, last_name
from rewriter.scene import Scene


class Settings:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self._lasting: list[tuple[cst.Call, Module, Kind]] = []
        self._withs: dict[int, Kind | None] = {}
        self._openers: set[str] = set()  # functions that set a kind for their caller

    def read(self, module: Module, node: cst.Call, method: str) -> None:
        if method not in ("state_dict_type", "set_state_dict_type"):
            return
        item = module.parent(node)
        block = module.parent(item) if isinstance(item, cst.WithItem) else None
        if method == "state_dict_type" and isinstance(block, cst.With) and isinstance(item, cst.WithItem):
            self._withs[id(block)] = None
            if module.within(block.body, cst.Yield):
                raise self._in_function(module, node)
            if self._of_optimizers(module, block):
                self._unwrap(module, block, item)
                return
            kind = kind_of(self.scene.values, module, node)
            self._passed_on(module, block, node)
            self._withs[id(block)] = kind
            self._unwrap(module, block, item)
        elif method == "set_state_dict_type" and isinstance(module.parent(node), cst.Expr):
            kind = kind_of(self.scene.values, module, node)
            self._lasting.append((node, module, kind))
            statement = module.statement(node)
            if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
                self.scene.edits(module).remove(statement)
                self._drop_configs(module, node)
        elif method == "state_dict_type" and isinstance(module.parent(node), cst.Return):
            raise self._in_function(module, node)
        else:
            raise Undecided("FM07", "the kind of state dict is set in a way that isn't followed", node, module)

    def _in_function(self, module: Module, node: cst.Call) -> Undecided:
        """What a function sets for whoever opens it is set by each caller: there the state dict says its kind."""
        function = module.function(node)
        self._openers |= {function.name.value} if function is not None else set()
        why = "a function sets the kind: say it where the state dict is made, get_model_state_dict(model, options=...)"
        return Undecided("FM07", why, node, module)

    def _of_optimizers(self, module: Module, block: cst.With) -> bool:
        """Whether the only state dicts in a block are an optimizer's own, which is the same whatever kind is set."""
        made = [call for call in module.within(block.body, cst.Call) if module.code(call.func).endswith("state_dict")]
        receivers = [call.func.value for call in made if isinstance(call.func, cst.Attribute)]
        shown = [module.code(receiver).rpartition(".")[2].lower() for receiver in receivers]
        return bool(made) and len(shown) == len(made) and all(
            "opt" in name and not self.scene.is_model(receiver, module) and not self.scene.symbol(call.func, module)
            for name, receiver, call in zip(shown, receivers, made, strict=True)
        )  # fmt: skip

    def _passed_on(self, module: Module, block: cst.With, setting: cst.Call) -> None:
        """A state dict that is made in a function which is called here would have the kind that is set here."""
        for made in module.within(block.body, cst.Call):
            function = self.scene.values.function_in(made.func, module)
            if function is None:
                continue
            text = function[1].code(function[0])
            if "state_dict" in text and any(self.scene.is_model(arg.value, module) for arg in made.args):
                why = f"{module.code(made.func)} makes or loads a state dict of the kind that is set here"
                raise Undecided("FM07", why, setting, module)

    def _unwrap(self, module: Module, block: cst.With, item: cst.WithItem) -> None:
        """The with statement goes, its body stays."""
        if not can_unwrap(module, block):
            raise Undecided("FM07", "the lines of its body can't be moved", block, module)
        self._drop_configs(module, item.item)
        unwrap(self.scene.edits(module), block, item)

    def _drop_configs(self, module: Module, node: cst.BaseExpression) -> None:
        if isinstance(node, cst.Call):
            for arg in node.args[1:]:
                self.scene.rewriting.drop(arg.value, module)

    def kind_at(self, module: Module, node: cst.CSTNode) -> Kind | None:
        """The kind that holds where a state dict is made; None if the code that sets it stays."""
        for above in module.ancestors(node):
            if isinstance(above, cst.With) and any("summon_full_params" in module.code(i.item) for i in above.items):
                raise Undecided("FM09", "state dicts are made on every rank, outside of it", node, module)
            if id(above) in self._withs:
                return self._withs[id(above)]
            opened = above.items if isinstance(above, cst.With) else ()
            if any(last_name(item.item) in self._openers for item in opened):
                return None
        here = [k for n, m, k in self._lasting if m is module and module.function(n) is module.function(node)
                and module.span(n)[0] < module.span(node)[0]]  # fmt: skip
        if here:
            return here[-1]
        kinds = {kind for _, _, kind in self._lasting}
        if len(kinds) > 1:
            raise Undecided("FM05", "it has been set to different kinds by then", node, module)
        return kinds.pop() if kinds else Kind()

    def hold(self, module: Module, receiver: cst.BaseExpression, node: cst.CSTNode) -> bool:
        """Whether a kind is set here for a model or for one that it is a part of."""
        shown = module.code(receiver)
        for above in module.ancestors(node):
            for item in above.items if isinstance(above, cst.With) and id(above) in self._withs else ():
                if isinstance(item.item, cst.Call) and item.item.args:
                    held = module.code(item.item.args[0].value)
                    if shown == held or shown.startswith(held + "."):
                        return True
        return False
