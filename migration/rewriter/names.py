"""Reads of FSDP1's names, under whatever other name, and the ways of its class from one place to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import libcst as cst

from migration.rewriter.module import Module
from migration.rewriter.scopes import WORD
from migration.rewriter.symbols import CLASS, canonical, row_of
from migration.rewriter.values import string

SymbolOf = Callable[[cst.CSTNode, Module], str | None]


def code_of(symbol: str, node: cst.CSTNode, module: Module, symbol_of: SymbolOf) -> str:
    """The row that a use of FSDP1's name is about."""
    if symbol.startswith("private:"):
        return "FC33" if symbol.endswith("_runtime_utils._reshard") else "FC06"
    if code := {"library": "FC21", "fairscale": "FC22", "module": "FX07"}.get(symbol.partition(":")[0]):
        return code
    if symbol == CLASS:
        above = module.parent(node)
        if isinstance(above, cst.Call) and above.func is node:
            return "FA01"
        if isinstance(above, cst.Arg) and isinstance(module.parent(above), cst.ClassDef):
            return "FC05"
        if module.enclosing(node, cst.Annotation) is not None:
            return "FC03"
        call = module.parent(above) if isinstance(above, cst.Arg) else None
        if isinstance(call, cst.Call) and module.code(call.func) in ("isinstance", "issubclass"):
            return "FC02"
        if isinstance(node, cst.SimpleString) or compared(module.parent(above) if above else None, module, symbol_of):
            return "FC02"
        return "FC04"
    row = row_of(symbol)
    if row is not None:
        return row.code
    head = symbol.partition(".")[0]
    whole = {"ShardingStrategy": "FA03", "MixedPrecision": "FA07", "CPUOffload": "FA04", "BackwardPrefetch": "FA06",
             "StateDictType": "FM07", "OptimStateKeyType": "FD19", "StateDictSettings": "FD16"}  # fmt: skip
    if head in whole:
        return whole[head]
    if head.endswith("Config"):
        return "FM07"
    return "FA05" if "policy" in head.lower() else "FC06"


def compared(node: cst.CSTNode | None, module: Module, symbol_of: SymbolOf) -> cst.BaseExpression | None:
    """The model in `type(model) is FSDP` and `type(model).__name__ == "FullyShardedDataParallel"`."""
    if not isinstance(node, cst.Comparison) or len(node.comparisons) != 1:
        return None
    other, asked = node.comparisons[0].comparator, node.left
    if string(other) == CLASS and isinstance(asked, cst.Attribute) and asked.attr.value in ("__name__", "__qualname__"):
        asked = asked.value
    elif symbol_of(other, module) != CLASS:
        return None
    if isinstance(asked, cst.Attribute) and asked.attr.value == "__class__":
        return asked.value
    own = isinstance(asked, cst.Call) and module.code(asked.func) == "type" and len(asked.args) == 1
    return asked.args[0].value if isinstance(asked, cst.Call) and own else None


HOW = {
    cst.DictElement: "a dictionary holds the class, and something else chooses from it",
    cst.Element: "a list or a tuple holds the class, and something else takes it from there",
    cst.Return: "a function returns the class, and whoever calls it may call that",
    cst.Param: "the class is the default of a parameter, for which a caller may give another",
    cst.Lambda: "a function returns the class, and whoever calls it may call that",
    cst.AnnAssign: "a field holds the class, and something else reads it",
    cst.IfExp: "it is FSDP1's class or something else, as a condition says",
    cst.BooleanOperation: "it is FSDP1's class or something else, as a condition says",
    cst.Comparison: "the class is compared: isinstance(model, FSDPModule) says it of FSDP2's models",
}


def how_it_travels(node: cst.CSTNode, module: Module) -> str:
    """The way of a value, for a reader who has to change it by hand."""
    line = module.line(node)
    for above in module.ancestors(node):
        if isinstance(above, cst.Arg) and isinstance(call := module.parent(above), cst.Call):
            return f"{module.code(call.func)} in line {line} gets the class, and may call it or ask for instances of it"
        if isinstance(above, cst.Attribute):
            return f"its {above.attr.value} is asked for"
        if isinstance(above, cst.Assign):
            shown = ", ".join(module.code(target.target) for target in above.targets)
            return f"{shown} holds the class from line {line} on, and is read in a way that isn't followed"
        if type(above) in HOW:
            return HOW[type(above)]
    return f"it is read in line {line} in a way that isn't followed"


def in_annotation(node: cst.SimpleString, module: Module, symbol_of: SymbolOf) -> str:
    """The name of the class in an annotation that is a string."""
    if module.enclosing(node, cst.Annotation) is None:
        return ""
    for word in WORD.findall(string(node) or ""):
        for binding in module.scope(node).find(word):
            known = next((read for read in binding.references if isinstance(read, cst.Name)), None)
            if canonical(binding.imported) == CLASS or (known is not None and symbol_of(known, module) == CLASS):
                return str(word)
    return ""


def uses(module: Module, symbol_of: SymbolOf) -> list[tuple[Any, str]]:
    """Every read of a name of FSDP1, the longest expression that is one, with its canonical name."""
    found = []
    holders = [module.parent(held) for held in module.named(cst.Attribute, "__dict__")]
    looked_up = (*module.named(cst.Call, "getattr"), *module.named(cst.Call, "import_module"), *holders)
    for text in module.all(cst.SimpleString):
        if in_annotation(text, module, symbol_of) or (string(text) == CLASS and compared(
            module.parent(module.parent(text) or text), module, symbol_of
        )):  # fmt: skip
            found.append((text, CLASS))
    for node in (*module.all(cst.Name, cst.Attribute), *looked_up):
        above = module.parent(node)
        if isinstance(above, cst.Attribute) and (above.attr is node or symbol_of(above, module) is not None):
            continue
        if (
            isinstance(above, (cst.ImportAlias, cst.ImportFrom, cst.AsName, cst.Import))
            or getattr(above, "name", None) is node
        ):
            continue
        if node is None or (isinstance(node, cst.Attribute) and node.attr.value == "__dict__"):
            continue
        if isinstance(above, cst.Arg) and above.keyword is node:
            continue
        if isinstance(above, (cst.AssignTarget, cst.FunctionDef, cst.ClassDef)):
            continue
        if _in_import(node, module):
            continue
        symbol = symbol_of(node, module)
        if symbol is not None:
            found.append((node, symbol))
    return found


def _in_import(node: cst.CSTNode, module: Module) -> bool:
    above = module.parent(node)
    while isinstance(above, (cst.Attribute, cst.ImportAlias)):
        if isinstance(above, cst.ImportAlias):
            return True
        above = module.parent(above)
    return isinstance(above, (cst.Import, cst.ImportFrom))
