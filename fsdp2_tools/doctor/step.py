"""The waits of a training step with these flags, as rows without a verdict.

Another process plans it: a plan needs one without a process group, and what takes too long can be ended.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from fsdp2.config import Config
from fsdp2.options.parser import to_flags
from fsdp2_tools.doctor.judging import Hosts, Row
from fsdp2_tools.doctor.network import BETWEEN, INSIDE, Pair, kinds

PATIENCE = 60.0  # seconds, in which the other ranks wait for a question


def measured(
    computed: Mapping[int, Mapping[str, float]],
    pairs: Mapping[Pair, Mapping[str, Any]],
    gathered: Mapping[int, Mapping[str, float]],
    hosts: Hosts,
) -> dict[str, Any] | None:
    """Take from the ranks' measurements what a plan needs, the slowest rank's where all wait for it; None if absent.

    Returns a dict:
        per_host: ranks of each host; None if hosts have different numbers.
        flops, memory: of a rank, as `compute.measure` has them.
        links: of a host's own ranks and between hosts, the median round trip and bytes/s of a link.
        gathers: bytes and seconds of each all-gather of all ranks.
    """
    if not computed or not gathered:
        return None
    links = {
        kind: [statistics.median(one[key] for one in part.values()) for key in ("trip", "link")]
        for kind, part in kinds(pairs, hosts)
    }
    per_host = [*Counter(hosts.of.values()).values()]
    sizes = [int(name.split()[1]) for name in next(iter(gathered.values())) if name.startswith("all-gather")]
    return {
        "ranks": len(gathered),
        "hosts": len(per_host),
        "per_host": per_host[0] if len(set(per_host)) == 1 else None,
        "flops": min(one["flops"] for one in computed.values()),
        "memory": min(one["memory"] for one in computed.values()),
        "links": [links.get(kind) for kind in (INSIDE, BETWEEN)],
        "gathers": [[size, max(one[f"all-gather {size}"] for one in gathered.values())] for size in sizes],
    }


def rows(
    config: Config, device: torch.device, found: Mapping[str, Any] | None, patience: float = PATIENCE
) -> list[Row]:
    """Rows of a step's waits at the measured rates, or the reason that they aren't known."""
    if found is None:
        return []
    title, expected = f"step of {config.model}", "no bound: fsdp2.plan at the rates measured here"
    if found["per_host"] is None:
        return [
            Row(title, "not planned: hosts have different numbers of ranks, which the planner doesn't know", expected)
        ]
    job = {"flags": to_flags(config), "device": device.type, "measured": found}
    line = [sys.executable, "-m", "fsdp2_tools.doctor.planned_step"]
    try:
        done = subprocess.run(line, input=json.dumps(job), capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        return [Row(title, f"not planned in {patience:g} s", "python -m fsdp2.plan takes what time it needs")]
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        return [Row(title, f"not planned: {why.removeprefix('fsdp2: error: ')[:200]}", expected)]
    return [Row(title, text, expected) for text in json.loads(done.stdout)]
