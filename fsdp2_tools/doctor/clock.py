"""The distance between the hosts' clocks, asked through the store with its own error bars."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

from fsdp2_tools.doctor.asking import Asker, Here
from fsdp2_tools.doctor.judging import BAD, WORSE, Hosts, Row

APART = 1.0  # seconds; more, and logs of two hosts can't be put in order
REFUSED = 900.0  # seconds; S3 refuses a request that was signed so far off, as RequestTimeTooSkewed
ROUNDS = 5


def measure(here: Here) -> float:
    return time.time()


def ask_clocks(asker: Asker) -> dict[int, tuple[float, float]]:
    """By rank, seconds that its clock is ahead of rank 0's, and the error of that.

    An answer is from between the question and the arrival of all answers, so half of that time is the error. Of five
    rounds the shortest counts.
    """
    found = {0: (0.0, 0.0)}
    for _ in range(ROUNDS):
        before = time.time()
        answers = asker.ask("clock")
        half = (time.time() - before) / 2
        for rank, theirs in answers.items():
            if half < found.get(rank, (0.0, float("inf")))[1]:
                found[rank] = theirs - before - half, half
    return found


def rows(found: Mapping[int, tuple[float, float]], hosts: Hosts) -> list[Row]:
    """Judge all ranks' clocks. Of three hosts and more the median is right, of two rank 0's."""
    by_host = {hosts.of[rank]: ahead for rank, (ahead, _) in found.items()}
    norm, whose = (statistics.median(by_host.values()), "the median host's") if len(by_host) > 2 else (0.0, "rank 0's")
    far = {rank: abs(ahead - norm) for rank, (ahead, error) in found.items() if abs(ahead - norm) - error > APART}
    ahead, error = max(found.values(), key=lambda one: abs(one[0] - norm))
    row = Row("clocks", f"{ahead - norm:+.4f} s ± {error:.4f} s from {whose}", f"within {APART:g} s")
    verdict = BAD if max(far.values(), default=0) > REFUSED else WORSE
    return [row.judged(far, hosts, verdict, "start a time service there: chronyd or systemd-timesyncd")]
