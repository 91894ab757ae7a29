"""enable_wrap() and wrap() spelled out, in FSDP1's own terms, before anything is moved.

A wrap() within the block is a call of FSDP1's class with the block's arguments. One elsewhere, in a model's
`__init__` most likely, shards while the model is built, which FSDP2 doesn't: there a module is marked, and the call
that shards the whole gets a policy that chooses what is marked. Either way the units are the same.
"""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path

import libcst as cst

from rewriter.bindings import arguments
from rewriter.blocks import can_unwrap, unwrap
from rewriter.edits import Edits, call
from rewriter.helpers import HELPERS
from rewriter.imports import tidy
from rewriter.module import Module
from rewriter.program import Program
from rewriter.source import Source
from rewriter.symbols import CLASS
from rewriter.values import Values, dictionary

POLICY = 'auto_wrap_policy=CustomPolicy(lambda module: hasattr(module, "own_group"))'


class _Unclear(Exception):
    """A use that isn't one of those that can be spelled out."""


class _Block:
    """`with enable_wrap(wrapper_cls=FSDP, …):` and the wrap() calls that stand in it."""

    def __init__(self, program: Program, module: Module, opened: cst.With, made: cst.Call) -> None:
        self.module, self.opened = module, opened
        given, spread = arguments(made)
        wrapper = given.pop("wrapper_cls", None) or given.pop(0, None)
        self.entry: tuple[int, int] | None = None
        if wrapper is None:
            wrapper, self.entry = _in_dictionary(program, module, made)
        if wrapper is None or program.symbol(wrapper, module) != CLASS or any(isinstance(key, int) for key in given):
            raise _Unclear
        if {"auto_wrap_policy", "fsdp_auto_wrap_policy"} & set(given):
            raise _Unclear
        self.item = next(item for item in opened.items if item.item is made)
        self.wrapper = module.code(wrapper)
        self.options = [module.code(arg).rstrip(", \n") for arg in made.args if arg.value is not wrapper]
        self.spread = spread

    def holds(self, node: cst.CSTNode) -> bool:
        inner = self.module.enclosing(node, cst.FunctionDef, cst.Lambda)
        outer = self.module.enclosing(self.opened, cst.FunctionDef, cst.Lambda)
        return inner is outer and any(above is self.opened for above in self.module.ancestors(node))


def _in_dictionary(program: Program, module: Module, made: cst.Call) -> tuple[cst.BaseExpression, tuple[int, int]]:
    """The wrapper_cls in a dictionary that is spread and nothing else reads, and the place of its entry there."""
    for arg in made.args:
        if arg.star != "**" or not isinstance(arg.value, cst.Name):
            continue
        found = Values(program).written(arg.value, module)
        reads = [read for read in module.references(arg.value) if not isinstance(module.parent(read), cst.Arg)]
        if len(found) != 1 or found[0][1] is not module or reads:
            continue
        written = found[0][0]
        elements = written.elements if isinstance(written, cst.Dict) else getattr(written, "args", ())
        for (key, value), element, after in zip(
            dictionary(written) or (), elements, [*elements[1:], None], strict=False
        ):
            if key == "wrapper_cls":
                start = module.span(element)[0]
                return value, (start, module.span(after)[0] if after is not None else module.span(element)[1])
    raise _Unclear


def spelled_out(program: Program) -> dict[Path, Source]:
    """Files of the program without enable_wrap() and wrap(), by their paths; none if there is nothing to spell out, or
    something that can't be."""
    modules = [module for module in program.relevant() if "wrap" in module.text]
    try:
        return _Spelling(program, modules).made
    except _Unclear:
        return {}


