"""MixedPrecision as MixedPrecisionPolicy, where a call says it itself; and what a model may hold."""

from __future__ import annotations

import re
from dataclasses import dataclass

import libcst as cst

from rewriter.bindings import Leaf
from rewriter.edits import Undecided, call
from rewriter.module import Module
from rewriter.symbols import BY_CODE
from rewriter.translate import FSDP, Rewriting, constant

FIELDS = (
    "param_dtype",
    "reduce_dtype",
    "buffer_dtype",
    "keep_low_precision_grads",
    "cast_forward_inputs",
    "cast_root_forward_inputs",
    "_module_classes_to_ignore",
)
# Words of models that have batch norm somewhere below: FSDP1 left it in full precision.
NORMED = re.compile(
    r"BatchNorm|batch_norm|torchvision\.models|timm|segmentation_models|resnet|hub\.load", re.IGNORECASE
)
# What registers buffers that may be of a floating-point dtype.
BUFFERED = re.compile(
    r"register_buffer|nn\.Buffer|BatchNorm|InstanceNorm|named_buffers|transformers|torchvision|timm|hub\.load"
)
LANGUAGE = re.compile(r"^\s*(from|import) (transformers|fms|flash_attn)\b", re.MULTILINE)


@dataclass
class Precision:
    """`policy`: the expression for mp_policy. `castless`: groups below the root don't cast their inputs, as in FSDP1.
    `buffers`: the expression for the dtype of buffers, or ""."""

    policy: str
    castless: bool
    buffers: str


def translate(
    rewriting: Rewriting, node: cst.BaseExpression, module: Module, wrapped: bool, model: cst.BaseExpression
) -> Precision | None:
    """The mixed_precision argument of a call that shards `model`. `wrapped`: the call has a wrapping policy.

    Raises Undecided for what only the model or the value, when it is there, can answer."""
    leaf = rewriting.known(node, module, "FA07")
    if leaf.kind == "none" or (
        isinstance(leaf.node, cst.Name) and leaf.node.value == "False"
    ):  # which FSDP1 took for None
        rewriting.drop(node, module)
        return None
    given = _fields(leaf)
    if "_module_classes_to_ignore" not in given and wrapped and _may_have_norms(rewriting, model, module):
        raise Undecided("FP07", "batch norm, which the model may have, stays in full precision", node, module)
    dtype = leaf.module.code(given["buffer_dtype"]) if "buffer_dtype" in given else "None"
    held = dtype != "None" and _may_have(BUFFERED, rewriting, model, module)
    inner = constant(given.get("cast_forward_inputs"), False)
    made = rewriting.inlined(node, module, lambda leaf: _policy(rewriting, leaf, given), "FA07")
    return Precision(made, inner is False and "param_dtype" in given, dtype if held else "")


def _fields(leaf: Leaf) -> dict[str, cst.BaseExpression]:
    """A MixedPrecision's arguments by name."""
    if leaf.kind != "call" or leaf.symbol != "MixedPrecision" or leaf.spread:
        raise Undecided("FA07", "what is passed isn't a MixedPrecision that is written out", leaf.node, leaf.module)
    named = {FIELDS[key] if isinstance(key, int) else key: value for key, value in leaf.args.items()}
    if unknown := set(named) - set(FIELDS):
        raise Undecided("FA07", f"MixedPrecision has no {min(unknown)}", leaf.node, leaf.module)
    return named


def _policy(rewriting: Rewriting, leaf: Leaf, given: dict[str, cst.BaseExpression]) -> str:
    rewriting.edits(leaf.module).need(FSDP, "MixedPrecisionPolicy")
    if constant(given.get("keep_low_precision_grads"), False) is not False:
        raise Undecided("FP04", BY_CODE["FP04"].note, given["keep_low_precision_grads"], leaf.module)
    if "_module_classes_to_ignore" in given:
        node = given["_module_classes_to_ignore"]
        if not (isinstance(node, cst.Tuple) and not node.elements):
            raise Undecided("FP07", "module classes are left out", node, leaf.module)
    text = {name: rewriting.code(node, leaf.module) for name, node in given.items()}
    param = text.get("param_dtype", "None")
    # FSDP1 reduces in param_dtype unless it is told; what FSDP2 does then depends on its version.
    reduce = text.get("reduce_dtype", "None")
    reduce = param if reduce == "None" else reduce
    parts = [f"{name}={value}" for name, value in (("param_dtype", param), ("reduce_dtype", reduce)) if value != "None"]
    root = constant(given.get("cast_root_forward_inputs"), True)
    inner = constant(given.get("cast_forward_inputs"), False)
    if root not in (True, False) or inner not in (True, False):
        raise Undecided("FP05", "whether inputs are cast is decided at run time", leaf.node, leaf.module)
    if not (root or inner):
        parts.append("cast_forward_inputs=False")
    return _with_comments(leaf, parts) or call("MixedPrecisionPolicy", parts)


def _with_comments(leaf: Leaf, parts: list[str]) -> str:
    """The policy with an argument a line and the comments that stood above each; "" if there were none."""
    module, node = leaf.module, leaf.node
    comments = module.comments(node)
    if not comments or not isinstance(node, cst.Call):
        return ""
    lines, done = [], module.span(node)[0]
    kept = {part.partition("=")[0]: part for part in parts}
    for place, arg in enumerate(node.args):
        name = arg.keyword.value if arg.keyword is not None else FIELDS[place]
        start, end = module.span(arg)
        if name in kept:
            lines += [value for at, value in comments if done <= at < start]
            lines.append(kept.pop(name) + ",")
        done = end
    lines += [part + "," for part in kept.values()]
    if not any(line.startswith("#") for line in lines):
        return ""
    return "MixedPrecisionPolicy(\n" + "".join(f"    {line}\n" for line in lines) + ")"


def _may_have_norms(rewriting: Rewriting, node: cst.BaseExpression, module: Module) -> bool:
    language = any(LANGUAGE.search(source.text) for source in rewriting.program.sources.values())
    return _may_have(NORMED, rewriting, node, module, but=language)


def _may_have(
    words: re.Pattern[str], rewriting: Rewriting, node: cst.BaseExpression, module: Module, but: bool = False
) -> bool:
    """Whether a model may hold something: it does where a word in the program says so, or where nothing is known of
    the model. `but`: what is known of the program speaks against it."""
    if any(words.search(source.text) for source in rewriting.program.sources.values()):
        return True
    return not but and any(not _plain(rewriting, leaf) for leaf in rewriting.values.leaves(node, module))


def _plain(rewriting: Rewriting, leaf: Leaf) -> bool:
    """Whether a model comes from the program's own classes, or from a library of language models."""
    if leaf.kind in ("class", "call", "none"):
        return True
    node, module = leaf.node, leaf.module
    while isinstance(node, (cst.Call, cst.Attribute)):
        names = [name for name, _ in module.qualified(node)]
        if any(name.startswith(("transformers.", "torch.nn.")) for name in names):
            return True
        inner = node.func if isinstance(node, cst.Call) else node.value  # model.to(device): what it is called on
        if "copy.deepcopy" in names and isinstance(node, cst.Call) and node.args:
            inner = node.args[0].value
        made = rewriting.values.leaves(inner, module) if isinstance(inner, (cst.Name, cst.Call)) else []
        if any(one.kind == "class" or (one.node is not node and _plain(rewriting, one)) for one in made):
            return True
        node = inner
    return False
