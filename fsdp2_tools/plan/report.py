"""A plan as a table for the terminal, and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from fsdp2.units import size
from fsdp2_tools.plan.advice import Advice
from fsdp2_tools.plan.device import Gpu
from fsdp2_tools.plan.peaks import Peak
from fsdp2_tools.plan.plans import Plan
from fsdp2_tools.plan.report_time import gpu_hours

TOO_LOW = 0.05  # of published peaks, the most by which a plan was below (docs/plan.md)


def lines(plans: Sequence[Plan], gpu: Gpu | None) -> list[str]:
    """Lines for a reader: bytes by kind with a column for each number of ranks, where the peak is, and the verdict."""
    columns = [_column(plan) for plan in plans]
    names = list(dict.fromkeys(name for column in columns for name in column))
    width = max(map(len, names)) + 2
    rows = [f"{'ranks':{width}}" + "".join(f"{plan.ranks:>12,}" for plan in plans)]
    for name in names:
        rows.append(f"{name:{width}}" + "".join(f"{size(column.get(name, 0)):>12}" for column in columns))
    found = [*heading(plans[0], gpu), "", "the fullest rank, at its peak:", *rows, ""]
    for plan in plans:
        found += [f"{plan.ranks:,} ranks: {line}" for line in _verdict(plan)]
    if gpu is not None:
        found += ["", "not calibrated on a GPU:"]
        found += [f"  {term.name}: {term.source}" for term in plans[0].extra]
    return found


def heading(plan: Plan, gpu: Gpu | None) -> list[str]:
    """The heading: the flags, and the GPU."""
    config = plan.config
    model = config.spec.on_meta(config.model_size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    parts, most = config.accumulation(plan.ranks), "up to " * (config.global_batch_size is not None)
    what = f"batch {most}{config.batch_size} a rank" + (f" × {parts}" * (parts > 1))
    if config.spec.kind == "language":
        what += f", {config.seq_len:,} tokens each"
    found = [f"{config.model} {config.model_size}, {parameters:,} parameters; {config.strategy}; {what}"]
    if gpu is None:
        found.append("on CPUs, with gloo; for GPUs name one, such as --gpu h100")
    else:
        found.append(f"{gpu.name}: {size(gpu.memory)} ({gpu.source})")
    if config.compile:
        found.append("--compile is left out: what a compiler keeps for backward, usually less, a plan can't see")
    return found


def _column(plan: Plan) -> dict[str, int]:
    column = dict(plan.memory.peak.kinds)
    column["= tensors"] = plan.tensors
    for term in plan.extra:
        column[term.name] = term.bytes
    if plan.extra:
        column["= device"] = plan.bytes
    return column


def _verdict(plan: Plan) -> list[str]:
    memory, config = plan.memory, plan.config
    parts = ", ".join(f"{name} {size(peak.bytes)}" for name, peak in memory.parts.items())
    found = [f"the peak is in {where(memory.peak)}; most tensors in each part: {parts}"]
    if plan.last is not memory:
        found[0] += f"; the last rank takes {size(plan.last.peak.bytes)}"
    more = f", and each that --keep-every {config.keep_every} keeps" if config.keep_every else ""
    more += ", and that of the lowest loss" if config.keep_best else ""
    disk = f"disk: at most {size(plan.checkpoint_bytes)} a checkpoint × {config.keep}{more}"
    if not config.saves:
        disk = "disk: no checkpoint, as --checkpoint-every never asks"
    host = (
        f"host memory: {size(memory.on_host)} a rank for what is offloaded, saved or loaded; "
        if memory.reserved
        else ""
    )
    found.append(f"{host}{disk}")
    if plan.budget is not None:
        verdict = "fits" if plan.fits else "does not fit"
        near = bool(memory.reserved) and plan.fits and plan.bytes > (1 - TOO_LOW) * plan.budget
        but = f", but barely: published runs took up to {TOO_LOW:.0%} more than planned" * near
        found.append(f"{verdict}: {size(plan.bytes)} of {size(plan.budget)} ({plan.bytes / plan.budget:.0%}){but}")
    return found


def where(peak: Peak) -> str:
    """Phase and module of a peak."""
    return peak.phase + (f" of {peak.module}" if peak.module else "")


def as_json(
    plans: Sequence[Plan],
    gpu: Gpu | None,
    advice: Advice | None,
    tokens: float | None = None,
    wasted: Sequence[tuple[str, Plan]] | None = None,
) -> str:
    """All that was planned; bytes and milliseconds throughout, and GPU-hours of a training of so many tokens."""

    def hours(plan: Plan) -> list[float] | None:
        if plan.time is None or tokens is None:
            return None
        return [gpu_hours(plan, tokens, one) for one in (plan.time.low, plan.time.milliseconds, plan.time.high)]

    def entry(plan: Plan) -> dict[str, Any]:
        return {
            "ranks": plan.ranks,
            "bytes": plan.bytes,
            "tensors": plan.tensors,
            "budget": plan.budget,
            "fits": plan.fits if plan.budget is not None else None,
            "peak": dataclasses.asdict(plan.memory.peak),
            "parts": {name: dataclasses.asdict(peak) for name, peak in plan.memory.parts.items()},
            "reserved": plan.memory.reserved or None,
            "last_rank": plan.last.peak.bytes,
            "beside_tensors": [dataclasses.asdict(term) for term in plan.extra],
            "on_host": plan.memory.on_host,
            "checkpoint_bytes": plan.checkpoint_bytes,
            "time": None if plan.time is None else dataclasses.asdict(plan.time),
            "gpu_hours": hours(plan),
        }

    content: dict[str, Any] = {"gpu": None if gpu is None else dataclasses.asdict(gpu), "plans": [*map(entry, plans)]}
    if advice is not None:
        content["advice"] = {
            "singly": dict(advice.singly),
            "ms_a_sample": advice.costs,
            "flags": advice.together,
            "plan": entry(advice.plan),
        }
    if wasted is not None:
        content["wasted"] = [{"flags": flags, "plan": entry(plan)} for flags, plan in wasted]
    return json.dumps(content, indent=1)
