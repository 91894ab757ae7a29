"""The view that every rule needs: the changes so far, who holds a sharded model, and a few questions about both."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from migration.rewriter.edits import MOVED, Edits
from migration.rewriter.flow import Flow
from migration.rewriter.module import Module
from migration.rewriter.objects import STATIC
from migration.rewriter.rewriting import Rewriting, constant
from migration.rewriter.symbols import CLASS

# Names that a model has from FSDP1's class alone, but for those that methods.py moves by themselves.
ON_MODELS = {*STATIC, "check_is_root"}


@dataclass
class Scene:
    rewriting: Rewriting
    calls: list[tuple[cst.Call, Module]]
    flow: Flow
    interface: bool = False  # the program keeps FSDP1's interface, and its models have FSDP1's methods
    travels: bool = False  # the class goes somewhere, so that there are models that aren't followed

    @property
    def modules(self) -> list[Module]:
        return self.rewriting.program.parsed

    def edits(self, module: Module) -> Edits:
        return self.rewriting.edits(module)

    def take(self, code: str, node: cst.CSTNode, module: Module, outcome: str = MOVED, why: str = "") -> None:
        self.rewriting.take(code, node, module, outcome, why)

    def symbol(self, node: cst.CSTNode, module: Module) -> str | None:
        """FSDP1's name for an expression; its static methods may be called on a model too."""
        known = self.rewriting.program.symbol(node, module)
        if known is None and isinstance(node, cst.Attribute) and node.attr.value in ON_MODELS:
            return f"{CLASS}.{node.attr.value}" if self.is_model(node.value, module) else None
        return known

    def is_model(self, node: cst.CSTNode, module: Module) -> bool:
        return self.flow.is_model(node)

    def may_be_model(self, node: cst.CSTNode, module: Module) -> bool:
        return self.is_model(node, module) or (self.travels and isinstance(node, (cst.Name, cst.Attribute)))

    @property
    def shards(self) -> bool:
        return bool(self.calls) or self.interface

    @functools.cached_property
    def ddp(self) -> bool:
        """Return whether the program may also make DDP models."""
        return any(re.search(r"DistributedDataParallel|\bDDP\b", module.text) for module in self.modules)

    @functools.cached_property
    def lowered(self) -> bool:
        """Return whether some model may compute in another dtype than its parameters have."""
        given = [(arg.keyword, arg.value) for call, _ in self.calls for arg in call.args]
        named = [value for name, value in given if name is not None and name.value == "mixed_precision"]
        return any(constant(value) is not None for value in named)

    @functools.cached_property
    def fsdp2(self) -> bool:
        """Return whether the program shards by FSDP2 already, to which FSDP1's options are only values."""
        words = re.compile(r"fully_shard\b|FSDPModule|fsdp1_interface")
        program = self.rewriting.program
        by_accelerate = any("accelerate" in module.text and program.by_fsdp2([module]) for module in self.modules)
        return by_accelerate or any(words.search(source.text) for source in program.sources.values())

    def static_calls(self, module: Module) -> Iterator[tuple[cst.Call, str]]:
        """Calls of FSDP1's static methods: FSDP.name(model, …), or model.name(model, …)."""
        for call in module.all(cst.Call):
            symbol = self.symbol(call.func, module) if isinstance(call.func, cst.Attribute) else None
            if symbol is None or not symbol.startswith(CLASS + "."):
                continue
            # Until torch 1.12 some were methods, model.name(…): another order of arguments.
            of_class = self.rewriting.program.symbol(call.func, module) is not None
            if of_class or any(self.is_model(arg.value, module) for arg in call.args):
                yield call, symbol.partition(".")[2]

    @property
    def evaluates(self) -> bool:
        """Return whether something is computed without gradients, after which groups stay gathered."""
        return any("no_grad" in module.text or "inference_mode" in module.text for module in self.modules)

    @functools.cached_property
    def called_on_models(self) -> set[str]:
        """Names of methods that are called on sharded models."""
        return {
            call.func.attr.value
            for module in self.modules
            for call in module.all(cst.Call)
            if isinstance(call.func, cst.Attribute) and self.is_model(call.func.value, module)
        }
