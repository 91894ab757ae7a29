"""The time that a save keeps training waiting, and the time until it is on disk: ours beside its peers.

    torchrun --nproc_per_node 2 benchmarks/checkpoint.py --quick

All sides save the same state in one session: each once in every round, in an order that rotates, into a fresh
folder that is deleted afterwards. What was measured is written as a page into docs/notes/.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_page import Figures, Found, facts_of, page
from checkpoint_sides import Job, Save, Side, sides
from tables import write_within
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp2.checkpoint.disk import file_system
from fsdp2.checkpoint.state import AppState, RandomState
from fsdp2.options.errors import ConfigError
from fsdp2.options.parser import Parser
from fsdp2.run.process import ending, runtime
from fsdp2.run.process.group import broadcast, gather, process_group

PAGE = Path(__file__).parent.parent / "docs" / "notes" / "checkpoint-benchmark.md"
WIDTH = 2048  # of a block: a Linear of WIDTH x WIDTH
SETTLE_SECONDS = 1.0
PLAIN_STEPS = 4


def make_job(parameters: int, device: torch.device) -> Job:
    """Adam has taken a step, so that its state is there and isn't zero."""
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(blocks_of(parameters))]
        model = nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=WIDTH**-0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    app = AppState(model, optimizer, {"rng": RandomState(dist.get_rank(), device)})
    job = Job(model, optimizer, app, device, torch.randn(8, WIDTH, device=device))
    job.step()
    return job


def blocks_of(parameters: int) -> int:
    return max(1, round(parameters / (WIDTH * WIDTH + WIDTH)))


def plain_step_seconds(job: Job) -> float:
    """Mean of a few steps with no save under way, on the slowest rank."""
    dist.barrier()
    job.synchronize()
    began = time.perf_counter()
    for _ in range(PLAIN_STEPS):
        job.step()
    job.synchronize()
    return max(gather(time.perf_counter() - began)) / PLAIN_STEPS


def measure(job: Job, side: Side, folder: Path, expected: int) -> Figures:
    with side.open(job) as save, job.clocked():
        if side.keeps_buffers:
            _save_once(job, save, folder)
            _discard(folder)
        figures = _save_once(job, save, folder)
    if dist.get_rank() == 0:
        figures["bytes"] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if not expected <= figures["bytes"] <= 1.02 * expected:
            raise RuntimeError(f"{side.name} wrote {figures['bytes']:.0f} bytes, and the state has {expected}")
    _discard(folder)
    return figures


def _save_once(job: Job, save: Save, folder: Path) -> Figures:
    """The figures of one save; training goes on beside it until it is durable on all ranks."""
    dist.barrier()
    job.synchronize()
    job.waited, steps = 0.0, 0
    began = time.perf_counter()
    under_way = save(folder)
    if under_way is None:
        job.synchronize()
    returned = time.perf_counter()
    durable = returned
    if under_way is not None:
        while steps == 0 or any(gather(under_way.busy())):
            job.step()
            steps += 1
        job.synchronize()
    trained = time.perf_counter() - returned
    if under_way is not None:
        durable = under_way.wait()
    mine = {
        "call": returned - began,
        "wait": job.waited,
        "stall": returned - began + job.waited,
        "durable": durable - began,
        "step": (trained - job.waited) / max(1, steps),
        "trained": trained,
        "steps": float(steps),
    }
    ranks = gather(mine)
    return {key: max(figures[key] for figures in ranks) for key in mine}


def _discard(folder: Path) -> None:
    """Remove what was saved, and let the disk come to rest."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        os.sync()
        time.sleep(SETTLE_SECONDS)
    gc.collect()
    dist.barrier()


def run(job: Job, rounds: int, folder: Path, expected: int) -> Iterator[Found]:
    """Every side's figures, after each round; of "no save", the step alone. The first round isn't kept."""
    found: Found = {"no save": [], **{side.name: [] for side in sides(job.device)}}
    for number in range(rounds + 1):
        order = sides(job.device)
        order = order[number % len(order) :] + order[: number % len(order)]
        plain = {"step": plain_step_seconds(job)}
        results = {side.name: measure(job, side, folder / f"{number}-{i}", expected) for i, side in enumerate(order)}
        for name, figures in {"no save": plain, **results}.items():
            if "trained" in figures:
                figures["lost"] = figures["call"] + figures["trained"] - figures["steps"] * plain["step"]
            if number > 0:
                found[name].append(figures)
            if dist.get_rank() == 0:
                shown = "  ".join(f"{key} {value:.3f}" for key, value in figures.items() if key != "bytes")
                print(f"round {number or 'of warming up'}  {name:40}{shown}", flush=True)
        if number > 0:
            yield found


def main() -> None:
    about = "Measure saves of a sharded model, ours and others."
    parser = Parser(prog="benchmarks/checkpoint.py", description=about, allow_abbrev=False)
    parser.add_argument("--parameters", type=int, help="of the model (default: 200000000, with --quick 20000000)")
    parser.add_argument("--quick", action="store_true", help="a small model, to try the benchmark")
    parser.add_argument("--rounds", type=int, default=5, help="how often each side is measured (default: 5)")
    parser.add_argument("--dir", type=Path, default=Path(), help="where to save (default: the current folder)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    parser.add_argument("--seconds", type=float, help="begin no round after so many")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the results go (default: docs/notes/)")
    given = parser.parse_args()
    began = time.perf_counter()
    usual = 20_000_000 if given.quick else 200_000_000
    wanted = usual if given.parameters is None else given.parameters
    for flag, value in (("--parameters", wanted), ("--rounds", given.rounds)):
        if value < 1:
            raise ConfigError(f"{flag} {value}: must be 1 or more")
    parameters = blocks_of(wanted) * (WIDTH * WIDTH + WIDTH)
    size = 12 * parameters
    check_folder(given.dir, size)
    load = os.getloadavg()[0]  # before these ranks add theirs
    world = runtime.world()
    device = runtime.pick_device(given.device, world)
    runtime.set_threads(None, world)
    # So that rank 0 removes what it has written when torchrun ends it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with process_group(world, device):
        mine = tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=given.dir) if world.rank == 0 else None
        folder = Path(broadcast(str(mine)))
        try:
            job = make_job(parameters, device)
            for number, found in enumerate(run(job, given.rounds, folder, size), 1):
                if world.rank == 0:  # after each round, so that an interruption leaves a page of those before
                    facts = facts_of(device, parameters, number, given.dir, load)
                    write_within(given.page, page(found, facts, gpu=device.type == "cuda"), like=PAGE)
                late = given.seconds is not None and time.perf_counter() - began > given.seconds
                if any(gather(late)):
                    break
        finally:
            if world.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)  # an error of its own would hide why the run failed
        if world.rank == 0:
            print(f"\n{given.page.read_text()}\nwritten to {given.page}", flush=True)


def check_folder(folder: Path, size: int) -> None:
    """Raises ConfigError for a folder in which a save can't be measured."""
    if not folder.is_dir():
        raise ConfigError(f"--dir {folder}: is no folder; give one that exists")
    if (kind := file_system(folder)) in ("tmpfs", "ramfs"):
        raise ConfigError(f"--dir {folder}: lies in memory ({kind}), where nothing is durable; give one on a disk")
    if shutil.disk_usage(folder).free < 2 * size:
        free = shutil.disk_usage(folder).free / 1e9
        raise ConfigError(f"--dir {folder}: {free:.1f} GB are free and {2 * size / 1e9:.1f} are needed; choose another")


if __name__ == "__main__":
    with ending.exit_status():
        main()
