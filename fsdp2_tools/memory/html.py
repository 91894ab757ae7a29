"""An HTML file with figures in it that opens without a network, in a light and in a dark form."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

# Told apart by colour-blind readers too, on white and on black (after https://personal.sron.nl/~pault, "bright").
COLOURS = {
    "parameters": "#4477aa",
    "gathered parameters": "#66ccee",
    "gradients": "#228833",
    "optimizer": "#ccbb44",
    "buffers": "#999933",
    "activations": "#ee6677",
    "communication": "#aa3377",
    "data": "#bbbbbb",
    "temporary": "#dd8855",
    "before": "#777777",
}


def themed(title: str, before: str, figures: Sequence[Any], after: str = "") -> str:
    """The file.

    Args:
        before, after: HTML, above and below the figures.
        figures: of plotly, whose library goes into the file: 5 MB.
    """
    drawn = []
    for number, figure in enumerate(figures):
        figure.update_layout(
            height=560,
            margin={"l": 80, "r": 20, "t": 30, "b": 50},
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            modebar={"bgcolor": "rgba(0,0,0,0)"},
        )
        drawn.append(figure.to_html(full_html=False, include_plotlyjs=number == 0, div_id=f"figure{number}"))
    return _HEAD.replace("TITLE", escape(title)) + before + "".join(drawn) + after + _FOOT


_HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>TITLE</title>
<style>
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --rule: #d9d9d9; }
@media (prefers-color-scheme: dark) {
  :root:not([data-theme=light]) { --ink: #e6e6e6; --paper: #16181c; --rule: #3a3f47; }
}
:root[data-theme=dark] { --ink: #e6e6e6; --paper: #16181c; --rule: #3a3f47; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1200px; padding: 0 1rem; }
h1 { font-size: 1.4rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: .15rem .9rem .15rem 0; border-bottom: 1px solid var(--rule);
  white-space: nowrap; }
i { display: inline-block; width: .8em; height: .8em; margin-right: .45em; border-radius: 2px; }
div.wide { overflow-x: auto; }
@media (max-width: 600px) { .modebar-container { display: none; } }
button { float: right; font: inherit; color: inherit; background: none; border: 1px solid var(--rule);
  border-radius: 4px; }
</style>
<button id="theme">light / dark</button>
<h1>TITLE</h1>
"""

_FOOT = """
<script>
const root = document.documentElement, charts = document.querySelectorAll(".js-plotly-plot");
const narrow = matchMedia("(max-width: 600px)");
// On a phone a legend beside the plot would leave it a strip: it stands below, and the figure is higher by its height.
const plot = 420, axis = 60;
async function place() {
  for (const chart of charts) {
    const below = {"legend.orientation": "h", "legend.x": 0, "legend.yref": "container", "legend.y": 0,
      "legend.yanchor": "bottom", "margin.l": 55, "margin.r": 10, height: 2 * plot};
    const beside = {"legend.orientation": "v", "legend.x": 1.02, "legend.yref": "paper", "legend.y": 1,
      "legend.yanchor": "top", "margin.l": 80, "margin.r": 20, "margin.b": 50, height: 560};
    const now = narrow.matches;
    await Plotly.relayout(chart, now ? below : beside);
    const rows = now && chart._fullLayout.showlegend ? chart.querySelector(".legend").getBBox().height : 0;
    if (now) await Plotly.relayout(chart, {"margin.b": axis + rows, height: plot + rows});
    chart.style.height = chart.parentElement.style.height = `${chart.layout.height}px`;  // what is below moves, too
  }
}
narrow.addEventListener("change", place);
place();
function paint() {
  const style = getComputedStyle(root), ink = style.getPropertyValue("--ink"), rule = style.getPropertyValue("--rule");
  const paper = style.getPropertyValue("--paper");
  const look = {"font.color": ink, "modebar.color": ink, "hoverlabel.bgcolor": paper, "hoverlabel.font.color": ink};
  for (const chart of charts) {
    const axes = Object.keys(chart.layout).filter((name) => /^[xy]axis/.test(name));
    const lines = axes.flatMap((axis) => [[axis + ".gridcolor", rule], [axis + ".zerolinecolor", rule]]);
    Plotly.relayout(chart, {...look, ...Object.fromEntries(lines)});
  }
}
document.getElementById("theme").onclick = () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  paint();
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
paint();
</script>
</html>
"""
