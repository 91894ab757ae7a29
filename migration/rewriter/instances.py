"""FSDP1's class where it is only asked about: isinstance, annotations, comparisons of types."""

from __future__ import annotations

import re

import libcst as cst

from migration.rewriter.module import Module
from migration.rewriter.names import compared, in_annotation
from migration.rewriter.rewriting import FSDP
from migration.rewriter.scene import Scene
from migration.rewriter.symbols import CLASS


def move(scene: Scene, module: Module) -> None:
    for node in module.all(cst.Name, cst.Attribute):
        _class(scene, module, node)
    compare(scene, module)
    for text in module.all(cst.SimpleString):
        if word := in_annotation(text, module, scene.symbol):
            edits = scene.edits(module)
            edits.need(FSDP, "FSDPModule")
            edits.replace(module.span(text), re.sub(rf"\b{word}\b", "FSDPModule", module.code(text)))


def _class(scene: Scene, module: Module, node: cst.Name | cst.Attribute) -> None:
    """FSDP1's class, and that of its precision, in isinstance and in annotations."""
    above = module.parent(node)
    if isinstance(above, (cst.Attribute, cst.ImportAlias, cst.ImportFrom)):
        return
    symbol = scene.symbol(node, module)
    if symbol != CLASS and not (symbol == "MixedPrecision" and scene.calls):
        return
    checked = False
    for outer in module.ancestors(node):
        if isinstance(outer, cst.Annotation):
            checked = True
            break
        if isinstance(outer, cst.Call):
            checked = module.code(outer.func) in ("isinstance", "issubclass") and node is not outer.func
            break
        if not isinstance(outer, (cst.Arg, cst.Tuple, cst.Element, cst.Subscript, cst.SubscriptElement, cst.Index,
                                  cst.BinaryOperation)):  # fmt: skip
            break
    if checked:
        edits = scene.edits(module)
        name = "FSDPModule" if symbol == CLASS else "MixedPrecisionPolicy"
        edits.need(FSDP, name)
        edits.replace(module.span(node), name)


def compare(scene: Scene, module: Module) -> None:
    """`type(model) is FSDP`, in whatever words: the class of a sharded model is its own, and an FSDPModule."""
    for node in module.all(cst.Comparison):
        _compared(scene, module, node)


def _compared(scene: Scene, module: Module, node: cst.Comparison) -> None:
    model = compared(node, module, scene.symbol)
    operator = node.comparisons[0].operator
    if model is not None and isinstance(operator, (cst.Is, cst.IsNot, cst.Equal, cst.NotEqual)):
        edits = scene.edits(module)
        edits.need(FSDP, "FSDPModule")
        differs = "not " if isinstance(operator, (cst.IsNot, cst.NotEqual)) else ""
        edits.replace(module.span(node), f"{differs}isinstance({edits.code(model)}, FSDPModule)")
