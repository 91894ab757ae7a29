"""The search beside brute force, and what it says where nothing fits."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

from fsdp2.config import Config, parse
from fsdp2.options.errors import ConfigError
from fsdp2_tools.plan.plans import Plan, plan
from fsdp2_tools.plan.search import (
    HEAVIER,
    Setting,
    choices,
    frontier,
    is_heavier,
    lighter,
    neighbours,
    search,
    varied,
)

LLAMA = ["--model=llama", "--model-size=debug", "--batch-size=4", "--seq-len=96", "--no-save-model"]
WAYS: dict[str, list[dict[str, Any]]] = {
    "replicas": [{"replicas": 1}, {"replicas": 2}],
    "activation_checkpointing": [{"activation_checkpointing": None}, {"activation_checkpointing": "block"}],
    "batch_size": [{"batch_size": 4, "grad_accumulation": 1}, {"batch_size": 2, "grad_accumulation": 2}],
}


def _brute_force(config: Config, plans: dict[str, Plan]) -> list[Setting]:
    found = {}
    for combination in product(*WAYS.values()):
        changes = {k: v for way in combination for k, v in way.items() if v != getattr(config, k)}
        changed = dataclasses.replace(config, **changes)
        found[repr(changed)] = Setting(changes, plans[repr(changed)])
    return sorted(found.values(), key=lambda one: one.cost)


def test_the_search_finds_what_brute_force_finds() -> None:
    config = parse(LLAMA)
    every = {}
    for combination in product(*WAYS.values()):
        changed = dataclasses.replace(config, **{k: v for way in combination for k, v in way.items()})
        every[repr(changed)] = plan(changed, 2, None, None)
    sizes = sorted(one.bytes for one in every.values())
    for budget in (None, sizes[-1], sizes[len(sizes) // 2], sizes[1], sizes[0], sizes[0] - 1):
        plans = {name: dataclasses.replace(one, budget=budget) for name, one in every.items()}
        asked: list[str] = []

        def replan(changed: Config, flags: str, plans: dict[str, Plan] = plans, asked: list[str] = asked) -> Plan:
            asked.append(flags)
            return plans[repr(changed)]

        best = _brute_force(config, plans)
        narrow = search(config, WAYS, replan)
        assert narrow[0].cost == best[0].cost, budget
        assert len(asked) == len(set(asked)) <= len(plans)
        wide = search(config, WAYS, replan, width=1000)
        fitting = [one.cost for one in best if one.plan.fits]
        assert [one.cost for one in wide if one.plan.fits] == fitting
        assert wide[0].plan.fits == (budget is None or budget >= sizes[0])


def test_what_is_heavier_takes_no_less_memory_and_is_not_planned_where_less_does_not_fit() -> None:
    config = parse(["--model=llama", "--model-size=debug", "--batch-size=2", "--seq-len=16", "--no-save-model"])
    ways = choices(config, 4, gpu=True)
    ways = {name: ways[name] for name in ("replicas", *HEAVIER)}
    ways["replicas"], ways["shard_granularity"] = ways["replicas"][:2], ways["shard_granularity"][::3]
    ways["explicit_prefetching"] = ways["explicit_prefetching"][:2]
    every = {}
    for combination in product(*ways.values()):
        changes = {k: v for way in combination for k, v in way.items()}
        if not (changes["shard_granularity"] == "root" and changes["explicit_prefetching"]):  # which is refused
            changed = dataclasses.replace(config, **changes)
            every[repr(changed)] = plan(changed, 4, None, None)
    pairs = [(a, b) for a in every.values() for b in every.values() if a is not b and is_heavier(a.config, b.config)]
    assert len(pairs) > len(every)
    for heavier, lighter_one in pairs:
        # Padding of dimension 0 may cost a lighter one a few bytes.
        assert heavier.tensors >= 0.9999 * lighter_one.tensors, (heavier.config, lighter_one.config)
    budget = sorted(one.bytes for one in every.values())[len(every) // 4]
    asked: list[str] = []

    def replan(changed: Config, flags: str) -> Plan:
        asked.append(flags)
        return dataclasses.replace(every[repr(changed)], budget=budget)

    found = search(config, ways, replan, width=1000)
    kept = {repr(one.plan.config) for one in found if one.plan.fits}
    assert {
        repr(one.config) for one in every.values() if one.bytes <= budget and one.config.shard_granularity == 1
    } <= kept
    assert len(asked) < len(every)


def test_as_many_replicas_as_ranks_have_nothing_to_prefetch_or_keep() -> None:
    config = parse(LLAMA)
    ways = choices(config, 4, gpu=True)
    there = [*neighbours(config, {"replicas": 4}, ways)]
    assert {"replicas": 4, "reshard_after_forward": False} not in there
    assert {"replicas": 4, "explicit_prefetching": 1} not in there
    assert {"replicas": 2, "explicit_prefetching": 1} in neighbours(config, {"replicas": 2}, ways)
    assert "explicit_prefetching" not in choices(config, 4, gpu=False)


def test_a_search_passes_over_what_cant_be() -> None:
    config = parse(LLAMA)
    base = plan(config, 2, None, None)

    def replan(changed: Config, flags: str) -> Plan:
        if changed != config:
            raise ConfigError("--x: no")
        return base

    assert [one.changes for one in search(config, WAYS, replan)] == [{}]


def test_choices_leave_what_is_trained_alone() -> None:
    config = parse([*LLAMA, "--grad-accumulation=3"])
    for ways in choices(config, 4, gpu=True).values():
        for changes in ways:
            there = dataclasses.replace(config, **changes)
            assert there.global_batch(4) == config.global_batch(4)
            assert changes.keys().isdisjoint({"lr", "mixed_precision", "optimizer", "seed", "seq_len"})
    assert set(lighter(config, choices(config, 4, gpu=True))) == {
        "replicas",
        "shard_granularity",
        "reshard_after_forward",
        "explicit_prefetching",
        "batch_size",
    }
    split = parse([*LLAMA, "--tp=2"])  # whose logits are split already
    assert "chunked_loss" not in lighter(split, choices(split, 4, gpu=True))
    assert choices(config, 4, gpu=True)["replicas"] == [{"replicas": 1}, {"replicas": 2}, {"replicas": 4}]
    assert "cpu_offload" not in choices(config, 4, gpu=False)
    assert "chunked_loss" not in choices(parse([]), 4, gpu=True)
    assert "batch_size" not in choices(parse(["--global-batch-size=64"]), 4, gpu=True)


def _made_up(memory: int, time: float, **changes: Any) -> Setting:
    class Made:
        bytes, fits = memory, True

    Made.time = type("Time", (), {"milliseconds": time})()  # type: ignore[attr-defined]
    return Setting(changes, Made())  # type: ignore[arg-type]


def test_the_frontier_is_what_no_other_beats() -> None:
    small, fast, beaten = _made_up(1, 9.0), _made_up(5, 2.0), _made_up(6, 3.0)
    assert frontier([fast, beaten, small]) == [small, fast]


def test_each_flag_is_among_the_candidates_by_itself() -> None:
    names = ({"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 1, "c": 1}, {"a": 2}, {"a": 1}, {"b": 2}, {"b": 1}, {"c": 1})
    ranking = [_made_up(1, float(number), **changes) for number, changes in enumerate(names)]
    assert [one.changes for one in varied(ranking, 5)] == [names[0], names[1], names[3], names[5], names[7]]
    assert varied(ranking, 1) == [ranking[3]]
    assert varied(ranking, 99) == ranking
