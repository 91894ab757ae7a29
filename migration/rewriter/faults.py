"""Faults of FSDP1 that a program may have met: what it becomes is right, and has other losses for that reason."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migration.rewriter import methods
from migration.rewriter.module import Module, last_name
from migration.rewriter.names import uses
from migration.rewriter.objects import MAYBE
from migration.rewriter.scene import Scene
from migration.rewriter.symbols import CLASS

KEPT = re.compile(r"SHARD_GRAD_OP|_HYBRID_SHARD_ZERO2")
OWN_PARAMETERS = re.compile(r"use_orig_params[\"']?\s*[=:]\s*(?!False)")
HYBRID = ("ShardingStrategy.HYBRID_SHARD", "ShardingStrategy._HYBRID_SHARD_ZERO2")
OF_OPTIMIZER = (f"{CLASS}.optim_state_dict", f"{CLASS}.full_optim_state_dict")
SHARDED, FULL = re.compile(r"SHARDED_STATE_DICT"), re.compile(r"FULL_STATE_DICT|full_optim_state_dict")
LOOKED_UP = re.compile(r"ShardingStrategy[\[(]|getattr\(\w*\.?ShardingStrategy")
ON_CPU = re.compile(r"device\([\"']cpu|device_id=[\"']cpu|[\"']gloo[\"']")

CLEARED = (
    "between forward and backward FSDP1's zero_grad() of the model clears nothing with SHARD_GRAD_OP and "
    "use_orig_params=True: each gradient is added to those of all steps before"
)
REPLICAS = (
    "where a shard group is one rank, as on a mesh (N, 1) or on nodes with one device, FSDP1 never synchronises the "
    "replicas"
)
CHOSEN = f"the strategy is chosen at run time; if it is HYBRID_SHARD (FS04): {REPLICAS}"
MOMENTS = (
    "a full state of the optimizer that FSDP1 gathers on a CPU, with use_orig_params=True, has one tensor for both "
    "moments, unless offload_to_cpu=False: what resumes from it goes on wrongly"
)
EVALUATED = (
    "the outermost unit of a model whose values are changed by hand between evaluations, as those of an average, "
    "computes with its earlier values, and its checkpoints have them"
)
ONLY_EVALUATED = re.compile(r"\.eval\(\)|requires_grad_\(False\)")


def suspected(scene: Scene, modules: list[Module]) -> Iterator[tuple[cst.CSTNode, Module, str]]:
    """List each place with the fault, one for each kind in a file."""

    def said(words: re.Pattern[str]) -> bool:
        return any(words.search(module.text) for module in modules)

    # Whose state is gathered, as it is unless the program says otherwise, and not for a model alone.
    full = any(FULL.search(_beside_models(scene, module)) for module in modules) or not said(SHARDED)
    for module in modules:
        found: dict[str, cst.CSTNode] = {}

        def around(node: cst.CSTNode, module: Module = module) -> list[str]:
            """The statement, and each `with` and function that it stands in."""
            above = [one for one in module.ancestors(node) if isinstance(one, cst.With | cst.FunctionDef)]
            return [module.code(one) for one in (module.statement(node) or node, *above)]

        for node in module.all(cst.Call) if said(KEPT) and said(OWN_PARAMETERS) else ():
            called = node.func
            if isinstance(called, cst.Attribute) and last_name(called) == "zero_grad":
                model = called.value
                ours = scene.is_model(model, module) or scene.flow.may_be(model, MAYBE)
                if ours and methods.between(module, node, model):
                    found.setdefault(CLEARED, node)
        for node, symbol in uses(module, scene.symbol):
            if symbol in HYBRID or (symbol == "ShardingStrategy" and LOOKED_UP.search(around(node)[0])):
                found.setdefault(REPLICAS if symbol in HYBRID else CHOSEN, node)
            elif symbol in OF_OPTIMIZER and said(OWN_PARAMETERS) and said(ON_CPU):
                kinds = [text for text in around(node) if FULL.search(text) or SHARDED.search(text)]
                if FULL.search(kinds[0]) if kinds else full:
                    found.setdefault(MOMENTS, node)
        for changed in scene.rewriting.account:
            if changed.code == "FC27" and changed.module is module and said(ONLY_EVALUATED):
                found.setdefault(EVALUATED, changed.node)
        yield from ((node, module, why) for why, node in found.items())


def _beside_models(scene: Scene, module: Module) -> str:
    """A file's text without `with` statements in which nothing of an optimizer or of the program's own is called."""
    text = module.text
    for block in module.all(cst.With):
        called = [made.func for made in module.within(block.body, cst.Call)]
        if not any("optim" in module.code(one) or scene.flow.functions(one) for one in called):
            text = text.replace(module.code(block), "")
    return text
