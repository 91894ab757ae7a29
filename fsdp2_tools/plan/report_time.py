"""The time of planned steps as lines for the terminal, in ranges rather than digits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fsdp2_tools.plan.device import Gpu
from fsdp2_tools.plan.plans import Plan
from fsdp2_tools.plan.schedule import Group
from fsdp2_tools.plan.steptime import StepTime

SHOWN = 6  # groups, of each number of ranks


def lines(plans: Sequence[Plan], gpu: Gpu, tokens: float | None) -> list[str]:
    """A column for each number of ranks: the computation's waits, the rates' source, and what so many tokens cost."""
    if gpu.speed is None:
        return ["", f"no time is planned: the table of {gpu.name} says nothing of its speed (docs/plan.md)"]
    timed = [(plan, plan.time) for plan in plans if plan.time is not None]
    rows: list[tuple[str, Callable[[Plan, StepTime], str]]] = [
        ("a step", lambda plan, time: duration(time.milliseconds)),
        ("  at best", lambda plan, time: duration(time.low)),
        ("  at worst", lambda plan, time: duration(time.high)),
        ("computation", lambda plan, time: duration(time.compute_ms)),
        ("waits for exchanges", lambda plan, time: duration(time.exposed_ms)),
        ("waits for the CPU", lambda plan, time: duration(time.idle_ms)),
        ("samples/s", lambda plan, time: rounded(time.samples_per_second)),
    ]
    if timed[0][1].tokens_per_second is not None:
        rows.append(("tokens/s", lambda plan, time: rounded(time.tokens_per_second or 0)))
        rows.append(("tokens/s a GPU", lambda plan, time: rounded((time.tokens_per_second or 0) / plan.ranks)))
    rows.append(("MFU", lambda plan, time: f"{time.mfu:.0%}"))
    if tokens is not None:
        rows.append(("GPU-hours, at best", lambda plan, time: rounded(gpu_hours(plan, tokens, time.low))))
        rows.append(("GPU-hours, at worst", lambda plan, time: rounded(gpu_hours(plan, tokens, time.high))))
    width = max(len(name) for name, _ in rows) + 2
    found = ["", f"{'time, ranks':{width}}" + "".join(f"{plan.ranks:>12,}" for plan, _ in timed)]
    found += [f"{name:{width}}" + "".join(f"{value(*one):>12}" for one in timed) for name, value in rows]
    for plan, time in (one for one in timed if one[1].groups):  # one rank exchanges nothing
        found += ["", f"{plan.ranks:,} ranks, exchanges on average, those first that a step waits for most:"]
        found += [f"  {described(group)}" for group in time.groups[:SHOWN]]
    speed, tp = gpu.speed, max(plan.config.tp for plan in plans)
    if speed.gpus_per_node % tp:
        within, between = (f"{rate / 1e9:,.0f} GB/s" for rate in (speed.link, speed.network))
        rates = f"{within} from one to another there, and {between} to another machine"
        found += ["", f"warning: --tp {tp} doesn't divide the {speed.gpus_per_node} ranks of a machine: {rates}"]
    reached = ", ".join(f"{name} {value:.0%}" for name, value in speed.efficiency.items())
    return [*found, "", f"rates reached, of those in the data sheet: {reached} (docs/plan.md)"]


def described(group: Group) -> str:
    """Such as `all-gather of a block in forward: 2.1 ms, its compute 1.4 ms: exposed 0.7 ms (32 times)`."""
    name = "a block" if group.name == "block" else group.name
    return (
        f"{group.exchange} of {name} in {group.phase}: {group.milliseconds:.2g} ms, computed meanwhile "
        f"{group.compute:.2g} ms: exposed {max(group.exposed, 0):.2g} ms ({group.count:,} times)"
    )


def gpu_hours(plan: Plan, tokens: float, milliseconds: float) -> float:
    """GPU hours of a training of so many tokens on all ranks, at this time for a step."""
    samples = plan.config.global_batch(plan.ranks)
    return tokens / (samples * plan.config.seq_len) * milliseconds / 3.6e6 * plan.ranks


def duration(milliseconds: float) -> str:
    """Two digits and a unit: what a range leaves of a time."""
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.1f} s" if milliseconds < 1e4 else f"{milliseconds / 1000:,.0f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def rounded(value: float) -> str:
    """Two digits, written out."""
    number = float(f"{value:.2g}")
    return f"{number:,.0f}" if number >= 10 else f"{number:g}"
