"""Plans as one HTML file that needs no network: memory and exchanges over a step, and sliders over ranks and batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from fsdp2.config import Config
from fsdp2.units import size
from fsdp2_extra.allocations.timeline import Timeline
from fsdp2_tools.memory.html import COLOURS, themed
from fsdp2_tools.memory.page import figure as memory_figure
from fsdp2_tools.plan.device import Gpu
from fsdp2_tools.plan.execute import run
from fsdp2_tools.plan.peaks import LOGITS
from fsdp2_tools.plan.plans import Plan
from fsdp2_tools.plan.report import heading, where
from fsdp2_tools.plan.report_time import duration
from fsdp2_tools.plan.steptime import replayed

ROWS = {"computation": "#4477aa", "all-gather": "#66ccee", "reduce-scatter": "#ee6677", "all-reduce": "#aa3377"}
MOST_BARS = 6000


def batches(config: Config) -> list[int]:
    """Batch sizes that a page has plans of: the flags' own, and a quarter to four times as much."""
    if config.global_batch_size is not None:
        return [config.batch_size]
    own = config.batch_size
    return sorted({own, *(own // part for part in (2, 4) if own % part == 0), 2 * own, 4 * own})


def page(plans: Sequence[Plan], gpu: Gpu | None, config: Config, say: Callable[[str], None]) -> str:
    """The page, of `plans` for every number of ranks with every batch size."""
    ranks = plans[0].ranks
    say(f"drawing a step of {ranks:,} ranks")
    runs = run(config, ranks, 0, gloo=gpu is None or gpu.on_cpu)
    memory = memory_figure(in_order(runs.longer.timeline))
    memory.update_xaxes(ticksuffix="", row=2, col=1, title="allocations and releases, one after the other")
    figures, titles = [memory], ["Memory"]
    drawn = f"Memory: rank 0 of {ranks:,}, over two steps and an evaluation"
    if runs.short is not None:
        whole = runs.whole(lambda done: len(done.blocks))
        drawn += f", with {len(runs.longer.blocks)} of the {whole} equal blocks; all else here is of the whole model"
    if gpu is not None and gpu.speed is not None:
        figures.append(_exchanges(replayed(runs, gpu.speed, config).spans))
        titles.append("What runs when")
    figures.append(_kinds(plans))
    titles.append("At the peak")
    for figure, title in zip(figures, titles, strict=True):
        figure.update_layout(title={"text": title, "x": 0.01, "y": 0.99, "font": {"size": 15}})
    figures[-1].update_layout(height=330)
    told = "".join(f"<p>{escape(line)}</p>" for line in [*heading(plans[0], gpu), drawn])
    return themed(f"Plan: {config.model} {config.model_size}", told, figures, _sliders(plans, len(figures) - 1))


def in_order(line: Timeline) -> Timeline:
    """The timeline with the number of a moment in place of its time: times of a planning say nothing."""
    moments = {a.born for a in line.allocations} | {a.died for a in line.allocations if a.died is not None}
    moments |= {phase.began for phase in line.phases}
    number = {when: float(index) for index, when in enumerate(sorted(moments))}
    allocations = [
        replace(a, born=number[a.born], died=None if a.died is None else number[a.died]) for a in line.allocations
    ]
    return replace(
        line, allocations=allocations, phases=[replace(phase, began=number[phase.began]) for phase in line.phases]
    )


def _exchanges(spans: Sequence[tuple[str, str, str, float, float]]) -> Any:
    import plotly.graph_objects as go

    shown = sorted(sorted(spans, key=lambda span: span[3] - span[4])[:MOST_BARS], key=lambda span: span[3])
    figure = go.Figure()
    for row, colour in ROWS.items():
        there = [span for span in shown if (span[0] if span[0] in ROWS else "computation") == row]
        if there:
            figure.add_trace(
                go.Bar(
                    orientation="h",
                    y=[row] * len(there),
                    base=[1e3 * begin for *_, begin, _ in there],
                    x=[1e3 * (end - begin) for *_, begin, end in there],
                    customdata=[f"{name or 'root'}, {phase}" for _, name, phase, _, _ in there],
                    marker={"color": colour, "line": {"width": 0}},
                    name=row,
                    hovertemplate="%{customdata}: %{x:.3g} ms<extra></extra>",
                    showlegend=False,
                )
            )
    figure.update_layout(barmode="overlay", height=330)
    figure.update_xaxes(ticksuffix=" ms")
    figure.update_yaxes(autorange="reversed", fixedrange=True)
    return figure


def _columns(plan: Plan) -> dict[str, int]:
    return {**plan.memory.peak.kinds, **{term.name: term.bytes for term in plan.extra}}


def _kinds(plans: Sequence[Plan]) -> Any:
    """One stacked bar, whose values the sliders set."""
    import plotly.graph_objects as go

    first = _columns(plans[0])
    figure = go.Figure()
    shades = ["#555555", "#888888", "#aaaaaa", "#cccccc"]
    for name in _names(plans):
        colour = COLOURS.get(name) or (COLOURS["activations"] if name == LOGITS else shades[len(figure.data) % 4])
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=["a rank"],
                x=[first.get(name, 0)],
                name=name,
                marker={"color": colour, "opacity": 0.6 if name == LOGITS else 1},
                hovertemplate="%{x:.4s}B",
            )
        )
    figure.update_layout(barmode="stack", legend={"orientation": "h", "y": -0.3})
    most = max(max(plan.bytes, plan.budget or 0) for plan in plans)
    figure.update_xaxes(ticksuffix="B", tickformat=".3s", range=[0, 1.05 * most])
    budget = plans[0].budget
    if budget is not None:
        figure.add_vline(x=budget, line={"color": "#cc3311", "dash": "dash"})
    return figure


def _names(plans: Sequence[Plan]) -> list[str]:
    return list(dict.fromkeys(name for plan in plans for name in _columns(plan)))


def _sliders(plans: Sequence[Plan], number: int) -> str:
    ranks = sorted({plan.ranks for plan in plans})
    sizes = sorted({plan.config.batch_size for plan in plans})
    names = _names(plans)
    cells = {
        f"{plan.ranks} {plan.config.batch_size}": {
            "x": [_columns(plan).get(name, 0) for name in names],
            "text": _said(plan),
        }
        for plan in plans
    }
    own = plans[0]
    data = json.dumps({"ranks": ranks, "sizes": sizes, "cells": cells}).replace("</", "<\\/")
    return (
        _SLIDERS.replace("DATA", data)
        .replace("FIGURE", f"figure{number}")
        .replace("RANKS", str(len(ranks) - 1))
        .replace("SIZES", str(len(sizes) - 1))
        .replace("RANK0", str(ranks.index(own.ranks)))
        .replace("SIZE0", str(sizes.index(own.config.batch_size)))
    )


def _said(plan: Plan) -> str:
    words = [f"{size(plan.bytes)} a rank ({size(plan.tensors)} of tensors); the peak is in {where(plan.memory.peak)}"]
    if plan.budget is not None:
        words.append(f"{'fits' if plan.fits else 'does not fit'} in {size(plan.budget)}")
    if plan.time is not None:
        time = plan.time
        speed = f"a step in {duration(time.milliseconds)} ({duration(time.low)} to {duration(time.high)})"
        words.append(f"{speed}, of which {duration(time.exposed_ms)} wait for exchanges; MFU {time.mfu:.0%}")
    return "; ".join(words)


_SLIDERS = """
<div class=wide><table>
<tr><td><label for=ranks>ranks</label></td><td><input type=range id=ranks min=0 max=RANKS value=RANK0></td>
<td id=ranks-shown></td></tr>
<tr><td><label for=batch>batch a rank</label></td><td><input type=range id=batch min=0 max=SIZES value=SIZE0></td>
<td id=batch-shown></td></tr></table></div>
<p id=said></p>
<script>
const plans = DATA;
function choose() {
  const ranks = plans.ranks[document.getElementById("ranks").value];
  const batch = plans.sizes[document.getElementById("batch").value];
  const cell = plans.cells[ranks + " " + batch];
  document.getElementById("ranks-shown").textContent = ranks;
  document.getElementById("batch-shown").textContent = batch;
  document.getElementById("said").textContent = cell ? cell.text : "not planned";
  if (cell) Plotly.restyle("FIGURE", {x: cell.x.map((value) => [value])});
}
for (const name of ["ranks", "batch"]) document.getElementById(name).oninput = choose;
choose();
</script>
"""
