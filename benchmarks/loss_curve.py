"""The losses of a run as a picture:  python -m benchmarks.loss_curve runs/llama-10m docs/llama-10m.png"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    events = [json.loads(line) for line in (arguments.run / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "train"]
    tests = [event for event in events if event["kind"] == "eval"]
    figure, axis = pyplot.subplots(figsize=(7, 3.6))
    axis.plot([one["step"] for one in steps], [one["loss"] for one in steps], color="tab:blue", lw=1, label="training")
    for one in tests:
        label = f"test: {one['loss']:.2f}" + (f", perplexity {one['perplexity']:.1f}" if "perplexity" in one else "")
        axis.plot(one["step"], one["loss"], "o", color="tab:red", label=label)
    axis.set(xlabel="step", ylabel="loss")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(arguments.picture, dpi=110)


if __name__ == "__main__":
    main()
