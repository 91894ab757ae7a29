"""The schedule of exchanges against cases whose times are known by hand, in seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from fsdp2_tools.plan import links
from fsdp2_tools.plan.schedule import Replay, events, replay
from fsdp2_tools.plan.speed import Speed
from fsdp2_tools.plan.work import COMPUTE, COPY_IN, COPY_OUT, REDUCE_IN, Work

SHARDS, REPLICAS = (8, 1), (4, 8)
NEAR = 0.01  # the CPU takes less than this to issue a case


SPEED = Speed(
    flops={"bf16": 1e15, "fp16": 1e15, "fp32": 1e14},
    memory=1e12,
    gpus_per_node=8,
    link=400e9,
    network=50e9,
    host=50e9,
    link_latency=1e-6,
    network_latency=10e-6,
    efficiency={"matrix": 0.5, "attention": 0.25, "memory": 1.0, "link": 1.0, "network": 0.5},
    spread=0.1,
)
ON_CPU = dataclasses.replace(SPEED, operator=0.5, exchange=0.25, on_cpu=True)


def _run(*phases: tuple[str, Sequence[tuple[str, float, str]]], speed: Speed = SPEED) -> Replay:
    """Replay phases of (role, seconds, module)."""
    done = [
        Work(role, "", int(seconds * 1000), 0, 8, "", module, number, REPLICAS if role == "all-reduce" else SHARDS)
        for number, (_, works) in enumerate(phases)
        for role, seconds, module in works
    ]
    names = [name for name, _ in phases]
    found = events(
        done, names, lambda module: int(module[1]) if module else None, lambda work: work.flops / 1000, speed
    )
    return replay(found, names, lambda event: "block", on_cpu=speed.on_cpu)


def _gathered(block: str, seconds: float, compute: float) -> list[tuple[str, float, str]]:
    return [(COPY_IN, 0, block), ("all-gather", seconds, block), (COPY_OUT, 0, block), (COMPUTE, compute, block)]


def _reduced(block: str, seconds: float, compute: float) -> list[tuple[str, float, str]]:
    return [(COMPUTE, compute, block), (REDUCE_IN, 0, block), ("reduce-scatter", seconds, block)]


def test_the_first_all_gather_is_exposed() -> None:
    done = _run(("forward", _gathered("b0", 2, 5)))
    assert (done.seconds, done.exposed, done.compute) == pytest.approx((7, 2, 5), abs=NEAR)


def test_the_next_one_hides_behind_the_computation_that_is_still_running() -> None:
    done = _run(("forward", [*_gathered("b0", 2, 5), *_gathered("b1", 2, 5), *_gathered("b2", 2, 5)]))
    assert (done.seconds, done.exposed) == pytest.approx((2 + 3 * 5, 2), abs=NEAR)


def test_what_an_all_gather_takes_longer_than_the_computation_is_exposed() -> None:
    done = _run(("forward", [*_gathered("b0", 8, 5), *_gathered("b1", 8, 5)]))
    assert (done.seconds, done.exposed) == pytest.approx((8 + 8 + 5, 8 + 3), abs=NEAR)
    (group,) = done.groups.values()
    assert (group.count, group.milliseconds, group.exposed) == pytest.approx((2, 16e3, 11e3), rel=NEAR)


def test_forward_keeps_two_buffers() -> None:
    """The third all-gather waits until the first group is copied out of its buffer, which takes 4 seconds here."""
    blocks = [(COPY_IN, 0.0, "b0"), ("all-gather", 1.0, "b0"), (COPY_OUT, 4.0, "b0"), (COMPUTE, 1.0, "b0")]
    blocks += [*_gathered("b1", 1, 1), *_gathered("b2", 3, 1)]
    # b0: 0-1 gathered, 1-5 copied, 5-6 computed; b1 gathered 1-2, computed 6-7; b2 gathered from 5 to 8, computed 8-9.
    assert _run(("forward", blocks)).seconds == pytest.approx(9, abs=NEAR)


def test_issuing_early_changes_nothing_on_a_gpu_that_is_behind_the_cpu() -> None:
    """What torch calls implicit prefetching: the CPU issues an all-gather while the GPU computes what came before."""
    early = [(COPY_IN, 0, "b1"), ("all-gather", 2, "b1"), (COPY_OUT, 0, "b1")]
    early += [(COPY_IN, 0, "b1"), ("all-gather", 2, "b1"), (COMPUTE, 5, "b1"), (COPY_OUT, 0, "b0"), (COMPUTE, 5, "b0")]
    late = [*_gathered("b1", 2, 5), *_gathered("b0", 2, 5)]
    for works in (early, late):
        assert _run(("backward", works)).exposed == pytest.approx(2, abs=NEAR)


def test_issuing_early_hides_what_a_slow_cpu_would_expose() -> None:
    busy = [(COMPUTE, 0.0, "b1")] * 200_000  # 1.6 seconds of issuing
    gather, out = [(COPY_IN, 0.0, "b1"), ("all-gather", 1.0, "b1")], [(COPY_OUT, 0.0, "b0")]
    late = _run(("backward", [*busy, *gather, *out]))
    assert (late.seconds, late.exposed) == pytest.approx((2.6, 1), abs=NEAR)
    early = _run(("backward", [*gather, *busy, *out]))
    assert (early.seconds, early.exposed) == pytest.approx((1.6, 0), abs=NEAR)


def test_a_reduce_scatter_hides_behind_the_next_block_and_the_last_one_does_not() -> None:
    done = _run(("backward", [*_reduced("b1", 2, 5), *_reduced("b0", 2, 5)]))
    assert (done.seconds, done.exposed) == pytest.approx((12, 2), abs=NEAR)


def test_a_buffer_of_a_reduce_scatter_is_waited_for() -> None:
    done = _run(("backward", [*_reduced("b2", 8, 5), *_reduced("b1", 8, 5), *_reduced("b0", 8, 5)]))
    # Each fills its buffer when the one before is done: 5, 13, 21, and the last ends at 29.
    assert (done.seconds, done.exposed) == pytest.approx((29, 3 + 3 + 8), abs=NEAR)


def test_what_is_computed_next_waits_for_that_buffer() -> None:
    done = _run(("backward", [*_reduced("b2", 8, 5), *_reduced("b1", 8, 5), *_reduced("b0", 1, 20)]))
    # The first ends at 13, and b1's gradients, computed at 10, go into their buffer then: b0 is computed from 13 to 33.
    assert done.seconds == pytest.approx(34, abs=NEAR)


def test_exchanges_of_the_same_ranks_run_one_after_another() -> None:
    backward = [*_reduced("b1", 6, 5), (COPY_IN, 0, "b1"), ("all-gather", 2, "b1"), (COPY_OUT, 0, "b0")]
    # The all-gather is issued after the reduce-scatter, which ends at 11.
    assert _run(("backward", [*backward, (COMPUTE, 1, "b0")])).seconds == pytest.approx(14, abs=NEAR)


def test_an_all_reduce_of_replicas_runs_beside_the_next_reduce_scatter() -> None:
    def block(name: str) -> list[tuple[str, float, str]]:
        return [*_reduced(name, 2, 5), ("all-reduce", 4, name)]

    # Reduce-scatters end at 7 and 12, all-reduces at 11 and 16.
    done = _run(("backward", [*block("b1"), *block("b0")]))
    assert (done.seconds, done.exposed) == pytest.approx((16, 6), abs=NEAR)


def test_a_slow_cpu_is_told_apart_from_exchanges() -> None:
    done = _run(("forward", [(COMPUTE, 0, "b0")] * 1000))
    assert done.seconds == pytest.approx(done.idle)
    assert done.exposed == 0


def test_on_cpus_nothing_overlaps() -> None:
    """Each operator takes 0.5 to issue, each part of an exchange 0.25, and each exchange is waited for."""
    forward = [*_gathered("b0", 2, 5), *_gathered("b1", 2, 5)]
    backward = [*_reduced("b1", 3, 5), ("all-reduce", 1, "b1"), *_reduced("b0", 3, 5), ("all-reduce", 1, "b0")]
    done = _run(("forward", forward), ("backward", backward), speed=ON_CPU)
    # Forward: 2 × (0.25 + 2.25 + 0.25 + 5.5). Backward: 2 × (5.5 + 0.25 + 3.25 + 1.25).
    assert done.seconds == pytest.approx(2 * 8.25 + 2 * 10.25)
    assert done.exposed == pytest.approx(2 * 2.25 + 2 * (3.25 + 1.25))
    assert done.idle == 0
    assert {(g.exchange, g.count): g.exposed for g in done.groups.values()} == pytest.approx(
        {("all-gather", 2): 4500, ("reduce-scatter", 2): 6500, ("all-reduce", 2): 2500}
    )


@pytest.mark.parametrize(
    ("name", "among", "wanted"),
    [
        ("all-gather", (1, 1), 0),
        ("all-gather", (8, 1), 15e-6 + 7e-6 + 1e9 * 7 / 8 / 400e9),
        # Two machines: 14 steps inside and one between; the shares of 8 GPUs, of which a half is reached.
        ("reduce-scatter", (16, 1), 15e-6 + 14e-6 + 10e-6 + 1e9 * 15 / 16 / 200e9),
        # One GPU of each of four machines has its own share alone; log2(4) levels of a tree, up and down.
        ("all-reduce", (4, 8), 15e-6 + 2 * 2 * 10e-6 + 2 * 1e9 * 3 / 4 / 25e9),
        # Every second GPU of two machines.
        ("all-gather", (8, 2), 15e-6 + 6e-6 + 10e-6 + 1e9 * 7 / 8 / 100e9),
    ],
)
def test_links(name: str, among: tuple[int, int], wanted: float) -> None:
    assert links.seconds(name, 10**9, among, SPEED) == pytest.approx(wanted)


def test_the_roofline() -> None:
    matrix = Work(COMPUTE, "matrix", 10**12, 0, 10**9, "bf16", "", 0)
    assert matrix.seconds(SPEED) == pytest.approx(2e-3)  # 1e12 at half of 1e15; its bytes take half as long
    assert Work(COMPUTE, "matrix", 10**9, 0, 10**9, "bf16", "", 0).seconds(SPEED) == pytest.approx(1e-3)
    assert Work(COMPUTE, "attention", 10**12, 0, 0, "bf16", "", 0).seconds(SPEED) == pytest.approx(4e-3)
    assert Work(COMPUTE, "matrix", 10**12, 0, 0, "fp32", "", 0).seconds(SPEED) == pytest.approx(20e-3)
