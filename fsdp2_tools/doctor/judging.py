"""The doctor's report: rows with a verdict, and how the ranks that differ from the others are found and named."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fsdp2.options.errors import some

OK, WORSE, BAD = "ok", "worse", "bad"
VERDICTS = (OK, WORSE, BAD)  # by exit status

# A standard deviation of normal noise is 1.48 median absolute deviations; five of them are no noise.
DEVIATIONS = 5 * 1.4826

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Row:
    """One thing that was measured.

    Attributes:
        who: the rank, host or pair that the verdict is about; empty if it is about all.
        fix: what to do; empty if the verdict is ok.
    """

    name: str
    measured: str
    expected: str
    verdict: str = OK
    who: str = ""
    fix: str = ""

    def judged(self, ranks: Collection[int], hosts: Hosts, verdict: str, fix: str) -> Row:
        """The same with a verdict about these ranks; as it is if there are none."""
        return self.about(hosts.named(ranks) if ranks else "", verdict, fix)

    def about(self, who: str, verdict: str, fix: str) -> Row:
        """The same with a verdict about a rank, host or pair that has a name already; as it is if that is empty."""
        return dataclasses.replace(self, verdict=verdict, who=who, fix=fix) if who else self


def status(rows: Iterable[Row]) -> int:
    """0: fit; 1: worse than expected; 2: can't train."""
    return max((VERDICTS.index(row.verdict) for row in rows), default=0)


class Hosts:
    """The host of each rank, by the name and own address that it `found`: containers may share a name."""

    def __init__(self, found: Mapping[int, tuple[str, str]]) -> None:
        addresses: dict[str, set[str]] = {}
        for name, address in found.values():
            addresses.setdefault(name, set()).add(address)
        self.of = {
            rank: name if len(addresses[name]) == 1 else f"{name} {address}"
            for rank, (name, address) in found.items()
        }  # fmt: skip

    def ranks(self, host: str) -> list[int]:
        return [rank for rank, name in self.of.items() if name == host]

    def named(self, ranks: Iterable[int]) -> str:
        """`rank 3 (node2)`, `host node2` for all of its ranks, or `ranks 1, 2 (node1, node2)`."""
        found = sorted(set(ranks))
        hosts = list(dict.fromkeys(self.of.get(rank, "host unknown") for rank in found))
        whole = [one for host in hosts for one in self.ranks(host)]
        if len(found) > 1 and sorted(whole) == found and len(found) < len(self.of):
            return f"host{'s' * (len(hosts) > 1)} {some(hosts)}"
        return f"rank{'s' * (len(found) > 1)} {some(found)} ({some(hosts)})"


def far_above(values: Mapping[K, float], times: float, least: float = 0.0) -> list[K]:
    """The ranks whose value is far above the others': slow ones, from seconds.

    A value is far if it is so many times the median, beyond it by `least`, and by five deviations, which are estimated
    by the median absolute deviation: a few slow ranks don't hide themselves, as they would in a mean. Of two values the
    lower one is the norm.
    """
    if len(values) < 2:
        return []
    norm = statistics.median(values.values()) if len(values) > 2 else min(values.values())
    spread = statistics.median(abs(one - norm) for one in values.values()) if len(values) > 2 else 0.0
    bound = max(norm * times, norm + least, norm + DEVIATIONS * spread)
    return [key for key, one in values.items() if one > bound]


def same(name: str, found: Mapping[int, Any], hosts: Hosts, verdict: str, fix: str) -> list[Row]:
    """A row if ranks differ in a value; it names those that have another one than most."""
    counts = Counter(map(str, found.values()))
    usual = counts.most_common(1)[0][0] if counts else ""
    others = [rank for rank, value in found.items() if str(value) != usual]
    if not others:
        return []
    theirs = some(sorted({str(found[rank]) for rank in others}), 3)
    return [Row(name, theirs, f"{usual}, as on the others", verdict, hosts.named(others), fix)]


def beside_median(
    name: str,
    values: Collection[float],
    worst: Callable[[Collection[float]], float],
    show: Callable[[float], str],
    of: str = "rank",
) -> Row:
    """A row about the worst of several values, whose norm is their median."""
    norm = f"near the median {of}'s {show(statistics.median(values))}"
    return Row(name, f"{show(worst(values))} at worst", norm if len(values) > 1 else "nothing to compare it with")


def limit(
    name: str,
    found: Mapping[int, float],
    least: Mapping[int, float],
    show: Callable[[float], str],
    hosts: Hosts,
    fix: str,
) -> Row:
    """A row about the rank that has the least of something, beside what that rank needs."""
    lacking = [rank for rank, value in found.items() if value < least[rank]]
    lowest = min(lacking or found, key=lambda rank: found[rank] - least[rank])
    row = Row(name, show(found[lowest]), f"{show(least[lowest])} or more")
    return row.judged(lacking, hosts, WORSE, fix)
