"""Statements of a program that something is a sharded model, or one that is made of such parts."""

from __future__ import annotations

import re

import libcst as cst

from migration.rewriter.module import Module, last_name
from migration.rewriter.names import in_annotation
from migration.rewriter.objects import MAYBE, MODEL, STATIC, THE_CLASS, Objects, Place, Value
from migration.rewriter.program import Program
from migration.rewriter.symbols import CLASS
from migration.rewriter.values import arguments

MAKE = {CLASS: THE_CLASS, "wrap": ("same", MAYBE)}  # what gives a model: wrap() within enable_wrap()


class Said(Objects):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._begins = False  # without FSDP1 nothing has to flow
        self._certain: set[int] = set()  # calls of FSDP1's class by a name of it

    @staticmethod
    def _place(node: cst.CSTNode, module: Module) -> str:
        return f"{module.path.name}:{module.line(node)}"

    def _static(self, node: cst.Call, name: str, module: Module) -> None:
        """The model that a static method of FSDP1's class is called with, and those that one gives."""
        origin, (args, _) = self._place(node, module), arguments(node)
        if name == "fsdp_modules":
            self._add(id(node), box := ("box", id(node)))
            self._full(box, origin)
        asked = args.get("model", args.get("module", args.get(STATIC[name])))
        loads = name == "optim_state_dict_to_load" and asked is not None and 1 in args
        if loads and asked is not None and re.search("optim|osd", module.code(asked)):
            asked = args[1]  # until torch 2.1 the model came second
        if isinstance(asked, cst.Name):
            if any(isinstance(binding.node, cst.Param) for binding in module.assignments(asked)):
                self._add(self._variable(asked, module), MODEL, origin)
        elif isinstance(asked, cst.Attribute) and not self._certain:
            self._add(given := ("given", id(node)), MODEL, origin)
            self._bind(asked, given, module)

    def _asked(self, node: cst.Call, asked: cst.BaseExpression, module: Module) -> None:
        """A name in code under `if isinstance(name, FSDP)`."""
        above = module.parent(node)
        if not isinstance(above, (cst.If, cst.IfExp)) or above.test is not node or not isinstance(asked, cst.Name):
            return
        for read in module.references(asked) if self._asks(node, asked.value, module) else ():
            inside = any(one is above.body for one in (read, *module.ancestors(read)))
            if isinstance(read, cst.Name) and inside and module.function(read) is module.function(node):
                self._reach(read, module, MODEL, self._place(node, module))

    def _said(self, annotation: cst.Annotation, end: Place, module: Module) -> None:
        """A variable is what its annotation says: `FSDP`, `Optional[FSDP]`, `"FSDP | None"`, a class of the program."""

        def then(value: Value, origin: str) -> None:
            if value == THE_CLASS or value[0] == "of":
                self._add(end, MAYBE if value == THE_CLASS else ("object", value[1]), origin)

        self._when(id(annotation.annotation), then)
        symbol = self.program.symbol
        if {last_name(one.value) for one in module.within(annotation, cst.Subscript)} <= {"Optional", "Union"}:
            for name in module.within(annotation, cst.Name, cst.Attribute, cst.SimpleString):
                if symbol(name, module) == CLASS or in_annotation(name, module, symbol):
                    self._begins = True
                    self._add(end, MODEL, self._place(name, module))

    @staticmethod
    def _is_around(owner: cst.ClassDef, module: Module) -> bool:
        """Return whether objects are models whose parameters are those of the parts that they are given."""
        model = any(module.code(base.value).endswith("Module") for base in owner.bases)
        return model and "self.module" not in module.code(owner)
