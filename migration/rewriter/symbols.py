"""The names of FSDP1: how a qualified name is recognised, and which row of the table is about it."""

from __future__ import annotations

import re

from migration.options import CLASS, TABLE, Row

ROWS: dict[str, Row] = {row.name: row for row in TABLE}
BY_CODE: dict[str, Row] = {row.code: row for row in TABLE}

PACKAGE = "torch.distributed.fsdp"
PREFIX = "_fsdp_wrapped_module"
CHECKPOINTING = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"

# What torch.distributed.fsdp and its modules export of FSDP1, by the name that it has there.
ENUMS = ("ShardingStrategy", "BackwardPrefetch", "StateDictType", "OptimStateKeyType")
CONFIGS = {head for row in TABLE if re.search(r"StateDict(Config|Settings)$", head := row.name.partition(".")[0])}
POLICIES = {row.name.removeprefix("wrap.") for row in TABLE if row.name.startswith("wrap.")}
POLICIES |= {"default_auto_wrap_policy", "_or_policy", "_module_wrap_policy"}
# What only says something, and stays torch's where FSDP1's class goes.
OPTIONS = {*ENUMS, *CONFIGS, *POLICIES, "MixedPrecision", "CPUOffload"}
KNOWN = {CLASS, *OPTIONS, "ShardedGradScaler", "FlatParameter"}
# What is under torch.distributed.fsdp and is FSDP2's, or both's.
OTHERS = {
    *("fully_shard", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "UnshardHandle"),
    *("DataParallelMeshDims", "FSDPMeshInfo", "GradientReductionHandle", "ShardPlacementResult"),
    *("register_fsdp_forward_method", "share_comm_ctx"),
}
MODULES = {"wrap", "api", "fully_sharded_data_parallel", "sharded_grad_scaler", "flat_param"}
# Functions of torch.distributed.fsdp.wrap that are called with the FSDP class and are rows of the table under "wrap.".
AROUND = {f"{CHECKPOINTING}.apply_activation_checkpointing": "apply_activation_checkpointing"}
_LIGHTNING = ("lightning.fabric", "lightning.pytorch", "pytorch_lightning", "lightning_fabric")
LIBRARIES = {
    *(f"accelerate{place}.FullyShardedDataParallelPlugin" for place in ("", ".utils", ".utils.dataclasses")),
    *(f"{package}.strategies{place}.FSDPStrategy" for package in _LIGHTNING for place in ("", ".fsdp")),
    *(f"pytorch_lightning.strategies.DDPFullySharded{kind}Strategy" for kind in ("", "Native")),
    *("composer.utils.FSDPConfig", "composer.utils.parallelism.FSDPConfig"),
    "composer.distributed.prepare_fsdp_module",
}
# What a file that uses FSDP1 can't do without, as text.
SURE_IMPORTS = re.compile(r"FullyShardedDataParallel|distributed\.fsdp|distributed import fsdp|FSDPStrategy")
FAIRSCALE = ("fairscale.nn.FullyShardedDataParallel", "fairscale.nn.data_parallel.FullyShardedDataParallel")


def canonical(qualified: str) -> str | None:
    """FSDP1's own name for a qualified one: "ShardingStrategy.NO_SHARD" for torch.distributed.fsdp.api.Sharding….

    None for what isn't FSDP1's. A name that nobody documents begins with "private:".
    """
    if qualified in AROUND:
        return AROUND[qualified]
    if qualified in LIBRARIES:
        return "library:" + qualified
    if qualified in FAIRSCALE or qualified.startswith("fairscale.nn.data_parallel.fully_sharded"):
        return "fairscale:" + qualified
    if qualified == PACKAGE + ".":  # the package itself, as a value
        return "module:"
    if not qualified.startswith(PACKAGE + "."):
        return None
    qualified = qualified.rstrip(".")
    parts = qualified[len(PACKAGE) + 1 :].split(".")
    if parts[0] in MODULES and len(parts) > 1 and not (parts[0] == "wrap" and parts[1] in ("__name__", "__doc__")):
        parts = parts[1:]
    elif parts[0] in MODULES and len(parts) == 1 and parts[0] != "wrap":
        return f"module:{parts[0]}"
    if parts[0] in OTHERS or parts[0] == "_fully_shard":
        return None
    if parts[0] in KNOWN:
        return ".".join(parts)
    return "private:" + ".".join(parts)


def row_of(name: str) -> Row | None:
    """The table's row for a canonical name, as far as it says."""
    head, _, member = name.partition(".")
    for candidate in (name, f"{name}()", f"wrap.{name}", f"wrap.{head}"):
        if candidate in ROWS:
            return ROWS[candidate]
    if head == CLASS and member:
        return ROWS.get(f"{CLASS}.{member.partition('.')[0]}()")
    return None
