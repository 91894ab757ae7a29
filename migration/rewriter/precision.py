"""MixedPrecision as MixedPrecisionPolicy, where a call says it itself."""

from __future__ import annotations

import re
from dataclasses import dataclass

import libcst as cst

from migration.options import SECTIONS
from migration.rewriter.edits import Undecided, call
from migration.rewriter.module import Module
from migration.rewriter.rewriting import FSDP, Rewriting, constant
from migration.rewriter.symbols import BY_CODE

FIELDS = tuple(row.name.partition(".")[2] for row in SECTIONS["Mixed precision"])
# Words of models that have batch norm somewhere below, which FSDP1 leaves in full precision.
NORMED = re.compile(
    r"BatchNorm|batch_norm|torchvision\.models|timm|segmentation_models|resnet|hub\.load", re.IGNORECASE
)
# What registers buffers that may be of a floating-point dtype.
BUFFERED = re.compile(r"register_buffer|nn\.Buffer|Norm\dd|named_buffers|transformers|torchvision|timm|hub\.load")
OWN = re.compile(r"class \w+\(.*Module\)|import transformers|from transformers")  # models of which that is known


@dataclass
class Precision:
    """`policy`: the expression for mp_policy. `castless`: groups below the root don't cast their inputs, as in FSDP1.
    `buffers`: the expression for the dtype of buffers, or ""."""

    policy: str
    castless: bool
    buffers: str


def translate(rewriting: Rewriting, node: cst.BaseExpression, module: Module, wrapped: bool) -> Precision | None:
    """The mixed_precision argument of a call. `wrapped`: the call has a wrapping policy.

    Raises Undecided for what only the model or the value, when it is there, can answer."""
    leaf = rewriting.known(node, module, "FA07")
    if leaf.kind == "none":
        rewriting.drop(node, module)
        return None
    given = {FIELDS[key] if isinstance(key, int) else key: value for key, value in leaf.args.items()}
    if leaf.kind != "call" or leaf.symbol != "MixedPrecision" or leaf.spread or not set(given) <= set(FIELDS):
        raise Undecided("FA07", "what is passed isn't a MixedPrecision that is written out", node, module)
    if constant(given.get("keep_low_precision_grads"), False) is not False:
        raise Undecided("FP04", BY_CODE["FP04"].note, given["keep_low_precision_grads"], module)
    root = constant(given.get("cast_root_forward_inputs"), True)
    inner = constant(given.get("cast_forward_inputs"), False)
    if root is not True or inner is not False:
        raise Undecided("FP05", "which inputs are cast isn't FSDP1's default", node, module)
    text = {name: rewriting.code(value, module) for name, value in given.items()}
    normed = _mentions(rewriting, NORMED) or not _mentions(rewriting, OWN) or "_module_classes_to_ignore" in given
    if wrapped and normed and text.get("_module_classes_to_ignore") != "()":
        raise Undecided("FP07", "batch norm, which the model may have, stays in full precision", node, module)
    rewriting.drop(node, module)
    rewriting.edits(module).need(FSDP, "MixedPrecisionPolicy")
    param, reduce = text.get("param_dtype", "None"), text.get("reduce_dtype", "None")
    # FSDP1 reduces in param_dtype unless it is told; what FSDP2 does then depends on its version.
    reduce = param if reduce == "None" else reduce
    parts = [f"{name}={value}" for name, value in (("param_dtype", param), ("reduce_dtype", reduce)) if value != "None"]
    dtype = text.get("buffer_dtype", "None")
    buffers = dtype if dtype != "None" and _mentions(rewriting, BUFFERED) else ""
    return Precision(call("MixedPrecisionPolicy", parts), "param_dtype" in given, buffers)


def _mentions(rewriting: Rewriting, words: re.Pattern[str]) -> bool:
    return any(words.search(source.text) for source in rewriting.program.sources.values())
