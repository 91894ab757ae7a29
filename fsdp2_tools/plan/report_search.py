"""The result of a search: a table, a file for `--config`, the frontier of memory and time as a picture."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp2.options.own_model import code_flags
from fsdp2.options.parser import to_flags
from fsdp2.units import short, size
from fsdp2_tools import results
from fsdp2_tools.plan.report_time import duration
from fsdp2_tools.plan.search import Setting, frontier

SETTINGS, PICTURE = "searched.json", "frontier.png"
SHOWN = 10


def lines(found: Sequence[Setting]) -> list[str]:
    """For the terminal: the best settings, those of the frontier with a star, and the verdict."""
    best = found[0]
    if not best.plan.fits:
        least = min(found, key=lambda one: one.plan.bytes)
        return [
            f"no setting fits in {size(best.plan.budget or 0)}: the least is {size(least.plan.bytes)}, with "
            f"{least.name}; use more ranks, a shorter --seq-len or a GPU with more memory"
        ]
    edge = {one.name for one in frontier([one for one in found if one.plan.fits])}
    rows = [f"{'a step':>10}  {'at best':>8}  {'at worst':>8}  {'device':>9}  setting"]
    for one in [one for one in found if one.plan.fits][:SHOWN]:
        time = one.plan.time
        assert time is not None
        figures = f"{duration(time.milliseconds):>10}  {duration(time.low):>8}  {duration(time.high):>8}"
        rows.append(f"{figures}  {size(one.plan.bytes):>9}  {one.name}{' *' if one.name in edge else ''}")
    fitting = sum(one.plan.fits for one in found)
    return [
        f"{len(found)} settings were planned, {fitting} fit; * is beaten by none in both memory and time:",
        *rows,
        "the predicted ranges overlap: measure the first few with python -m fsdp2.tune"
        if _overlap([one for one in found if one.plan.fits])
        else "no other's range reaches the first's",
    ]


def _overlap(fitting: Sequence[Setting]) -> bool:
    times = [one.plan.time for one in fitting[:2] if one.plan.time is not None]
    return len(times) == 2 and times[1].low < times[0].high


def as_data(found: Sequence[Setting]) -> list[dict[str, Any]]:
    """For JSON: each setting, the best first."""
    edge = {one.name for one in frontier([one for one in found if one.plan.fits])}
    return [
        {
            "flags": one.name,
            "bytes": one.plan.bytes,
            "fits": one.plan.fits,
            "step_ms": None if one.plan.time is None else one.plan.time.milliseconds,
            "frontier": one.name in edge,
        }
        for one in found
    ]


def write(found: Sequence[Setting], place: str | None) -> list[str]:
    """The best setting and the picture, into a folder, unset = plans/<time>. Returns what to do next."""
    if not found[0].plan.fits:
        return []
    out = results.folder(place, below="plans")
    flags = {name: value for name, value in to_flags(found[0].plan.config).items() if name not in ("run-dir", "resume")}
    results.write(out / SETTINGS, json.dumps({"flags": flags}, indent=1) + "\n")
    _picture(found, out / PICTURE)
    words = ["--config", short((out / SETTINGS).absolute()), *code_flags(found[0].plan.config)]
    return [f"train with the first: python -m fsdp2.train {shlex.join(words)}"]


def _picture(found: Sequence[Setting], path: Path) -> None:
    """Memory against time; names stand at the frontier."""
    pyplot = results.pyplot()
    figure, axes = pyplot.subplots(figsize=(10, 6), layout="constrained")
    edge = frontier(found)
    for there, colour in ((found, "#4477aa"), (edge, "#cc3311")):
        axes.plot([_gb(one) for one in there], [_ms(one) for one in there], "o", color=colour, markersize=5)
    axes.step([_gb(one) for one in edge], [_ms(one) for one in edge], where="post", color="#cc3311", linewidth=1)
    for number, one in enumerate(edge, 1):
        axes.annotate(str(number), (_gb(one), _ms(one)), xytext=(5, 4), textcoords="offset points")
    names = "\n".join(f"{number}  {one.name}" for number, one in enumerate(edge, 1))
    figure.supxlabel(names, x=0.02, ha="left", fontsize="small")
    budget = (found[0].plan.budget or 0) / 1e9
    if budget < 1.3 * max(map(_gb, found)):  # elsewhere it would push all points into a corner
        axes.axvline(budget, color="#888888", linewidth=1, linestyle="--")
    axes.set(xlabel="memory of a rank, GB (dashed: the budget)", ylabel="predicted time of a step, ms")
    results.picture(figure, path)


def _gb(one: Setting) -> float:
    return one.plan.bytes / 1e9


def _ms(one: Setting) -> float:
    assert one.plan.time is not None
    return one.plan.time.milliseconds
