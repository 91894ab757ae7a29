"""Every use of FSDP1 in a program, one finding each, whether or not the rewriter can move it."""

from __future__ import annotations

import libcst as cst

from fsdp2.migrate.row import CLASS
from rewriter import beyond, cleared, each_parameter, imports, names, spawn
from rewriter.construct import OLD, code_of
from rewriter.finding import Finding, make
from rewriter.given import ORDER, added
from rewriter.methods import asked_for, asks_for_method, attribute_of_model, by_name, calls_forward
from rewriter.module import Module
from rewriter.optimizers import made_before
from rewriter.placement import meta_calls
from rewriter.precision import FIELDS
from rewriter.program import Program, module_name
from rewriter.rewrite import constructions
from rewriter.scene import Scene
from rewriter.symbols import AROUND, CONFIGS, PREFIX, ROWS, SURE_IMPORTS, canonical
from rewriter.tracked import Tracked
from rewriter.translate import Rewriting
from rewriter.values import dictionary, string

METHODS = {"clip_grad_norm_", "no_sync", "register_comm_hook"}
FIELDS_OF: dict[str, tuple[str, ...]] = {
    "MixedPrecision": FIELDS,
    "CPUOffload": ("offload_params",),
    **dict.fromkeys(CONFIGS, ("offload_to_cpu", "rank0_only")),
    "StateDictSettings": ("state_dict_type", "state_dict_config", "optim_state_dict_config"),
}


