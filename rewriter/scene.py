"""What every rule needs to look at: the changes so far, who holds a sharded model, and a few questions about both."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst
import torch

from rewriter.edits import Edits
from rewriter.module import Module, last_name
from rewriter.symbols import CLASS
from rewriter.taken import MOVED
from rewriter.tracked import STATIC, Tracked
from rewriter.translate import Rewriting, constant
from rewriter.values import Values

# Names that a model has from FSDP1's class alone, but for those that methods.py moves by themselves.
ON_MODELS = {*STATIC, "check_is_root"}
# What is done with a model that is given without computing with it.
LOOKS = ("print", "isinstance", "hasattr", "getattr", "setattr", "len", "type", "id", "str", "repr", "next", "sum")


@dataclass
class Scene:
    rewriting: Rewriting
    tracked: Tracked
    calls: list[tuple[cst.Call, Module]]
    interface: bool = False  # the program keeps FSDP1's interface, and its models have FSDP1's methods
    travels: bool = False  # the class goes somewhere, so that there are models that aren't followed

    @property
    def values(self) -> Values:
        return self.rewriting.values

    @property
    def modules(self) -> list[Module]:
        return self.rewriting.program.parsed

    def edits(self, module: Module) -> Edits:
        return self.rewriting.edits(module)

    def take(self, code: str, node: cst.CSTNode, module: Module, outcome: str = MOVED) -> None:
        self.rewriting.take(code, node, module, outcome)

    def symbol(self, node: cst.CSTNode, module: Module) -> str | None:
        """FSDP1's name for an expression; its static methods may be called on a model too."""
        known = self.rewriting.program.symbol(node, module)
        if known is None and isinstance(node, cst.Attribute) and node.attr.value in ON_MODELS:
            return f"{CLASS}.{node.attr.value}" if self.is_model(node.value, module) else None
        return known

    def is_model(self, node: cst.CSTNode, module: Module) -> bool:
        return self.tracked.is_model(node, module)

    def may_be_model(self, node: cst.CSTNode, module: Module) -> bool:
        return self.is_model(node, module) or (self.travels and isinstance(node, (cst.Name, cst.Attribute)))

    @property
    def shards(self) -> bool:
        return bool(self.calls) or self.interface

    @functools.cached_property
    def ddp(self) -> bool:
        """Whether the program may also make DDP models."""
        return any(re.search(r"DistributedDataParallel|\bDDP\b", module.text) for module in self.modules)

    @functools.cached_property
    def lowered(self) -> bool:
        """Whether some model may compute in another dtype than its parameters have."""
        given = [(arg.keyword, arg.value) for call, _ in self.calls for arg in call.args]
        named = [value for name, value in given if name is not None and name.value == "mixed_precision"]
        return any(constant(value) is not None for value in named)

    @functools.cached_property
    def fsdp2(self) -> bool:
        """Whether the program shards by FSDP2 already, to which FSDP1's options are only values."""
        words = re.compile(r"fully_shard\b|FSDPModule|fsdp1_interface")
        return any(words.search(source.text) for source in self.rewriting.program.sources.values())

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

    @functools.cached_property
    def summoned(self) -> list[tuple[cst.With, Module]]:
        """with statements that open summon_full_params."""
        return [
            (block, module)
            for module in self.modules
            for block in (module.all(cst.With) if "summon_full_params" in module.text else ())
            if any("summon_full_params" in module.code(item.item) for item in block.items)
        ]

    @property
    def evaluates(self) -> bool:
        """Whether something is computed without gradients, after which groups stay gathered."""
        return any("no_grad" in module.text or "inference_mode" in module.text for module in self.modules)

    def fresh(self, node: cst.CSTNode, module: Module, depth: int = 0) -> bool:
        """Whether nothing has been computed when the program gets here: no loop and no call of a model stands before
        it, in its function and where that is called."""
        home = module.function(node)
        if self.computes(home or module.tree, module, 0, module.span(node)[0]):
            return False
        if home is None or home.name.value == "main":
            return True
        calls = self.values.calls(home, module)
        if not calls and isinstance(module.enclosing(home, cst.ClassDef, cst.FunctionDef), cst.ClassDef):
            return False
        return bool(calls) and depth < 4 and all(self.fresh(call, where, depth + 1) for call, where in calls)

    def computes(self, home: cst.CSTNode, module: Module, start: int, end: int) -> bool:
        """Whether a function has a loop, or calls a model, between two places of the text."""
        for known in module.within(home, cst.For, cst.While, cst.Call):
            inner = module.function(known)
            if (inner is not None and inner is not home) or not start <= module.span(known)[0] < end:
                continue
            called = known.func if isinstance(known, cst.Call) else None
            if called is None or self.is_model(called, module):
                return True
            if any(self.is_model(arg.value, module) for arg in known.args) and self._runs(known, module):
                return True
        return False

    def _runs(self, call: cst.Call, module: Module) -> bool:
        """Whether what gets a model may compute with it: a function of the program that does, or one of elsewhere."""
        place = self.values.function_in(call.func, module)
        if place is not None:
            find = functools.partial(self.computes, place[0], place[1], 0, len(place[1].text))
            return bool(self.rewriting.program.answer("computes", place[0], find, False))
        if module.code(call.func) in LOOKS or self.symbol(call.func, module) is not None:
            return False
        names = [name for name, _ in module.qualified(call.func)]
        return not any(name.startswith(("torch.", "builtins.")) for name in names) and not self.values.classes(
            call.func, module
        )

    def entries(self, construction: cst.Call, module: Module) -> list[tuple[str, cst.Call, Module]]:
        """Calls of other methods than forward of the model's class, on the sharded model that a call makes."""
        found = []
        for owner, home in self._owners(construction, module):
            own = [name for name in self._computing(owner, home) if not hasattr(torch.nn.Module, name)]
            calls = [(name, *call) for name in own for call in self.rewriting.program.named(cst.Call, name)]
            for name, made, where in calls:
                if isinstance(made.func, cst.Attribute) and self.is_model(made.func.value, where):
                    found.append((name, made, where))
        return found

    @functools.cached_property
    def entry_points(self) -> set[int]:
        """All such calls, by node."""
        return {id(made) for call, module in self.calls for _, made, _ in self.entries(call, module)}

    def maybe_without(self, construction: cst.Call, module: Module, method: str) -> bool:
        """Whether one of the classes that a model may be of has no such method."""
        return any(method not in methods_of(owner) for owner, _ in self._owners(construction, module))

    def _owners(self, construction: cst.Call, module: Module) -> list[tuple[cst.ClassDef, Module]]:
        """The classes of the program that the model of a call may be of."""
        given = [
            a.value for a in construction.args if not a.star and (a.keyword is None or a.keyword.value == "module")
        ]
        return self.values.classes(given[0], module) if given else []

    def _computing(self, owner: cst.ClassDef, module: Module) -> list[str]:
        find = functools.partial(computing, owner, module)
        return self.rewriting.program.answer("computing", owner, find)

    @functools.cached_property
    def called_on_models(self) -> set[int]:
        """Methods of sharded models' classes that are called on the models, by node."""
        found = set()
        for construction, module in self.calls:
            for owner, _ in self._owners(construction, module):
                own = methods_of(owner)
                for name, method in own.items():
                    for made, where in self.rewriting.program.named(cst.Call, name):
                        if isinstance(made.func, cst.Attribute) and self.is_model(made.func.value, where):
                            found.add(id(method))
        return found


