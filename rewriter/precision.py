"""MixedPrecision as MixedPrecisionPolicy, and what FSDP1 did beside it: buffers, batch norm, inputs of blocks."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass

import libcst as cst

from rewriter.bindings import Leaf
from rewriter.edits import Undecided, call
from rewriter.module import Module
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
NORM = "torch.nn.modules.batchnorm._BatchNorm"


@dataclass
class Precision:
    """What a mixed_precision argument becomes.

    Attributes:
        policy: the expression for mp_policy.
        castless: groups below the root don't cast their inputs, as in FSDP1.
        by_policy: some policies cast the inputs of groups below the root and some don't: each says it.
        buffers: the expression for the dtype of buffers; "" if they stay as they are.
        norms: batch norm needs groups of its own.
        maybe: the policy may be one without a dtype.
    """

    policy: str
    castless: bool
    by_policy: bool
    buffers: str
    norms: bool
    maybe: bool


def fields(leaf: Leaf) -> dict[str, cst.BaseExpression]:
    """A MixedPrecision's arguments by name."""
    if leaf.kind != "call" or leaf.symbol != "MixedPrecision" or leaf.spread:
        raise Undecided("FA07", "what is passed isn't a MixedPrecision that is written out", leaf.node, leaf.module)
    named = {FIELDS[key] if isinstance(key, int) else key: value for key, value in leaf.args.items()}
    if unknown := set(named) - set(FIELDS):
        raise Undecided("FA07", f"MixedPrecision has no {min(unknown)}", leaf.node, leaf.module)
    return named


def policy(rewriting: Rewriting, leaf: Leaf, by_policy: bool = False) -> str:
    """MixedPrecisionPolicy for a leaf. `by_policy`: it says of groups below the root whether they cast inputs."""
    edits = rewriting.edits(leaf.module)
    if leaf.kind == "none":
        return "None"
    edits.need(FSDP, "MixedPrecisionPolicy")
    given = fields(leaf)
    if constant(given.get("keep_low_precision_grads"), False) is not False:
        raise Undecided("FP04", "low-precision gradients", given["keep_low_precision_grads"], leaf.module)
    if "_module_classes_to_ignore" in given:
        node = given["_module_classes_to_ignore"]
        if not (isinstance(node, cst.Tuple) and not node.elements):
            raise Undecided("FP07", "module classes are left out", node, leaf.module)
    text = {name: rewriting.code(node, leaf.module) for name, node in given.items()}
    parts = []
    param = text.get("param_dtype", "None")
    # FSDP1 reduces in param_dtype where nothing is said; what FSDP2 does then depends on its version.
    reduce = text.get("reduce_dtype", "None")
    if reduce == "None":
        reduce = param
    if param != "None":
        parts.append(f"param_dtype={param}")
    if reduce != "None":
        parts.append(f"reduce_dtype={reduce}")
    root, inner = (
        constant(given.get(name), default)
        for name, default in (("cast_root_forward_inputs", True), ("cast_forward_inputs", False))
    )
    if inner is False and (root is False or by_policy):
        parts.append("cast_forward_inputs=False")
    elif root not in (True, False) or inner not in (True, False):
        node = given["cast_forward_inputs" if inner not in (True, False) else "cast_root_forward_inputs"]
        raise Undecided("FP05", "whether inputs are cast is decided at run time", node, leaf.module)
    return _with_comments(leaf, parts) or call("MixedPrecisionPolicy", parts)


def move_unread(rewriting: Rewriting) -> None:
    """MixedPrecision constants that the program doesn't read: one of several presets, to be chosen by hand."""
    modules = rewriting.program.parsed
    for module in modules:
        for made in module.all(cst.Call):
            above = module.parent(made)
            target = above.targets[0].target if isinstance(above, cst.Assign) and len(above.targets) == 1 else None
            if not isinstance(target, cst.Name) or rewriting.program.symbol(made.func, module) != "MixedPrecision":
                continue
            names = [n for other in modules for n in other.all(cst.Name) if n.value == target.value]
            leaves = rewriting.values.leaves(made, module)
            if len(names) == 1 and len(leaves) == 1 and not rewriting.edits(module).covers(made):
                with contextlib.suppress(Undecided):  # then it is left, and marked as what nothing has moved
                    rewriting.edits(module).replace(module.span(made), policy(rewriting, leaves[0]))


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
    indent = module.indent(node)
    return "MixedPrecisionPolicy(\n" + "".join(f"{indent}    {line}\n" for line in lines) + indent + ")"