class _Spelling:
    def __init__(self, program: Program, modules: list[Module]) -> None:
        self.program, self.modules = program, modules
        self.blocks = [block for module in modules for block in self._blocks(module)]
        if not self.blocks:
            raise _Unclear
        calls = [
            (node, module) for module in modules for node in module.all(cst.Call) if self._is(node, module, "wrap")
        ]
        self.within = {id(node): block for node, module in calls if (block := self._block(node, module)) is not None}
        self.marked = [(node, module) for node, module in calls if id(node) not in self.within]
        if any(module.source.notebook is not None for _, module in calls):
            raise _Unclear  # whose cells would be moved against one another
        self.edits = {id(module): Edits(module) for module in modules}
        if self.marked:
            self._mark()
        for node, module in calls:
            if id(node) in self.within:
                self._construct(node, module, self.within[id(node)])
        for block in self.blocks:
            self._open(block)
        self.made = {
            module.path.resolve(): self._source(module) for module in modules if self.edits[id(module)].changed
        }

    def _is(self, node: cst.Call, module: Module, name: str) -> bool:
        return self.program.symbol(node.func, module) == name

    def _blocks(self, module: Module) -> list[_Block]:
        found = []
        for node in module.all(cst.Call):
            if self._is(node, module, "enable_wrap"):
                item = module.parent(node)
                opened = module.parent(item) if isinstance(item, cst.WithItem) else None
                if not isinstance(opened, cst.With) or not isinstance(opened.body, cst.IndentedBlock):
                    raise _Unclear  # a context manager that is made in one place and opened in another
                found.append(_Block(self.program, module, opened, node))
        return found

    def _block(self, node: cst.Call, module: Module) -> _Block | None:
        return next((block for block in self.blocks if block.module is module and block.holds(node)), None)

    def _mark(self) -> None:
        """Marks are read by the calls in a block that shard a model; there has to be one in each."""
        text = "\n".join(module.text for module in self.program.parsed)
        if "own_group" in text or ("BatchNorm" in text and "mixed_precision" in text):
            # By hand FSDP1 lowers batch norm's precision too; with a policy it leaves batch norm alone.
            raise _Unclear
        rooted = {id(block) for block in self.within.values()}
        if any(id(block) not in rooted for block in self.blocks):
            raise _Unclear
        for node, module in self.marked:
            given, spread = arguments(node)
            if spread or set(given) - {0, "module"}:
                raise _Unclear  # arguments that this unit alone has
            edits = self.edits[id(module)]
            edits.replace(module.span(node.func), "own_group")
            edits.helpers["own_group"] = HELPERS["own_group"]

    def _construct(self, node: cst.Call, module: Module, block: _Block) -> None:
        given, spread = arguments(node)
        if spread or (0 not in given and "module" not in given):
            raise _Unclear
        own = {key for key in given if isinstance(key, str) and key != "module"}
        if own and block.spread:
            raise _Unclear  # which of the two is meant, only the dictionary knows
        edits = self.edits[id(module)]
        options = [text for text in block.options if text.partition("=")[0].strip() not in own]
        if self.marked and "auto_wrap_policy" in own:
            raise _Unclear
        if self.marked and not self._single(given.get(0, given.get("module")), module):
            options.insert(0, POLICY)
            edits.need("torch.distributed.fsdp.wrap", "CustomPolicy")

        def spelled() -> str:
            made = call(block.wrapper, [*(edits.code(arg).rstrip(", \n") for arg in node.args), *options])
            return textwrap.indent(made, module.indent(node)).lstrip()

        edits.replace(module.span(node), spelled)

    @staticmethod
    def _single(node: cst.BaseExpression | None, module: Module) -> bool:
        """Whether this makes one of torch's own layers, in which nothing is marked."""
        if not isinstance(node, cst.Call) or len(module.within(node, cst.Call)) > 1:
            return False
        names = [name for name, _ in module.qualified(node.func)]
        holders = ("Sequential", "ModuleList", "ModuleDict")
        return any(name.startswith("torch.nn.") and not name.endswith(holders) for name in names)

    def _open(self, block: _Block) -> None:
        """The block's lines, without the block."""
        module, opened = block.module, block.opened
        if block.entry is not None:
            self.edits[id(module)].replace(block.entry, "")
        if not can_unwrap(module, opened):
            raise _Unclear
        unwrap(self.edits[id(module)], opened, block.item)

    def _source(self, module: Module) -> Source:
        edits = self.edits[id(module)]
        text = tidy(edits, edits.render((0, len(module.text))), set())
        return dataclasses.replace(module.source, text=text)
