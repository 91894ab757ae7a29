"""The time of a collective on the links between its ranks: latency and bandwidth (α-β)."""

from __future__ import annotations

import math

from fsdp2_tools.plan.speed import Speed

START = 15e-6  # seconds that a collective takes to start on a GPU, assumed


def seconds(name: str, size: int, ranks: tuple[int, int], speed: Speed) -> float:
    """Of one collective.

    A ring passes each byte by each rank but one, so with S bytes on n ranks a link carries S (n - 1) / n: twice that
    for an all-reduce. Between machines each GPU has its share of the network, and rings enter and leave a machine
    through all of them, so a machine has the sum of the shares of those of its GPUs that take part. Latency is that
    of a ring's n - 1 steps; a small all-reduce goes through a tree, whose depth is its latency.
    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md (bus bandwidth)

    Args:
        name: see `fsdp2_extra.allocations.ledger.exchange`.
        size: bytes of what is gathered, scattered or reduced as a whole.
        ranks: how many there are, and how far they stand from each other.
    """
    count, stride = ranks
    if count == 1:
        return 0.0
    here = min(count, max(1, speed.gpus_per_node // stride))  # of one machine
    machines = math.ceil(count / here)
    inside = speed.link * speed.efficiency["link"]
    rate = inside if machines == 1 else min(inside, here * speed.network * speed.efficiency["network"])
    passes = 2 if name == "all-reduce" else 1
    ring = (machines - 1) * speed.network_latency + (count - machines) * speed.link_latency
    if name == "all-reduce":
        tree = 2 * (math.log2(machines) * speed.network_latency + math.log2(here) * speed.link_latency)
        ring = min(2 * ring, tree)
    return START + ring + passes * size * (count - 1) / count / rate