def translate(
    rewriting: Rewriting, node: cst.BaseExpression, module: Module, wrapped: bool, model: cst.BaseExpression
) -> Precision:
    """The mixed_precision argument of a call that shards `model`. `wrapped`: the call has a wrapping policy."""
    leaves = rewriting.values.leaves(node, module)
    if any(leaf.kind == "unknown" for leaf in leaves):
        some = []  # which in_place says
    else:
        some = [fields(leaf) for leaf in leaves if leaf.kind != "none"]
    casting = {constant(g.get("cast_forward_inputs"), False) for g in some if "param_dtype" in g}
    by_policy = casting == {True, False}
    for leaf in leaves:
        if rewriting.casting.setdefault(id(leaf.node), by_policy) != by_policy:
            why = "another call has a policy that casts inputs of blocks otherwise among its own, this one hasn't"
            raise Undecided("FP05", why, node, module)
    made = rewriting.in_place(node, module, lambda leaf: policy(rewriting, leaf, by_policy), "FA07")
    if not some:
        return Precision("", False, False, "", False, False)
    maybe = any(leaf.kind == "none" for leaf in leaves)
    ignoring = not all("_module_classes_to_ignore" in given for given in some)
    held = _may_have(BUFFERED, rewriting, model, module)
    return Precision(
        policy=made,
        castless=casting == {False},
        by_policy=by_policy,
        buffers=_buffers(leaves, node, module, rewriting) if held else "",
        norms=wrapped and ignoring and _may_have_norms(rewriting, model, module),
        maybe=maybe or not all(_written(leaf) for leaf in leaves if leaf.kind != "none"),
    )


def _written(leaf: Leaf) -> bool:
    """Whether the dtype of parameters is written out, so that it is surely one."""
    node = fields(leaf).get("param_dtype")
    return node is not None and leaf.module.code(node).startswith("torch.")


def _buffers(leaves: list[Leaf], node: cst.BaseExpression, module: Module, rewriting: Rewriting) -> str:
    """ "" (none), "param" (whatever that dtype is), or one that is written out where the call sees it."""
    said, written = set(), set()
    for leaf in leaves:
        given = fields(leaf) if leaf.kind != "none" else {}
        text = leaf.module.code(given["buffer_dtype"]) if "buffer_dtype" in given else "None"
        param = leaf.module.code(given["param_dtype"]) if "param_dtype" in given else "None"
        if leaf.kind != "none":
            said.add("" if text == "None" else "param" if text == param else text)
            written.add(text)
    if len(said) == 1 and (said <= {"", "param"} or rewriting.only(node, module) is not None):
        return said.pop()
    # The same dtype wherever there is one, and the policy tells whether there is: the call can say it.
    if len(written) == 1 and all(leaf.kind == "none" or _written(leaf) for leaf in leaves):
        (text,) = written
        if re.fullmatch(r"torch\.\w+", text):
            return text
    raise Undecided("FP03", "buffers have different dtypes on different paths", node, module)


def _may_have_norms(rewriting: Rewriting, node: cst.BaseExpression, module: Module) -> bool:
    """Whether a model may hold batch norm."""
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
        if "copy.deepcopy" in names and isinstance(node, cst.Call) and node.args:
            return all(_plain(rewriting, below) for below in rewriting.values.leaves(node.args[0].value, module))
        if isinstance(node, cst.Call):
            for made in rewriting.values.leaves(node.func, module) if isinstance(node.func, cst.Name) else []:
                if made.kind == "class":
                    return True
            node = node.func
        else:  # model.to(device), Model(…).cuda(): what the method is called on
            if any(_plain(rewriting, below) for below in rewriting.values.leaves(node.value, module)):
                return True
            node = node.value
    if isinstance(node, cst.Name):
        return any(name.startswith(("transformers.", "torch.nn.")) for name, _ in module.qualified(node))
    return False
