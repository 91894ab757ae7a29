"""The trials: a table, one verdict, a file of flags, a picture, and how far the plans were off."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp2.config import Config
from fsdp2.options.parser import to_flags
from fsdp2.units import size
from fsdp2_tools import results
from fsdp2_tools.compare.report import markdown_table
from fsdp2_tools.tune.rounds import Candidate, deviation, interval, is_faster

SETTINGS = "tuned.json"
OF_A_RUN = ("run-dir", "resume", "resume-partial")
HEADINGS = ("setting", "step, ms", "of the default's", "samples/s", "peak memory", "planned", "losses")


def cells(tried: Sequence[Candidate]) -> list[list[str]]:
    """A row for each setting, the fastest first and those that are out last, with the reason in place of figures."""
    reference = next((one for one in tried if one.losses), tried[0])
    rows = []
    for one in sorted(tried, key=lambda one: (one.failed is not None, one.score)):
        if one.failed is not None:
            rows.append([one.name, f"out: {one.failed}"])
            continue
        off, step_ms = deviation(one, reference), statistics.median(one.step_ms)
        rows.append(
            [
                one.name,
                f"{step_ms:.1f} ({min(one.step_ms):.1f}–{max(one.step_ms):.1f})",
                f"{statistics.median(one.ratios):.2f}" if one.ratios else "–",
                f"{1000 * one.samples / (one.milliseconds(tried[0]) or step_ms):.0f}",
                size(one.peak_bytes),
                "–" if one.planned_bytes is None else size(one.planned_bytes),
                "reference" if one is reference else "equal" if off == 0 else f"off by {off:.0e}",
            ]
        )
    return rows


def verdict(tried: Sequence[Candidate], best: Candidate) -> list[str]:
    """Say what to do, in one or two lines, from the figures alone."""
    default = tried[0]
    if default.failed is not None:
        if best is default:
            return [f"Nothing ran: the default is out ({default.failed}). Plan it: python -m fsdp2.plan"]
        return [f"Use {best.name}: {statistics.median(best.step_ms):.1f} ms a step. The default is out."]
    found = interval(best.last)
    if not is_faster(best, default) or found is None:
        near = f"; {best.name} came nearest, with {_faster(best.last)}" if best.last else ""
        return [f"Keep the default: nothing that was tried is faster by more than this machine's noise{near}."]
    return [
        f"Use {best.name}: {_faster(best.last)}.",
        f"It takes {size(best.peak_bytes)} a rank; the default takes {size(default.peak_bytes)}.",
    ]


def _faster(ratios: Sequence[float]) -> str:
    found = interval(ratios)
    spread = f" (95 %: {_percent(found[1])} to {_percent(found[0])} %)" if found else ""
    return f"{_percent(statistics.median(ratios))} % more samples a second than the default{spread}"


def _percent(ratio: float) -> str:
    return f"{100 * (1 / ratio - 1):.0f}"


def flags(config: Config) -> dict[str, Any]:
    """All but those of a run, as a file for `--config` holds them: beside other flags a default is another one."""
    return {name: value for name, value in to_flags(config).items() if name not in OF_A_RUN}


def write(tried: Sequence[Candidate], best: Candidate, facts: dict[str, Any], out: Path) -> None:
    """The settings file, the table as Markdown and as JSON, and the picture, into a folder.

    `flags` and `measured` of each setting are what `fsdp2.plan --calibration` reads.
    """
    chosen = best if is_faster(best, tried[0]) else tried[0]
    results.write(out / SETTINGS, json.dumps({"flags": flags(chosen.config)}, indent=1) + "\n")
    told = [f"- {name}: {value}" for name, value in facts.items()]
    text = ["# Settings that were tried", "", *verdict(tried, best), "", markdown_table(HEADINGS, cells(tried)), ""]
    results.write(out / "tuned.md", "\n".join([*text, *told]) + "\n")
    found = [
        {
            "name": one.name,
            "changes": one.changes,
            "failed": one.failed,
            "planned": {"tensors": one.planned_bytes, "step_ms": one.planned_ms},
            "flags": flags(one.config),
            "measured": {"tensors": one.peak_bytes or None, "step_ms": one.milliseconds(tried[0])},
            "step_ms": one.step_ms,
            "ratios": one.ratios,
            "last_round": one.last,
            "losses": one.losses,
        }
        for one in tried
    ]
    results.write(out / "trials.json", json.dumps({"facts": facts, "trials": found}, indent=1) + "\n")
    _picture(tried, chosen, out / "tuned.png")


def _picture(tried: Sequence[Candidate], chosen: Candidate, path: Path) -> None:
    """Each setting's steps as a part of the default's, with their spread."""
    pyplot = results.pyplot()
    good = sorted((one for one in tried if one.failed is None and one.ratios), key=lambda one: one.score, reverse=True)
    figure, axes = pyplot.subplots(figsize=(10, 1.2 + 0.45 * max(1, len(good))), layout="constrained")
    for place, one in enumerate(good):
        low, middle, high = statistics.quantiles(one.ratios, n=4) if len(one.ratios) > 1 else 3 * [one.ratios[0]]
        axes.plot([low, high], [place, place], color="#bbbbbb", linewidth=5, zorder=1)
        axes.plot(middle, place, "o", color="#cc3311" if one is chosen else "#4477aa", zorder=2)
    axes.axvline(1, color="#888888", linewidth=1)
    axes.set_yticks(range(len(good)), [f"{one.name}  ({size(one.peak_bytes)})" for one in good])
    axes.set(xlabel="time of a step as a part of the default's beside it: median and quartiles; red is recommended")
    results.picture(figure, path)
