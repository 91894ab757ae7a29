"""A step at measured rates: what was measured is what the plan computes with, and no row of it is a finding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp2.config import Config
from fsdp2_tools.doctor import planned_step, step
from fsdp2_tools.doctor.judging import OK, Hosts
from fsdp2_tools.plan import links
from fsdp2_tools.plan.device import gpu
from tests.doctor.test_network import EIGHT, measured

CPU = torch.device("cpu")


def figures(hosts: Hosts, **changed: Any) -> dict[str, Any]:
    computed = {rank: {"flops": 5e10 + rank, "memory": 2e10 + rank} for rank in hosts.of}
    times = {"all-gather 65536": 4e-4, "all-gather 33554432": 5e-2, "all-reduce 65536": 9.0, "all-reduce 33554432": 9.0}
    found = step.measured(computed, measured([(0, 1)], **changed), dict.fromkeys(hosts.of, times), hosts)
    assert found is not None
    return found


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "fp32"), ("cuda", "bf16")])
@pytest.mark.parametrize("hosts", [EIGHT, Hosts(dict.fromkeys(range(8), ("vm", "127.0.0.1")))])
def test_a_plan_s_exchanges_and_products_take_what_was_measured(hosts: Hosts, device: str, dtype: str) -> None:
    found = figures(hosts)
    speed = planned_step.speed_of(device, found)
    for size, seconds in found["gathers"]:
        assert links.seconds("all-gather", size, (8, 1), speed) == pytest.approx(seconds)
    assert speed.flops[dtype] * speed.efficiency["matrix"] == pytest.approx(5e10)  # of the slowest rank
    assert speed.memory * speed.efficiency["memory"] == pytest.approx(2e10)


def test_links_of_a_host_and_between_hosts_keep_their_proportion() -> None:
    found = figures(EIGHT)
    between = found["links"][1]
    slower = planned_step.speed_of("cpu", found | {"links": [[1e-5, 8e9], between]})
    assert slower.link_latency / slower.network_latency == pytest.approx(1e-5 / between[0])
    assert slower.link / (2 * slower.network) == pytest.approx(8e9 / between[1])  # a host's two ranks share its network


@pytest.mark.parametrize(
    ("count", "hosts", "flags", "replicas"),
    [(8, 4, {}, 4), (8, 1, {}, 2), (8, 8, {}, 2), (2, 1, {}, None), (8, 1, {"replicas": 2}, None), (5, 1, {}, None)],
)
def test_replicas_shard_within_a_host(count: int, hosts: int, flags: dict[str, Any], replicas: int | None) -> None:
    other = planned_step.other_way(Config(**flags), {"ranks": count, "hosts": hosts})
    assert (None if other is None else other.replicas) == replicas


def test_hosts_with_different_numbers_of_ranks_are_not_planned() -> None:
    found = figures(Hosts({rank: ("a" if rank < 3 else "b", "") for rank in range(8)}))
    (row,) = step.rows(Config(), CPU, found)
    assert row.measured.startswith("not planned: hosts have different numbers of ranks")


def test_links_of_gpus_keep_the_proportion_of_the_planner_s_table() -> None:
    """A pair's TCP takes no NVLink."""
    found, table = figures(EIGHT), gpu("h100").speed
    assert table is not None
    first, second = (planned_step.speed_of("cuda", found | {"links": [one, one]}) for one in ([1e-5, 8e9], [1e-3, 1e9]))
    assert first == second
    assert first.link / first.network == pytest.approx(table.link / table.network)
    assert not planned_step.not_apart("cuda", figures(Hosts(dict.fromkeys(range(8), ("vm", "127.0.0.1")))))


@pytest.mark.slow  # processes plan
def test_a_step_is_planned_or_the_reason_is_said_and_neither_is_a_finding() -> None:
    found = figures(EIGHT)
    exchange, whole = step.rows(Config(model_size="tiny"), CPU, found)
    assert exchange.measured.partition(" ms")[0].startswith(
        ("all-gather of a block in", "reduce-scatter of a block in")
    )
    assert exchange.measured.count("; with --replicas 4: ") == 1
    assert "wait for exchanges; with --replicas 4: " in whole.measured
    (refused,) = step.rows(Config(strategy="ddp"), CPU, found)
    assert refused.measured.startswith("not planned: --strategy ddp: ")
    *_, on_gpus = step.rows(Config(model_size="tiny"), torch.device("cuda"), found)
    unknown = "not known, since GPUs' links within a host and between hosts aren't measured apart"
    assert on_gpus.measured.endswith(f"wait for exchanges; with --replicas 4: {unknown}")
    (refused_there,) = step.rows(Config(model_size="tiny", replicas=2), torch.device("cuda"), found)
    assert refused_there.measured == f"not planned: --replicas 2: {unknown}"
    (late,) = step.rows(Config(), CPU, found, patience=0.05)
    assert late.measured == "not planned in 0.05 s"
    assert {row.verdict for row in (exchange, whole, on_gpus, refused, refused_there, late)} == {OK}
    assert step.rows(Config(), CPU, None) == []
