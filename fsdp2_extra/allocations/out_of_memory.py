"""The report of a run out of memory: the tensors alive, and the saving of each flag."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import torch

from fsdp2.config import Config
from fsdp2.options.own_model import code_flags
from fsdp2.parallel.engine import Engine
from fsdp2.units import size
from fsdp2_extra.allocations.ledger import Allocation, Ledger, by_kind, enclosing

STATE = ("parameters", "gradients", "optimizer")


def known_state(engine: Engine, device: torch.device) -> list[Allocation]:
    """List the tensors of model and optimizer; on a GPU, all else allocated at the peak counts as activations."""
    ledger = Ledger()
    ledger.watch(engine.model, engine.held())
    rest = torch.cuda.max_memory_allocated(device) - ledger.live_bytes if device.type == "cuda" else 0
    return [*ledger.allocations, Allocation(max(rest, 0), 0.0, 0, "", "", kind="activations")]


def report(alive: Sequence[Allocation], config: Config, device: str, world_size: int, blocks: Sequence[str]) -> str:
    """Lines for a user, from what was allocated when memory was short."""
    sizes = by_kind(alive)
    lines = [f"at the peak {size(sum(sizes.values()))} of tensors were alive on this rank:"]
    lines += [f"  {kind:20}{size(count):>10}" for kind, count in sorted(sizes.items(), key=lambda item: -item[1])]
    found = remedies(alive, config, device, world_size, blocks)
    lines.append("what would have saved some of it, at that moment:")
    lines += [f"  {flag:44}about {size(saved)}" for flag, saved in found]
    return "\n".join(lines)


def planning(config: Config, device: torch.device, world_size: int, run: str) -> str:
    """The command that finds, by planning, flags with which the run fits, and their bytes.

    This process can't: it is a rank, and a plan needs the process group for itself.
    """
    budget = config.memory_limit
    if budget is None and device.type == "cuda":
        budget = torch.cuda.get_device_properties(device).total_memory
    flags = f"--config {shlex.quote(f'{run}/config.json')} --ranks {world_size}"
    flags += "".join(f" {shlex.quote(word)}" for word in code_flags(config))
    flags += f" --budget {budget}" if budget is not None else ""
    named = ", with --gpu and the name of this one" if device.type == "cuda" else ""
    return f"which flags make it fit, found by planning{named}:\n  python -m fsdp2.plan {flags}"


def remedies(
    alive: Sequence[Allocation], config: Config, device: str, world_size: int, blocks: Sequence[str]
) -> list[tuple[str, int]]:
    """(flags, bytes that they would save) for what isn't set already, largest first.

    Estimates by arithmetic from what was alive: a dtype of half the bytes halves, twice the ranks halve.
    """
    sizes = by_kind(alive)
    state = sum(sizes.get(kind, 0) for kind in STATE)
    activations, gathered = sizes.get("activations", 0), sizes.get("gathered parameters", 0)
    found: dict[str, int] = {}
    sharded = config.strategy in ("fsdp1", "fsdp2")
    if not sharded and world_size > 1:
        found["--strategy fsdp2"] = state - state // world_size
    if sharded and config.fsdp1_sharding != "no-shard":
        found[f"{2 * world_size} ranks instead of {world_size}"] = state // 2
    if config.replicas > 1:
        found["--replicas 1"] = state - state // config.replicas
    if sharded and device == "cuda" and not config.cpu_offload:
        found["--cpu-offload"] = state
    if config.mixed_precision is None:
        found["--mixed-precision bf16"] = (activations + gathered) // 2
    if config.strategy == "fsdp2" and config.reshard_after_forward is not True:
        groups = _by_block(alive, blocks, "gathered parameters", whole=True)
        # The largest group is whole at some time anyway; what is in no block is the root's.
        found["--reshard-after-forward true"] = gathered - max(gathered - sum(groups.values()), *groups.values())
    if config.shard_granularity == "root":
        found["--shard-granularity 1"] = gathered - gathered // max(1, len(blocks))
    if config.activation_checkpointing is None:
        inside = _by_block(alive, blocks, "activations", whole=False)
        # While one block is computed again, its own are there.
        found["--activation-checkpointing"] = sum(inside.values()) - max(inside.values(), default=0)
    parts, whole = config.accumulation(world_size), config.global_batch_size  # which is cut into more by itself
    microbatch = -(-whole // (world_size // config.tp // config.sp * parts)) if whole else config.batch_size
    if microbatch > 1:
        more = "" if whole else f" --grad-accumulation {2 * parts}"
        found[f"--batch-size {microbatch // 2}{more}"] = (activations + sizes.get("data", 0)) // 2
    if config.optimizer != "sgd":
        found["--optimizer sgd, another training"] = sizes.get("optimizer", 0) // 2
    return sorted(((flag, saved) for flag, saved in found.items() if saved > 0), key=lambda item: -item[1])


def _by_block(alive: Sequence[Allocation], blocks: Sequence[str], kind: str, *, whole: bool) -> dict[str, int]:
    """Bytes of a kind by the block in whose forward they were made; with `whole` the block's own output too."""
    sizes = dict.fromkeys(blocks, 0)
    for allocation in alive:
        block = enclosing(allocation.module, sizes)
        if block and allocation.kind == kind and (whole or allocation.module != block):
            sizes[block] += allocation.bytes
    return sizes
