"""Plan a step at measured rates: started by `fsdp2_tools.doctor.step`, with a job in and lines out, both as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from fsdp2.config import Config
from fsdp2.options.errors import ConfigError
from fsdp2.options.parser import flags_of_table
from fsdp2.run.process import ending
from fsdp2_tools.plan import links
from fsdp2_tools.plan.device import Gpu, gpu
from fsdp2_tools.plan.plans import plan
from fsdp2_tools.plan.report_time import described, duration
from fsdp2_tools.plan.schedule import Group
from fsdp2_tools.plan.speed import Speed
from fsdp2_tools.plan.steptime import StepTime

# The row of the planner's table that has what isn't measured here, and the dtype whose product was.
NEAREST = {"cpu": ("cpu", "fp32"), "cuda": ("h100", "bf16")}


def speed_of(device: str, measured: Mapping[str, Any]) -> Speed:
    """The rates of the planner's table, with what `step.measured` found in their place.

    Pairs of ranks say how far a host's own links and those between hosts are apart; on GPUs the table says it, since a
    pair's TCP doesn't take NVLink. Collectives go another way than a pair's TCP in any case, so one factor of all
    latencies and one of all rates are fitted to the all-gathers.
    """
    name, dtype = NEAREST[device]
    base = gpu(name).speed
    assert base is not None, "NEAREST names rows with a speed"
    once = dict.fromkeys(base.efficiency, 1.0)
    plain = dataclasses.replace(base, efficiency=once, gpus_per_node=measured["per_host"])
    if device == "cpu":
        near, far = (one or next(other for other in measured["links"] if other) for one in measured["links"])
        plain = dataclasses.replace(
            plain,
            link=near[1],
            link_latency=near[0] / 2,
            network=far[1] / measured["per_host"],
            network_latency=far[0] / 2,
        )
    # α and β by the smallest and the largest one: seconds = START + α latency + β bytes / rate.
    (small, took), (large, took_large) = measured["gathers"][0], measured["gathers"][-1]
    ranks = (measured["ranks"], 1)
    latency = links.seconds("all-gather", 0, ranks, plain) - links.START
    wire = (links.seconds("all-gather", large, ranks, plain) - links.START - latency) / large
    beta = max(1e-3, (took_large - took) / (large - small) / wire)
    alpha = max(0.0, (took - links.START - beta * wire * small) / latency)
    factor = measured["flops"] / (base.flops[dtype] * base.efficiency["matrix"])
    return dataclasses.replace(
        plain,
        flops={name: value * factor for name, value in base.flops.items()},
        memory=measured["memory"] / base.efficiency["memory"],
        link=plain.link / beta,
        network=plain.network / beta,
        link_latency=alpha * plain.link_latency,
        network_latency=alpha * plain.network_latency,
        efficiency={**base.efficiency, "link": 1.0, "network": 1.0},
    )


def other_way(config: Config, measured: Mapping[str, Any]) -> Config | None:
    """Replicas that shard within a host, or among half of the ranks; None where that is no choice."""
    ranks, hosts = measured["ranks"], measured["hosts"]
    count = hosts if 1 < hosts < ranks else 2
    if config.strategy != "fsdp2" or config.replicas > 1 or ranks < 4 or ranks % count:
        return None
    return dataclasses.replace(config, replicas=count)


def not_apart(device: str, measured: Mapping[str, Any]) -> str:
    """The reason why nothing is known of exchanges among a part of the ranks; empty if it is."""
    if device == "cpu" or measured["hosts"] == 1:  # all-gathers on links of one kind tell about each part
        return ""
    return "not known, since GPUs' links within a host and between hosts aren't measured apart"


def lines(plain: StepTime, other: StepTime | None, replicas: int) -> list[str]:
    """The exchange of a block that a step waits for most, and the step."""
    blocks = [group for group in plain.groups if group.name == "block"] or list(plain.groups)
    found = [(described(group), "" if other is None else _exposed(group, other)) for group in blocks[:1]]
    found.append((_step(plain), "" if other is None else _step(other)))
    return [one + (f"; with --replicas {replicas}: {there}" if there else "") for one, there in found]


def _exposed(group: Group, other: StepTime) -> str:
    """The time that a step waits for the same exchange there."""
    same = (group.name, group.phase, group.exchange)
    waits = next((one.exposed for one in other.groups if (one.name, one.phase, one.exchange) == same), 0.0)
    return f"{waits:.2g} ms" if waits >= 0.005 else "none"


def _step(time: StepTime) -> str:
    return f"{duration(time.milliseconds)}, of which {duration(time.exposed_ms)} wait for exchanges"


def main() -> None:
    """Read a job and print the lines. Raises ConfigError for what can't be planned."""
    warnings.simplefilter("ignore")  # torch warns of things that a process without a device does
    job = json.load(sys.stdin)
    config = Config(**flags_of_table(Config, job["flags"], "the doctor's job"))
    measured, kind = job["measured"], job["device"]
    unknown = not_apart(kind, measured)
    if unknown and config.replicas > 1:
        raise ConfigError(f"--replicas {config.replicas}: {unknown}")
    device = Gpu("measured", 0, "the doctor", speed_of(kind, measured), kind == "cpu")
    other = other_way(config, measured)
    planned = [config] if other is None or unknown else [config, other]
    times = [plan(one, measured["ranks"], device, None).time for one in planned]
    assert times[0] is not None, "the device has a speed"
    found = lines(times[0], times[1] if len(times) > 1 else None, other.replicas if other else 1)
    if other is not None and unknown:
        found[-1] += f"; with --replicas {other.replicas}: {unknown}"
    print(json.dumps(found))


if __name__ == "__main__":
    with ending.exit_status():
        main()
