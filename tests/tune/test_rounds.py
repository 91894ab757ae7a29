"""The halving, with measures that are made up: who wins, who is out, and what is never recommended."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from fsdp2.config import Config
from fsdp2_tools.tune.report import verdict
from fsdp2_tools.tune.rounds import Candidate, Measure, Record, halve, interval, is_faster

CONFIG = Config()


def candidates(count: int) -> list[Candidate]:
    return [Candidate("default" if number == 0 else f"setting {number}", CONFIG) for number in range(count)]


def machine(speeds: dict[str, float], *, noise: float = 0.0, seed: int = 0, calls: list[int] | None = None) -> Measure:
    """A machine that becomes slower and faster, and on which a setting takes so many ms."""
    chance = random.Random(seed)

    def measure(there: Sequence[Candidate], steps: int) -> list[Record | None]:
        found: list[Record | None] = []
        if calls is not None:
            calls.append(len(there))
        drift = [chance.uniform(1, 3) for _ in range(steps)]
        for one in there:
            times = [speeds[one.name] * slow * (1 + noise * chance.gauss(0, 1)) for slow in drift]
            found.append({"losses": [2.0, 1.0], "step_ms": times, "samples": 8, "peak_bytes": 100})
        return found

    return measure


@pytest.mark.parametrize("together", [True, False])
def test_the_fastest_is_found_on_a_machine_whose_speed_drifts(together: bool) -> None:
    tried, calls = candidates(10), list[int]()
    speeds = {one.name: 100.0 - number for number, one in enumerate(tried)} | {"setting 4": 70.0}
    best = halve(tried[0], tried[1:], machine(speeds, calls=calls), steps=3, together=together)
    assert best.name == "setting 4"
    assert is_faster(best, tried[0])
    assert calls == [10, 5, 3] + [2] * (1 if together else 6)
    assert "43 % more samples a second" in verdict(tried, best)[0]


def test_noise_is_not_recommended() -> None:
    for seed in range(5):
        tried = candidates(10)
        same = dict.fromkeys((one.name for one in tried), 50.0)
        best = halve(tried[0], tried[1:], machine(same, noise=0.2, seed=seed), steps=2)
        assert not is_faster(best, tried[0])
        assert verdict(tried, best)[0].startswith("Keep the default")


def test_a_setting_that_was_lucky_once_is_not_recommended() -> None:
    default, other = tried = candidates(2)
    other.ratios = [0.1] * 50
    best = halve(default, [other], machine({"default": 50.0, "setting 1": 51.0}), steps=2)
    assert best is other
    assert not is_faster(best, default)
    assert "Keep the default" in verdict(tried, best)[0]


def failing(measure: Measure, name: str, change: Callable[[Candidate, Record], Record | None]) -> Measure:
    def changed(there: Sequence[Candidate], steps: int) -> list[Record | None]:
        pairs = zip(there, measure(there, steps), strict=True)
        return [change(one, record) if record and one.name == name else record for one, record in pairs]

    return changed


def _out_of_memory(one: Candidate, record: Record) -> None:
    one.failed = "out of memory"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_out_of_memory, "out of memory"),
        (lambda one, record: {**record, "losses": [2.0, 1.001]}, "trains differently: its losses are off by 1.0e-03"),
        (lambda one, record: {**record, "losses": [2.0, float("nan")]}, "trains differently"),
        (lambda one, record: {**record, "peak_bytes": 1001}, "takes 1.0 kB of tensors, and a rank may use 1.0 kB"),
    ],
)
def test_the_fastest_is_out_if_it_cant_be_used(change: Callable[..., Record | None], why: str) -> None:
    tried = candidates(4)
    speeds = {"default": 50.0, "setting 1": 20.0, "setting 2": 40.0, "setting 3": 60.0}
    measure = failing(machine(speeds), "setting 1", change)
    best = halve(tried[0], tried[1:], measure, steps=2, budget=1000)
    assert best.name == "setting 2"
    assert (tried[1].failed or "").startswith(why)


def test_a_default_that_does_not_run_is_beaten_by_what_does() -> None:
    tried = candidates(3)
    speeds = {"default": 1.0, "setting 1": 30.0, "setting 2": 20.0}
    best = halve(tried[0], tried[1:], failing(machine(speeds), "default", _out_of_memory), steps=2)
    assert best.name == "setting 2"
    assert is_faster(best, tried[0])
    assert verdict(tried, best)[0].endswith("The default is out.")


def test_no_round_begins_when_the_time_is_up() -> None:
    tried, calls = candidates(10), list[int]()
    halve(
        tried[0],
        tried[1:],
        machine(dict.fromkeys((c.name for c in tried), 50.0), calls=calls),
        steps=2,
        time_left=lambda: False,
    )
    assert calls == [10, 2]


def test_settings_of_the_second_round_are_measured_with_the_better_half() -> None:
    tried, calls = candidates(6), list[int]()
    late = [Candidate("late 1", CONFIG), Candidate("late 2", CONFIG)]
    speeds = {one.name: 100.0 - number for number, one in enumerate(tried)} | {"late 1": 60.0, "late 2": 90.0}
    asked: list[list[bool]] = []

    def more() -> list[Candidate]:
        asked.append([bool(one.ratios) for one in tried])
        return late

    best = halve(tried[0], tried[1:], machine(speeds, calls=calls), steps=2, more=more)
    assert best is late[0]
    assert asked == [[True] * 6]  # once, when the first round has been measured
    assert calls == [6, 5, 3, 2]


def test_settings_that_joined_are_measured_though_planning_them_took_the_time_that_was_left() -> None:
    tried, late = candidates(6), Candidate("late", CONFIG)
    left = iter([True, False, False, False])
    speeds = {one.name: 100.0 for one in tried} | {"late": 60.0}
    best = halve(tried[0], tried[1:], machine(speeds), steps=2, more=lambda: [late], time_left=lambda: next(left))
    assert best is late
    assert verdict([*tried, late], best)[0].startswith("Use late")


def test_times_are_told_as_if_all_had_been_measured_at_once() -> None:
    default, late, alone = candidates(3)
    default.step_ms, late.step_ms, late.ratios, alone.step_ms = [10.0, 30.0, 20.0], [900.0], [0.5], [7.0]
    assert [one.milliseconds(default) for one in (default, late, alone, Candidate("", CONFIG))] == [20, 10, 7, None]


def test_the_interval_of_a_median_is_between_ordered_values() -> None:
    assert interval([1.0] * 5) is None
    assert interval([3, 1, 2, 6, 5, 4]) == (1, 6)
    assert interval(list(range(1, 25))) == (7, 18)
