"""The page that `checkpoint.py` writes from what it has measured."""

from __future__ import annotations

import platform
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_sides import has_torch_checkpointing
from tables import machine, spread

from fsdp2.checkpoint.disk import file_system
from fsdp2_tools.compare.report import markdown_table

UNHASHED, UNSYNCED, BACKGROUND = "ours, nothing hashed", "ours, nothing synced", "ours, asynchronous"
NO_GPU = "not measured: no GPU"

Figures = dict[str, float]  # of one save: seconds on the slowest rank, and "bytes" of all files on rank 0
Found = dict[str, list[Figures]]  # side -> its figures by round


def column(found: Found, side: str, key: str) -> str:
    return spread([figures[key] for figures in found[side]])


def ratios(found: Found, key: str, side: str, other: str) -> list[float]:
    return [mine[key] / theirs[key] for mine, theirs in zip(found[side], found[other], strict=True)]


def aims(found: Found, gpu: bool) -> str:
    def met(values: list[float], most: float) -> str:
        rounds = f"in {sum(value <= most for value in values)} of {len(values)} rounds"
        return f"**{'met' if statistics.median(values) <= most else 'not met'}**, {spread(values)}, {rounds}"

    others = [name for name in found if name.startswith(("dcp.async_save", "torch_checkpointing"))]
    best = min(others, key=lambda name: statistics.median(figures["stall"] for figures in found[name]))
    cpu = "not measured: this was a GPU" if gpu else met(ratios(found, "stall", BACKGROUND, best), 1.0)
    short = met([55 * ratio for ratio in ratios(found, "stall", BACKGROUND, "ours")], 1.0) if gpu else NO_GPU
    return f"""\
- A synchronous save is durable in at most 1.10 × `dcp.save`: {met(ratios(found, "durable", "ours", "dcp.save"), 1.10)}.
- On the CPU an asynchronous save stalls no longer than the best of the others, here {best} (ours ÷ it): {cpu}.
- On a GPU an asynchronous save stalls at most 1/55 of a synchronous one (55 × stall ÷ it): {short}."""


def page(found: Found, facts: dict[str, str], gpu: bool) -> str:
    saves = [name for name in found if name not in ("no save", UNHASHED, UNSYNCED)]
    rows = []
    for name in saves:
        against = [spread(ratios(found, key, name, "dcp.save")) for key in ("stall", "durable")]
        rows.append((name, *(column(found, name, key) for key in ("call", "wait", "stall", "durable")), *against))
    if "torch_checkpointing" not in found:
        rows.append(("torch_checkpointing", "not measured: `pip install torch-checkpointing`"))
    saving = markdown_table(
        ("", "call", "wait", "stall, both", "durable", "stall ÷ `dcp.save`", "durable ÷ `dcp.save`"), rows
    )
    plain: list[tuple[str, ...]] = [("no save", column(found, "no save", "step"))]
    for name in saves:
        if found[name][0]["steps"]:
            ratio = spread(ratios(found, "step", name, "no save"))
            plain.append((name, column(found, name, "step"), ratio, column(found, name, "lost")))
    beside = markdown_table(("", "step", "÷ no save", "lost in all"), plain)
    costs = markdown_table(
        ("", "durable", "÷ ours"),
        [
            (name, column(found, name, "durable"), spread(ratios(found, "durable", name, "ours")))
            for name in ("ours", UNHASHED, UNSYNCED)
        ],
    )
    sizes = [figures["bytes"] / 1e6 for name in saves for figures in found[name]]
    listed = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    return f"""{listed}

## Aims

{aims(found, gpu)}

## Saving

Training stands still during the call. Where the save goes on in the background it also waits before the next
`optimizer.step()`, until what that changes is copied. Training goes on beside such a save, which is therefore durable
later than one that has the machine to itself.

{saving}

Every side wrote the whole state, {min(sizes):.1f} to {max(sizes):.1f} MB in all its files.

## Training beside a save

Mean of the steps that began while the save went on, without the wait above. Lost is what the save cost training from
the call to the end of the last of these steps: the stall, and slower steps.

{beside}

## What hash and sync cost

Ours, synchronous, with one of them left out.

{costs}"""


def facts_of(device: torch.device, parameters: int, rounds: int, folder: Path, load: float) -> dict[str, str]:
    on = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU"
    peer = f", torch_checkpointing {version('torch_checkpointing')}" if has_torch_checkpointing() else ""
    # Where on this machine is nobody's business.
    arguments = [
        word for word, before in zip(sys.argv[1:], sys.argv, strict=False) if not {"--dir", "--page"} & {word, before}
    ]
    command = f"torchrun --nproc_per_node {dist.get_world_size()} benchmarks/checkpoint.py {' '.join(arguments)}"
    return {
        "Command": f"`{command.strip()}`; {rounds} rounds after one of warming up",
        "Date": time.strftime("%Y-%m-%d"),
        "State": f"{parameters / 1e6:.0f}M parameters, {12 * parameters / 1e9:.2f} GB with Adam's state",
        "Ranks": f"{dist.get_world_size()} on {on}, {dist.get_backend()}",
        "Threads": f"{torch.get_num_threads()} for each rank's torch",
        "Machine": machine(),
        "Load": f"{load:.1f} processes in the minute before; above 0.5 others took part in what was measured",
        "Disk": f"{file_system(folder) or 'unknown file system'}, a new folder for each save",
        "Versions": f"Python {platform.python_version()}, torch {torch.__version__}{peer}",
    }
