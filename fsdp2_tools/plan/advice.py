"""Flags that make a plan fit, and flags that a plan which fits could do without: found by planning with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp2.config import Config
from fsdp2.options.errors import ConfigError
from fsdp2.parallel import IN_FEW_BITS
from fsdp2.units import size
from fsdp2_tools.plan.plans import Plan
from fsdp2_tools.plan.report_time import duration, rounded
from fsdp2_tools.plan.search import HEAVIER, name_of

Change = tuple[str, dict[str, Any]]
Replan = Callable[[Config, str], Plan]  # with the flags that have changed, to be shown


@dataclass(frozen=True)
class Advice:
    """Attributes:
    singly: flag and the bytes that it saves by itself, in the order of what they cost.
    together: flags that make the plan fit, or of all those that save something if none do.
    plan: with `together`.
    costs: milliseconds for each sample of a rank that a flag of `singly` adds by itself, where time is planned.
    """

    singly: list[tuple[str, int]]
    together: list[str]
    plan: Plan
    costs: dict[str, float] = field(default_factory=dict)


def changes(config: Config) -> Iterator[Change]:
    """Flags that save memory, those first that cost least by their kind: bytes on the wire, computing again, rounding.

    Where time is planned, `advise` puts them into the order of what they cost.
    """
    if config.strategy == "fsdp2" and config.reshard_after_forward is not True:
        yield "--reshard-after-forward true", {"reshard_after_forward": True}
    if config.spec.kind == "language" and config.chunked_loss is None:
        yield "--chunked-loss", {"chunked_loss": 1024}
    if config.strategy == "fsdp2" and config.shard_granularity not in (1, "layer"):
        yield "--shard-granularity 1", {"shard_granularity": 1}
    if config.activation_checkpointing is None:
        yield "--activation-checkpointing op", {"activation_checkpointing": "op"}
    if config.activation_checkpointing != "block":
        yield "--activation-checkpointing block", {"activation_checkpointing": "block"}
    batch, parts = config.batch_size, config.grad_accumulation
    for factor in dict.fromkeys((2, 8, batch)):
        if batch % factor or factor == 1:
            continue
        change: dict[str, Any] = {"batch_size": batch // factor}
        if config.global_batch_size is None:  # which is cut into more microbatches by itself
            change["grad_accumulation"] = parts * factor
        yield name_of(change), change
    if config.replicas > 1:
        yield "--replicas 1", {"replicas": 1}
    if config.mixed_precision is None:
        yield "--mixed-precision bf16", {"mixed_precision": "bf16"}
    if config.optimizer in IN_FEW_BITS and config.optimizer_state is None:
        yield "--optimizer-state 8bit", {"optimizer_state": "8bit", "fused_optimizer": None}
    if config.strategy == "fsdp2" and not config.cpu_offload:
        yield "--cpu-offload", {"cpu_offload": True, "fused_optimizer": None}


def heavier(config: Config) -> Iterator[Change]:
    """The inverse of `changes`: each memory saver of a Config left out or a step lighter, and twice the batch."""
    found: list[dict[str, Any]] = []
    if config.activation_checkpointing == "block":
        found.append({"activation_checkpointing": "op"})
    if config.activation_checkpointing is not None:
        found.append({"activation_checkpointing": None})
    if config.chunked_loss is not None:
        found.append({"chunked_loss": None})
    if config.strategy == "fsdp2":
        if config.cpu_offload:
            found.append({"cpu_offload": False})
        if config.reshard_after_forward is not False:
            found.append({"reshard_after_forward": False})
        line = HEAVIER["shard_granularity"]
        if config.shard_granularity in line[:-1]:
            found.append({"shard_granularity": line[line.index(config.shard_granularity) + 1]})
    if config.global_batch_size is None:
        parts = config.grad_accumulation  # where it can, the global batch stays
        fewer = parts // 2 if parts % 2 == 0 else parts
        found.append({"batch_size": 2 * config.batch_size, "grad_accumulation": fewer})
    for change in found:
        yield name_of({name: value for name, value in change.items() if value != getattr(config, name)}), change


def wasted(base: Plan, replan: Replan) -> list[tuple[str, Plan]]:
    """Find flags that a plan can do without: `heavier` ones with which it fits too, the fastest first.

    Where time is planned, those that gain none are left out.
    """
    there = [(change[0], _try(base.config, [change], replan)) for change in heavier(base.config)]
    found = [(flags, plan) for flags, plan in there if plan is not None and plan.fits]
    gain = [one for one in found if base.time is None or cost(base, one[1]) < 0]
    return sorted(gain, key=lambda one: 0.0 if one[1].time is None else -one[1].time.samples_per_second)


def advise(base: Plan, replan: Replan) -> Advice:
    """Find flags that make a plan fit that doesn't.

    Flags are added in the order of the time that they cost for as long as the plan doesn't fit, and those taken back
    without which it fits as well. Without times the order is that of `changes`.
    """
    found: list[tuple[Change, Plan]] = []
    for change in changes(base.config):
        there = _try(base.config, [change], replan)
        if there is not None and there.bytes < base.bytes:
            found.append((change, there))
    costs = {change[0]: cost(base, there) for change, there in found if there.time is not None}
    found.sort(key=lambda one: costs.get(one[0][0], 0.0))
    singly = [(change[0], base.bytes - there.bytes) for change, there in found]
    useful = [change for change, _ in found]
    together, best = list[Change](), base
    for change in useful:
        # A flag that replaces one before, as `block` does `op`, counts for itself.
        others = [one for one in together if not set(one[1]) & set(change[1])]
        there = _try(base.config, [*others, change], replan)
        if there is not None and there.bytes < best.bytes:
            together, best = [*others, change], there
        if best.fits:
            break
    if best.fits:
        for change in list(together)[:-1]:
            fewer = [one for one in together if one is not change]
            there = _try(base.config, fewer, replan)
            if there is not None and there.fits:
                together, best = fewer, there
    return Advice(singly, [name for name, _ in together], best, costs)


def cost(base: Plan, there: Plan) -> float:
    """Milliseconds of a rank that a sample takes more in one plan than in another."""
    assert base.time is not None
    assert there.time is not None
    return 1e3 * base.ranks * (1 / there.time.samples_per_second - 1 / base.time.samples_per_second)


def _try(config: Config, together: Sequence[Change], replan: Replan) -> Plan | None:
    """The plan with some changes; None if the flags don't go together."""
    values: dict[str, Any] = {}
    for _, change in together:
        values |= change
    try:
        return replan(dataclasses.replace(config, **values), " ".join(name for name, _ in together))
    except ConfigError:
        return None


