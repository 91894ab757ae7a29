"""A timeline as one HTML file that needs no network: memory over time by kind, and what was alive at the peak."""

from __future__ import annotations

from html import escape
from typing import Any

from fsdp2.units import size
from fsdp2_extra.allocations.ledger import Allocation, Phase
from fsdp2_extra.allocations.timeline import Timeline
from fsdp2_tools.memory.html import COLOURS, themed
from fsdp2_tools.memory.series import series

PHASES = {
    "data": "#bbbbbb",
    "forward": "#66ccee",
    "backward": "#ee6677",
    "optimizer": "#ccbb44",
    "checkpoint": "#228833",
    "full model": "#44aa99",
    "evaluation": "#aa3377",
}
MOST_SHADES = 300  # beyond, the strip below the curves shows the phases, and the shades would only slow the page
MOST_BARS = 4000
MOST_ROWS = 200


def page(line: Timeline, source: str) -> str:
    """The page; `source` is what recorded the timeline, for the reader."""
    at, most = line.peak()
    ranks, model, strategy, device = (line.facts.get(k, "?") for k in ("world_size", "model", "strategy", "device"))
    title = f"Memory of rank {line.facts['rank']} of {ranks}: {model}, {strategy}"
    place = _place(line.phase_at(at))
    summary = f"Peak: {size(most)} after {at:.2f} s, in {place}, on the {device}; by {source}."
    kinds = "".join(
        f"<tr><td><i style='background:{COLOURS[kind]}'></i>{escape(kind)}</td><td>{size(count)}</td></tr>"
        for kind, count in sorted(line.by_kind(at).items(), key=lambda item: -item[1])
    )
    return themed(
        title,
        f"<p>{escape(summary)}</p><table>{kinds}</table>",
        [figure(line)],
        f"<h2>Alive at the peak</h2><div class=wide><table>{_alive(line, at)}</table></div>",
    )


def _place(phase: Phase) -> str:
    return f"{phase.name} of step {phase.step}" if phase.step else phase.name


def _alive(line: Timeline, at: float) -> str:
    """The rows of a table, largest first; without the columns that the recording knows nothing of."""
    alive = line.alive(at)
    rows = [_row(line, allocation) for allocation in alive[:MOST_ROWS]]
    known = [name for name in rows[0] if any(row[name] for row in rows)] if rows else []
    cells = [[f"<th>{name}</th>" for name in known], *([f"<td>{row[name]}</td>" for name in known] for row in rows)]
    rest = alive[MOST_ROWS:]
    if rest:
        total = size(sum(allocation.bytes for allocation in rest))
        cells.append([f"<td>{total}</td><td colspan={len(known) - 1}>in {len(rest)} smaller ones</td>"])
    return "".join(f"<tr>{''.join(row)}</tr>" for row in cells)


def _row(line: Timeline, allocation: Allocation) -> dict[str, str]:
    freed = "at the end of the recording or later"
    if allocation.died is not None:
        freed = f"{_place(line.phase_at(allocation.died))}, {allocation.died:.2f} s"
    kind = allocation.kind or "temporary"
    return {
        "size": size(allocation.bytes),
        "kind": f"<i style='background:{COLOURS[kind]}'></i>{escape(kind)}",
        "module": escape(allocation.module),
        "operation": escape(allocation.operation),
        "allocated in": escape(f"{_place(line.phases[allocation.phase])}, {allocation.born:.2f} s"),
        "freed in": escape(freed),
    }


def figure(line: Timeline) -> Any:
    """Memory by kind over time, the phases below it, and the peak."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    at, most = line.peak()
    drawn = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.93, 0.07], vertical_spacing=0.03)
    curves = series(line)
    for kind, values in curves.bytes.items():
        drawn.add_trace(
            go.Scatter(
                x=[round(t, 5) for t in curves.times],
                y=values,
                name=kind,
                stackgroup="memory",
                line={"shape": "hv", "width": 0.5, "color": COLOURS[kind]},
                hovertemplate="%{y:.4s}B",
            ),
            row=1,
            col=1,
        )
    ends = [*(phase.began for phase in line.phases[1:]), max(curves.times, default=0.0)]
    stretches = [
        (phase, until) for phase, until in zip(line.phases, ends, strict=True) if phase.name in PHASES and until > 0
    ]
    _strip(drawn, go, stretches)
    if len(stretches) <= MOST_SHADES:
        for phase, until in stretches:
            drawn.add_shape(
                type="rect",
                x0=phase.began,
                x1=until,
                y0=0,
                y1=1,
                yref="y domain",
                fillcolor=PHASES[phase.name],
                opacity=0.12,
                line_width=0,
                layer="below",
            )
    drawn.add_trace(
        go.Scatter(
            x=[at],
            y=[most],
            mode="markers+text",
            marker={"size": 9, "symbol": "diamond", "color": "#cc3311"},
            text=[f"peak {size(most)}"],
            textposition="top center",
            hoverinfo="skip",
            showlegend=False,
        ),
        row=1,
        col=1,
    )
    drawn.update_layout(hovermode="x unified", barmode="overlay", legend={"traceorder": "reversed"})
    drawn.update_yaxes(ticksuffix="B", tickformat=".3s", range=[0, most * 1.1], row=1, col=1)
    drawn.update_yaxes(showticklabels=False, showgrid=False, fixedrange=True, row=2, col=1)
    drawn.update_xaxes(ticksuffix=" s", row=2, col=1)
    return drawn


def _strip(figure: Any, go: Any, stretches: list[tuple[Phase, float]]) -> None:
    """A line of bars that says which phase of which step it is; of very many the longest."""
    shown = sorted(stretches, key=lambda item: item[0].began - item[1])[:MOST_BARS]
    for name, colour in PHASES.items():
        bars = [(phase, until) for phase, until in shown if phase.name == name]
        if bars:
            figure.add_trace(
                go.Bar(
                    orientation="h",
                    y=["phase"] * len(bars),
                    base=[phase.began for phase, _ in bars],
                    x=[until - phase.began for phase, until in bars],
                    marker={"color": colour, "line": {"width": 0}},
                    name=name,
                    customdata=[phase.step for phase, _ in bars],
                    hovertemplate=f"{name} of step %{{customdata}}<extra></extra>",
                    showlegend=False,
                ),
                row=2,
                col=1,
            )