def methods_of(owner: cst.ClassDef) -> dict[str, cst.FunctionDef]:
    return {s.name.value: s for s in owner.body.body if isinstance(s, cst.FunctionDef)}


def computing(owner: cst.ClassDef, module: Module) -> list[str]:
    """A model's methods that compute with its parameters: those that call it or a part of it, or read a parameter.

    Of others, such as one that returns a configuration, an entry point mustn't be made: it would gather parameters,
    and whoever calls it on one rank alone would wait for the others.
    """
    methods = methods_of(owner)
    parameters = {
        node.targets[0].target.attr.value
        for node in module.within(owner, cst.Assign)
        if isinstance(node.value, cst.Call) and last_name(node.value) == "Parameter"
        if isinstance(node.targets[0].target, cst.Attribute)
    }

    def of_self(node: cst.CSTNode) -> list[str]:
        """The attributes of self that are read below a node."""
        return [a.attr.value for a in module.within(node, cst.Attribute) if is_self(a.value)]

    def is_self(node: cst.CSTNode) -> bool:
        return isinstance(node, cst.Name) and node.value == "self"

    def computes(name: str, seen: frozenset[str]) -> bool:
        function = methods[name]
        for call in module.within(function, cst.Call):
            own = isinstance(call.func, cst.Attribute) and is_self(call.func.value)
            if not own and not is_self(call.func):
                continue
            called = call.func.attr.value if own else "forward"
            if called in methods and called != "forward":
                if called not in seen and computes(called, seen | {called}):
                    return True
            elif called == "forward" or not hasattr(torch.nn.Module, called):
                return True
        # Over the parts of the model, most likely; who lists all parameters makes an optimizer of them, or counts.
        parts = [part for loop in module.within(function, cst.For, cst.CompFor) for part in of_self(loop.iter)]
        return any(not hasattr(torch.nn.Module, part) for part in parts) or bool({*of_self(function)} & parameters)

    return [name for name in methods if computes(name, frozenset({name}))]
