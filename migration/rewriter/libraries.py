"""Libraries that shard a model, by FSDP1 or FSDP2: accelerate, transformers' Trainer, Lightning, Composer."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migration.rewriter.module import Module, last_name
from migration.rewriter.program import PLUGIN, Program
from migration.rewriter.values import string

LIBRARY = re.compile(r"^\s*(?:from|import) (accelerate|lightning|pytorch_lightning|composer)\b", re.MULTILINE)
HOW = (
    "a library shards the model, by FSDP1 or FSDP2 as its configuration says: move that first, and give its file "
    "together with this one"
)
GONE = ("backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states")
CODES = ("FC38", "FC39")  # what a library is told, which is to decide beside its own switch


def imported(program: Program, modules: list[Module]) -> set[str]:
    """The libraries that these files import and that aren't the program itself."""
    found = {name for module in modules for name in LIBRARY.findall(module.text)}
    return {name for name in found if not any(program.file_of(name, module) for module in modules)}


def told(program: Program, calls: bool, module: Module, node: cst.Call) -> Iterator[tuple[str, cst.CSTNode, str]]:
    """The rows about a call by which a library gets a model or is told how to shard it, with the place, and its words.
    `calls`: the program makes models of FSDP1 itself, so that accelerate may have other uses."""
    name = last_name(node.func) or ""
    given = {arg.keyword.value: arg for arg in node.args if arg.keyword is not None}
    if name.endswith("TrainingArguments"):
        keys = [key for key in ("fsdp", "fsdp_config") if _legacy(program, module, given, key)]
        yield from [("FC39", given[key], "") for key in keys[:1]]
    elif name in ("Trainer", "Fabric") and "strategy" in given:
        if (string(given["strategy"].value) or "").startswith("fsdp"):
            yield "FC21", node, ""
    elif name == PLUGIN and program.by_fsdp2([module]):
        rows = {**dict.fromkeys(GONE, "FY03"), "sharding_strategy": "FY02"}
        yield from [(code, given[key], f"{key}: ") for key, code in rows.items() if key in given]
    elif name == "prepare" and (not calls or "accelerate" in program.configured) and _alone(module, node):
        yield "FC38", node, ""


def _legacy(program: Program, module: Module, given: dict[str, cst.Arg], key: str) -> bool:
    """Return whether a Trainer is told to use FSDP in the words of FSDP1, or without a version that says which."""
    code = {name: module.code(arg.value) for name, arg in given.items()}
    if key not in code or {"None", "False", "''", '""', "[]"} & {code[key], code.get("fsdp", "")}:
        return False
    config = code.get("fsdp_config", "")
    ours = re.search(r"version[\"']?\s*[:=]\s*2\b", config) or (
        "fsdp_config" in given and string(given["fsdp_config"].value) and program.configured.get("transformers")
    )
    return not (code.get("fsdp") == "True" and ours)


def _alone(module: Module, node: cst.Call) -> bool:
    """Return whether accelerate gets a model without its optimizer, the other way round, or two models at once."""
    models, steps, unknown = list[str](), list[str](), list[str]()  # of which the last may be any
    for arg in node.args:
        code = module.code(arg.value)
        has = [re.search(rf"\b{re.escape(code)}\.{method}\(", module.text) for method in ("parameters", "zero_grad")]
        if "optim" in code.lower() or (has[1] and not has[0]):
            steps.append(code)
        elif isinstance(arg.value, cst.Call) or arg.star:
            unknown.append(code)
        elif has[0] or "model" in code.lower():
            models.append(code)
    apart = not unknown and bool(models) != bool(steps)
    return "accelerate" in module.text and (apart or len(models) > 1)
