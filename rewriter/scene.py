"""What every rule needs to look at: the changes so far, who holds a sharded model, and a few questions about both."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m
import torch

from rewriter.edits import Edits
from rewriter.module import Module
from rewriter.symbols import CLASS
from rewriter.taken import MOVED
from rewriter.tracked import STATIC, Tracked
from rewriter.translate import Rewriting, constant
from rewriter.values import Values

# Names that a model has from FSDP1's class alone, but for those that methods.py moves by themselves.
ON_MODELS = {*STATIC, "check_is_root"}
FIRST_RANK = re.compile(
    r"\b\w*rank\w*(\(\))?\s*==\s*0|\b0\s*==\s*\w*rank|is_(main|master|rank_?0|first|global_zero)\w*"
    r"|^not\s+\w*rank\w*$|\bmain_process|master_process|get_rank\(\)\s*==\s*0|get_rank\(\s*\w*\s*\)\s*==\s*0",
    re.IGNORECASE,
)


# Functions that compute with a model they are given, most likely.
RUNS = re.compile(r"train|fit|run|eval|valid|test|sample|generate|step|epoch|loop", re.IGNORECASE)


@dataclass
class Scene:
    rewriting: Rewriting
    tracked: Tracked
    calls: list[tuple[cst.Call, Module]]

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

    @property
    def ddp(self) -> bool:
        """Whether the program also makes DDP models."""
        return any(
            name.endswith("DistributedDataParallel")
            for module in self.modules
            if "DistributedDataParallel" in module.text or "DDP(" in module.text
            for call in module.all(cst.Call)
            for name, _ in module.qualified(call.func)
        )

    @property
    def lowered(self) -> bool:
        """Whether some model computes in another dtype than its parameters have."""
        for call, _module in self.calls:
            for arg in call.args:
                if arg.star or (
                    arg.keyword is not None
                    and arg.keyword.value == "mixed_precision"
                    and constant(arg.value) is not None
                ):
                    return True
        return False

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
            runs = module.code(called).rpartition(".")[2]
            if RUNS.search(runs) and any(self.is_model(arg.value, module) for arg in known.args):
                return True
        return False

    def on_first_rank(self, node: cst.CSTNode, module: Module) -> bool:
        """Whether only the first rank gets here, as far as conditions of this function say."""
        below: cst.CSTNode = node
        for above in module.ancestors(node):
            if isinstance(above, cst.FunctionDef):
                return False
            if isinstance(above, cst.If) and below is above.body and FIRST_RANK.search(module.code(above.test)):
                return True
            below = above
        return False

    def only_first_rank_reads(self, name: cst.Name, module: Module) -> bool:
        reads = module.references(name)
        return bool(reads) and all(self.on_first_rank(read, module) for read in reads)

    def entries(self, construction: cst.Call, module: Module) -> list[tuple[str, cst.Call, Module]]:
        """Calls of other methods than forward of the model's class, on the sharded model that a call makes."""
        found = []
        for owner in self._owners(construction, module):
            own = [name for name in computing(owner) if not hasattr(torch.nn.Module, name)]
            for where in self.modules if own else ():
                for made in where.all(cst.Call):
                    called = made.func if isinstance(made.func, cst.Attribute) else None
                    if called and called.attr.value in own and self.is_model(called.value, where):
                        found.append((called.attr.value, made, where))
        return found

    @functools.cached_property
    def entry_points(self) -> set[int]:
        """All such calls, by node."""
        return {id(made) for call, module in self.calls for _, made, _ in self.entries(call, module)}

    def maybe_without(self, construction: cst.Call, module: Module, method: str) -> bool:
        """Whether one of the classes that a model may be of has no such method."""
        return any(method not in methods_of(owner) for owner in self._owners(construction, module))

    def _owners(self, construction: cst.Call, module: Module) -> list[cst.ClassDef]:
        """The classes of the program that the model of a call may be of."""
        given = [
            a.value for a in construction.args if not a.star and (a.keyword is None or a.keyword.value == "module")
        ]
        return [owner for owner, _ in self.values.classes(given[0], module)] if given else []

    @functools.cached_property
    def called_on_models(self) -> set[int]:
        """Methods of sharded models' classes that are called on the models, by node."""
        found = set()
        for construction, module in self.calls:
            for owner in self._owners(construction, module):
                own = methods_of(owner)
                for where in self.modules:
                    for made in where.all(cst.Call):
                        called = made.func if isinstance(made.func, cst.Attribute) else None
                        if called and called.attr.value in own and self.is_model(called.value, where):
                            found.add(id(own[called.attr.value]))
        return found


def methods_of(owner: cst.ClassDef) -> dict[str, cst.FunctionDef]:
    return {s.name.value: s for s in owner.body.body if isinstance(s, cst.FunctionDef)}


def computing(owner: cst.ClassDef) -> list[str]:
    """A model's methods that compute with its parameters: those that call it or a part of it, or read a parameter.

    Of others, such as one that returns a configuration, an entry point mustn't be made: it would gather parameters,
    and whoever calls it on one rank alone would wait for the others.
    """
    methods = methods_of(owner)
    made = m.Call(func=m.Name("Parameter") | m.Attribute(attr=m.Name("Parameter")))
    parameters = {
        node.targets[0].target.attr.value
        for node in m.findall(owner, m.Assign(value=made))
        if isinstance(node, cst.Assign) and isinstance(node.targets[0].target, cst.Attribute)
    }

    def computes(name: str, seen: frozenset[str]) -> bool:
        function = methods[name]
        of_self = m.Attribute(value=m.Name("self"))
        for call in m.findall(function, m.Call(func=m.Name("self") | of_self)):
            assert isinstance(call, cst.Call)
            called = call.func.attr.value if isinstance(call.func, cst.Attribute) else "forward"
            if called in methods and called != "forward":
                if called not in seen and computes(called, seen | {called}):
                    return True
            elif called == "forward" or not hasattr(torch.nn.Module, called):
                return True
        looped = [
            loop.iter for loop in m.findall(function, m.For() | m.CompFor()) if isinstance(loop, (cst.For, cst.CompFor))
        ]
        # Over the parts of the model, most likely; who lists all parameters makes an optimizer of them, or counts.
        parts = [part for over in looped for part in m.findall(over, of_self)]
        if any(isinstance(part, cst.Attribute) and not hasattr(torch.nn.Module, part.attr.value) for part in parts):
            return True
        read = {node.attr.value for node in m.findall(function, of_self) if isinstance(node, cst.Attribute)}
        return bool(read & parameters)

    return [name for name in methods if computes(name, frozenset({name}))]