class Survey:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.rewriting = Rewriting(program)
        self.calls = constructions(program, self.rewriting.values)
        made = [(node, module) for node, module, _ in self.calls]
        self.scene = Scene(self.rewriting, Tracked(program, self.rewriting.values, made), made)
        self.findings: list[Finding] = []

    def run(self) -> list[Finding]:
        for node, module, preset in self.calls:
            if preset is not None:
                self._add(module, node.func, "FA01")
            self._arguments(module, node)
            for _, made, where in self.scene.entries(node, module):
                self._add(where, made, "FC16")
            for optimizer in made_before(module, node):
                self._add(module, optimizer, "FC14")
        for module in self.program.parsed:
            self._imports(module)
            for use, symbol in names.uses(module, self.scene.symbol):
                self._use(module, use, symbol)
            self._models(module)
            for text in module.all(cst.SimpleString):
                if string(text) in beyond.STREAMS and self.scene.calls:
                    self._add(module, text, "FC31")
                if PREFIX in (string(text) or "") and not isinstance(module.parent(text), cst.Expr):
                    self._add(module, text, "FC09")
            if any(where is module for _, where in self.scene.calls):
                for node in spawn.spawns(module):
                    self._add(module, node, "FC19")
        for path, why in self.program.unparsable.items():
            self._unparsable(path, why)
        return self.findings

    def _add(self, module: Module, node: cst.CSTNode, code: str) -> None:
        start, _ = module.span(node)
        shown = module.code(node).split("\n")[0].strip()
        shown = shown if len(shown) <= 60 else shown[:57] + "…"
        self.findings.append(make(str(module.path), module.source.place(start), code, shown))

    def _unparsable(self, path: object, why: str) -> None:
        source = self.program.sources[path]  # type: ignore[index]
        if SURE_IMPORTS.search(source.text):
            line = int(why.partition("line ")[2].partition(":")[0] or 1) if "line " in why else 1
            self.findings.append(make(str(source.path), (None, line, 1), "FC24", why))

    def _imports(self, module: Module) -> None:
        for name in imports.imported(module):
            qualified = (
                f"{name.package}.{name.name}" if name.package and not name.package.startswith(".") else name.name
            )
            known = canonical(qualified) if not name.package.startswith(".") else None
            if known is None or qualified in AROUND:
                continue
            code = {"private": "FC06", "library": "FC21", "fairscale": "FC22"}.get(known.partition(":")[0], "FC01")
            if name.name == "default_auto_wrap_policy":
                code = "FX04"
            elif code == "FC01" and "fully_sharded_data_parallel" in qualified:
                code = "FX07"
            self._add(module, name.alias, code)
        for statement in module.all(cst.ImportFrom):
            if isinstance(statement.names, cst.ImportStar) and module_name(statement).startswith(
                "torch.distributed.fsdp"
            ):
                self._add(module, statement, "FC01")

    def _use(self, module: Module, node: cst.Name | cst.Attribute, symbol: str) -> None:
        if symbol in AROUND.values() and not self.scene.calls:
            return  # nothing of FSDP1's by itself
        code = "FX02" if symbol in AROUND.values() else names.code_of(symbol, node, module, self.scene.symbol)
        self._add(module, node, code)
        above = module.parent(node)
        if isinstance(above, cst.Call) and above.func is node:
            fields = FIELDS_OF.get(symbol, ())
            for place, arg in enumerate(above.args[: len(fields)]):
                name = arg.keyword.value if arg.keyword is not None else fields[place]
                row = ROWS.get(f"{symbol}.{name}")
                if row is not None:
                    self._add(module, arg, row.code)

    def _arguments(self, module: Module, call: cst.Call) -> None:
        """One finding for each argument of a constructor, those of spread dictionaries where they stand."""
        position = 0
        for arg in call.args:
            if arg.star == "**":
                entries = None
                for value, where in self.scene.values.written(arg.value, module):
                    entries = dictionary(value)
                    for name, node in entries or ():
                        if name is not None and OLD.get(name, name) in ORDER:
                            self._add(where, node, code_of(name))
                for _, key, given in added(arg.value, module) if isinstance(arg.value, cst.Name) else ():
                    if key is not None and given is not None and OLD.get(key, key) in ORDER:
                        self._add(module, given, code_of(key))
                if entries is None:
                    self._add(module, arg, "FC07")
            elif arg.star == "*":
                self._add(module, arg, "FC07")
            elif arg.keyword is not None:
                self._add(
                    module, arg, "FX05" if arg.keyword.value == "fsdp_auto_wrap_policy" else code_of(arg.keyword.value)
                )
            else:
                if 0 < position < len(ORDER):
                    self._add(module, arg, code_of(ORDER[position]))
                position += 1

    # --- what is done with models ---

    def _models(self, module: Module) -> None:
        for attribute in module.all(cst.Attribute):
            if attribute.attr.value == PREFIX or (
                attribute.attr.value == "module"
                and self.scene.is_model(attribute.value, module)
                and not asked_for(module, attribute)
            ):
                self._add(module, attribute, "FC08")
            if own := attribute_of_model(self.scene, module, attribute):
                self._add(module, attribute, own)
            called = module.parent(attribute)
            passed_on = not (isinstance(called, cst.Call) and called.func is attribute)
            if attribute.attr.value == "no_sync" and passed_on and self.scene.is_model(attribute.value, module):
                self._add(module, attribute, "FM12")
            if each_parameter.gradient(self.scene, module, attribute):
                self._add(module, attribute, "FC26")
            if each_parameter.shape_of_parameter(self.scene, module, attribute):
                self._add(module, attribute, "FC28")
        for call, _ in cleared.calls(self.scene, module):
            self._add(module, call, "FC35")
        for target in module.all(cst.AssignTarget):
            if each_parameter.frozen(self.scene, module, target):
                self._add(module, target, "FC18")
        for call in module.all(cst.Call):
            if by_name(self.scene, module, call):
                self._add(module, call, ROWS[f"{CLASS}.no_sync()"].code)
            if asks_for_method(self.scene, module, call):
                self._add(module, call, "FC03")
            if isinstance(call.func, cst.Attribute):
                self._method(module, call, call.func)
            if isinstance(call.func, cst.Attribute) and each_parameter.changed_by_hand(self.scene, module, call.func):
                self._add(module, call, "FC27")
            for problem in beyond.changed_calls(self.scene, module, call):
                self._add(module, call, problem.code)
            if (code := beyond.around(self.scene, module, call)) is not None:
                self._add(module, call, code)
        for call in meta_calls(module) if self.scene.calls else ():
            self._add(module, call, "FC20")

    def _method(self, module: Module, call: cst.Call, called: cst.Attribute) -> None:
        method = called.attr.value
        if calls_forward(self.scene, module, called):
            self._add(module, call, "FM08")
        if self.scene.symbol(called, module) is not None or not self.scene.is_model(called.value, module):
            return
        if method in METHODS:
            self._add(module, call, ROWS[f"{CLASS}.{method}()"].code)
        elif method == "state_dict":
            self._add(module, call, "FC12" if self.scene.on_first_rank(call, module) else "FC10")
        elif method == "load_state_dict":
            self._add(module, call, "FC11")


def survey(program: Program) -> list[Finding]:
    return Survey(program).run()
