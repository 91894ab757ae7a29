"""The comparison as pictures: step time against peak memory, and memory by kind. One page, one image."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from fsdp2_tools import results
from fsdp2_tools.compare.advice import efficient, step_ms
from fsdp2_tools.compare.measure import SHOWN_STEPS, Measured
from fsdp2_tools.compare.report import HEADINGS, cells
from fsdp2_tools.memory.html import COLOURS, themed


def write_image(found: Sequence[Measured], path: Path) -> None:
    """Both pictures side by side, as PNG."""
    pyplot = results.pyplot()
    good = [row for row in found if row.failed is None]
    figure, (scatter, bars) = pyplot.subplots(1, 2, figsize=(14, max(4.5, 0.45 * len(good) + 2)), layout="constrained")
    best = efficient(found)
    for row in good:
        times = sorted(row.step_ms)
        middle = step_ms(row)
        scatter.errorbar(
            row.peak_bytes / 1e6,
            middle,
            yerr=[[middle - times[len(times) // 4]], [times[3 * len(times) // 4] - middle]],
            fmt="D" if row in best else "o",
            color="#cc3311" if row in best else "#4477aa",
            ecolor="#bbbbbb",
        )
    scatter.set(xlabel="peak memory of a rank, MB", ylabel="step, ms (median and quartiles)")
    scatter.set_title("red: no other is both as fast and as small")
    scatter.margins(x=0.3, y=0.15)
    _label(scatter, [(row.peak_bytes / 1e6, step_ms(row), row.name) for row in good])
    left = [0.0] * len(good)
    for kind, colour in COLOURS.items():
        widths = [row.by_kind.get(kind, 0) / 1e6 for row in good]
        if any(widths):
            bars.barh([row.name for row in good], widths, left=left, color=colour, label=kind)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    bars.invert_yaxis()
    bars.set(xlabel="MB at the peak")
    if good:
        figure.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")
    results.picture(figure, path)


def _label(axes: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Name the points; where several lie together, their names stand one above the other."""
    axes.autoscale_view()
    taken: list[tuple[float, float]] = []
    for x, y, name in sorted(points, key=lambda point: point[1]):
        across, up = axes.transData.transform((x, y))
        height = up
        while any(abs(across - a) < 120 and abs(height - b) < 13 for a, b in taken):
            height += 2
        taken.append((across, height))
        axes.annotate(name, (x, y), xytext=(8, height - up + 4), textcoords="offset pixels", fontsize="small")


def write_memory_image(found: Sequence[Measured], path: Path) -> None:
    """A rank's memory by kind over its last steps, a panel for each row, as PNG; peaks are labelled.

    All panels share both axes. Time is counted in steps: a row whose steps are slower doesn't hold more memory for it.
    """
    pyplot = results.pyplot()
    good = [row for row in found if row.failed is None and row.over_time is not None and row.over_time.times]
    columns = min(3, max(1, len(good)))
    lines = max(1, -(-len(good) // columns))
    figure, grid = pyplot.subplots(
        lines,
        columns,
        figsize=(5 * columns, 3 * lines + 0.6),
        layout="constrained",
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    drawn: dict[str, Any] = {}
    for panel in grid.flat[len(good) :]:
        panel.set_visible(False)
    for row, panel in zip(good, grid.flat, strict=False):
        curves = row.over_time
        assert curves is not None
        kinds = [kind for kind in COLOURS if kind in curves.bytes]
        began, lasted = curves.times[0], max(curves.times[-1] - curves.times[0], 1e-9)
        times = [SHOWN_STEPS * (when - began) / lasted for when in curves.times]
        heights = [[amount / 1e6 for amount in curves.bytes[kind]] for kind in kinds]
        areas = panel.stackplot(times, heights, step="post", colors=[COLOURS[kind] for kind in kinds])
        drawn |= dict(zip(kinds, areas, strict=True))
        totals = [sum(column) for column in zip(*heights, strict=True)]
        peak = max(totals)
        at = times[totals.index(peak)]
        panel.plot([at], [peak], "v", color="black", markersize=5)
        panel.annotate(f"{peak:.1f} MB", (at, peak), xytext=(6, 4), textcoords="offset points", fontsize="small")
        panel.set(title=row.name)
        panel.margins(y=0.15)
    for panel in grid[:, 0]:
        panel.set_ylabel("MB of a rank")
    for panel in grid.flat[max(0, len(good) - columns) : len(good)]:
        panel.set_xlabel("steps")
        panel.tick_params(labelbottom=True)
    kinds = [kind for kind in COLOURS if kind in drawn]
    figure.legend([drawn[kind] for kind in kinds], kinds, loc="outside lower center", ncols=5, fontsize="small")
    results.picture(figure, path, dpi=90)


def page(found: Sequence[Measured], facts: dict[str, Any], lines: Sequence[str]) -> str:
    """The page, which needs no network."""
    table = "".join(
        f"<tr><td>{escape(line[0])}</td><td colspan={len(HEADINGS) - 1}>{escape(line[1])}</td></tr>"
        if len(line) == 2
        else "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>"
        for line in cells(found)
    )
    head = "".join(f"<th>{escape(heading)}</th>" for heading in HEADINGS)
    said = "; ".join(f"{escape(str(key))}: {escape(str(value))}" for key, value in facts.items())
    advised = "<br>".join(escape(line) for line in lines)
    measured = f"<div class=wide><table><tr>{head}</tr>{table}</table></div>"
    body = f"<p>{said}</p><p><b>{advised}</b></p>{measured}"
    return themed("Strategies compared", body, [_scatter(found), _bars(found)])


def _scatter(found: Sequence[Measured]) -> Any:
    import plotly.graph_objects as go

    good = [row for row in found if row.failed is None]
    best = efficient(found)
    sizes = [row.peak_bytes for row in good]
    middle = (min(sizes) + max(sizes)) / 2 if sizes else 0  # a name goes towards it, where it isn't cut off
    figure = go.Figure()
    for rows, name, colour, symbol in (
        ([row for row in good if row not in best], "others", "#4477aa", "circle"),
        (best, "no other is both as fast and as small", "#cc3311", "diamond"),
    ):
        figure.add_trace(
            go.Scatter(
                x=[row.peak_bytes for row in rows],
                y=[step_ms(row) for row in rows],
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [max(row.step_ms) - step_ms(row) for row in rows],
                    "arrayminus": [step_ms(row) - min(row.step_ms) for row in rows],
                    "thickness": 1,
                },
                text=[row.name for row in rows],
                textposition=["top left" if row.peak_bytes > middle else "top right" for row in rows],
                mode="markers+text",
                name=name,
                marker={"size": 10, "color": colour, "symbol": symbol},
                hovertemplate="%{text}: %{x:.4s}B, %{y:.1f} ms<extra></extra>",
            )
        )
    figure.update_xaxes(title="peak memory of a rank", ticksuffix="B", tickformat=".3s")
    figure.update_yaxes(title="step, ms: median, least and largest")
    return figure


def _bars(found: Sequence[Measured]) -> Any:
    import plotly.graph_objects as go

    good = [row for row in found if row.failed is None]
    figure = go.Figure()
    for kind, colour in COLOURS.items():
        sizes = [row.by_kind.get(kind, 0) for row in good]
        if any(sizes):
            figure.add_trace(
                go.Bar(
                    orientation="h",
                    y=[row.name for row in good],
                    x=sizes,
                    name=kind,
                    marker={"color": colour},
                    hovertemplate="%{x:.4s}B",
                )
            )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title="memory at the peak, by kind", ticksuffix="B", tickformat=".3s")
    figure.update_yaxes(autorange="reversed")
    return figure
