"""The page of the step benchmark."""

from __future__ import annotations

import platform
import statistics
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from tables import machine

from fsdp2_tools.compare.report import markdown_table

MB = 1e6


def page(found: list[Any], flags: str, ranks: int, device: torch.device, rounds: int, steps: int) -> str:
    reference = found[0]
    rows, missing = [], []
    for side in found:
        if side.why_not is not None:
            missing.append(f"- {side.name}: {side.why_not}")
            continue
        ratios = [a / b for a, b in zip(side.step_ms, reference.step_ms, strict=True)]
        away = max(abs(a - b) / b for a, b in zip(side.losses, reference.losses, strict=True))
        rows.append(
            (
                side.name,
                quartiles(side.step_ms, 1),
                quartiles(ratios, 3),
                f"{side.peak_bytes / MB:.2f}",
                "equal" if away == 0 else f"{away:.0e}",
            )
        )
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else machine()
    return (
        f"""# What a step takes

Written by `benchmarks/steps.py`. All sides live in the same {ranks} processes and take turns: {rounds} rounds, in each
{steps} steps of every side, the first of which isn't counted. A cell is the median over rounds, with the quartiles; a
ratio is taken within each round. Same weights, same batches, same optimizer; the last column is how far the first
losses are from those of the first row, relatively.

- Flags: `{flags or "none: the ViT, 64 samples a rank, Adam"}`; {ranks} ranks, device {device.type}
- Date: {time.strftime("%Y-%m-%d")}
- Machine: {where}
- Versions: Python {platform.python_version()}, {", ".join(versions())}

{markdown_table(("", "step, ms", "of the minimal loop's", "peak of tensors, MB a rank", "losses"), rows)}

{"Not measured here:" if missing else ""}

{chr(10).join(missing)}
""".rstrip()
        + "\n"
    )


def quartiles(values: list[float], digits: int) -> str:
    """Median and quartiles: one round in which something else ran is not what the table shows."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def versions() -> list[str]:
    there = []
    for name in ("torch", "accelerate", "lightning", "megatron-fsdp", "deepspeed"):
        try:
            there.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return there