def lines(advice: Advice, base: Plan) -> list[str]:
    """For the terminal."""
    assert base.budget is not None
    found = [f"  {flag:44}{size(saved):>10} less{_cost(advice, flag, base)}" for flag, saved in advice.singly]
    flags = " ".join(advice.together)
    if advice.plan.fits:
        return [
            "alone, each flag would save (those first that cost least):",
            *found,
            f"it fits with {flags}: {size(advice.plan.bytes)} of {size(base.budget)}{_pace(advice.plan, base)}"
            + f", and {size(advice.plan.memory.on_host)} a rank in the host's memory" * ("--cpu-offload" in flags),
        ]
    least = f", with {flags}" if flags else " as it is"
    adapters = "--lora 16, " * (base.config.weights is not None and base.config.lora is None)
    return [
        *(["alone, each flag would save:", *found] if found else []),
        f"no setting fits in {size(base.budget)}: the least is {size(advice.plan.bytes)}{least}; use {adapters}more "
        "ranks, a shorter --seq-len or a GPU with more memory",
    ]


def wasted_lines(found: Sequence[tuple[str, Plan]], base: Plan) -> list[str]:
    """For the terminal."""
    gains = "" if base.time is None else " and is faster"
    if not found:
        return [f"nothing is wasted: with less saving of memory, or twice the batch, no plan fits{gains}"]
    rows = []
    for flags, plan in found:
        row = f"  {flags:44}{size(plan.bytes):>10} of {size(base.budget or 0)}"
        if plan.time is not None and base.time is not None:
            row += f", a step {duration(plan.time.milliseconds)} instead of {duration(base.time.milliseconds)}"
        rows.append(row + _pace(plan, base))
    return [f"memory is left; alone, each of these fits too{gains}:", *rows]


def _cost(advice: Advice, flag: str, base: Plan) -> str:
    if flag not in advice.costs or base.time is None:
        return ""
    part = advice.costs[flag] * base.time.samples_per_second / base.ranks / 1e3
    return f", {advice.costs[flag]:+,.1f} ms a sample ({part:+.0%})"


def _pace(plan: Plan, base: Plan) -> str:
    if plan.time is None or base.time is None:
        return ""
    part = plan.time.samples_per_second / base.time.samples_per_second - 1
    return f", {rounded(plan.time.samples_per_second)} samples/s ({part:+.0%})"
