"""The timelines of a run, and what they say of a step."""

from __future__ import annotations

import re

from fsdp2.checkpoint.files import Files
from fsdp2.options.errors import ConfigError
from fsdp2_extra.allocations.timeline import Timeline, file_name, load


def read_timelines(files: Files, place: str) -> list[Timeline]:
    """The timelines of a run in the order of ranks. Raises ConfigError if there are none, or one is damaged."""
    pattern = re.compile(re.escape(file_name(0)).replace("rank0", r"rank([0-9]+)"))
    try:
        names = files.list("")
    except OSError as error:
        raise ConfigError(f"{place}: cannot be read ({error}); give the folder of a run") from None
    found = sorted((int(match[1]), name) for name in names if (match := pattern.fullmatch(name)))
    if not found:
        raise ConfigError(f"{place}: holds no {file_name(0)}; train with --memory-snapshot, which writes it")
    lines = []
    for _, name in found:
        try:
            lines.append(load(files.read(name)))
        except (ValueError, OSError) as error:
            raise ConfigError(f"{place}/{name}: {error}; train again with --memory-snapshot") from None
    return lines


def last_steps(line: Timeline, count: int) -> tuple[float, float]:
    """From when to when the last whole training steps went, in seconds since recording began."""
    ends = [phase for phase in line.phases if phase.name == "between" and phase.step > 0]
    trained = [phase for phase in ends if any(p.name == "optimizer" and p.step == phase.step for p in line.phases)]
    first, last = trained[-count:][0], trained[-1]
    began = min(phase.began for phase in line.phases if phase.step == first.step)
    return began, last.began


def exchanges(line: Timeline) -> dict[str, tuple[int, int]]:
    """Collective -> how many a step and their bytes, of the last whole step; broadcasts at the start are left out."""
    steps = [phase.step for phase in line.phases if phase.name == "between"]
    step = steps[-1] - 1 if len(steps) > 1 else max(steps, default=1)
    found: dict[str, tuple[int, int]] = {}
    for collective in line.collectives:
        if collective.step == step:
            count, amount = found.get(collective.name, (0, 0))
            found[collective.name] = (count + 1, amount + collective.bytes)
    return found
