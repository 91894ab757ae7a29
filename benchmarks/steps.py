"""The time of a training step: our loop beside one written by hand, other strategies and other libraries.

    torchrun --nproc_per_node 2 benchmarks/steps.py --quick

All sides live in the same processes and take turns: in every round each does a few steps, in an order that rotates, so
that they share the machine's good and bad moments. Each starts from the same weights and gets the same batches; one
whose losses aren't those of the others is an error. What was measured is written as a page into docs/notes/.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from step_page import page
from step_sides import GPU_SIDES, SIDES, Job, NotHere, Side
from tables import write_page

from fsdp2 import data
from fsdp2.data.loader import Batch, Batches
from fsdp2.options.errors import ConfigError
from fsdp2.options.parser import Parser
from fsdp2.run.process import ending, runtime
from fsdp2.run.process.group import gather, process_group
from fsdp2_extra.allocations.ledger import Ledger

PAGE = Path(__file__).parent.parent / "docs" / "notes" / "step-benchmark.md"
CHECKED_STEPS = 3
# Rounding alone differs: sides compute their loss in other orders, and Adam amplifies what little that is.
TOLERANCE = 1e-4
HALF = 5e-2  # with 8 or 11 bits of mantissa
WRONG = "trains differently"


@dataclass
class Found:
    """Of one side. Milliseconds and bytes are those of the rank that had the most."""

    name: str
    why_not: str | None = None
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)  # one for each round
    peak_bytes: int = 0
    tensors: int = 0


def main() -> None:
    parser = Parser(prog="benchmarks/steps.py", allow_abbrev=False)
    parser.add_argument("--sides", default="", help="some of them, by a part of their name, separated by commas")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=6, help="of a side in a round; the first isn't counted")
    parser.add_argument("--seconds", type=float, help="begin no round after so many")
    parser.add_argument("--flags", default="", help="of the training: model, size, batch size")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help="two rounds, and no page")
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    began = time.perf_counter()
    world = runtime.world()
    device = runtime.pick_device(arguments.device, world)
    wanted = [part.strip() for part in arguments.sides.split(",") if part.strip()]
    usual = {**SIDES, **GPU_SIDES} if wanted or device.type == "cuda" else SIDES
    chosen = {name: make for name, make in usual.items() if not wanted or any(part in name for part in wanted)}
    reference = next(iter(SIDES))
    chosen = {reference: SIDES[reference], **chosen}
    # Autocast, hooks and deprecations of eleven libraries warn; what matters is measured.
    warnings.simplefilter("ignore")
    runtime.set_threads(None, world)
    with process_group(world, device), tempfile.TemporaryDirectory() as folder:
        flags = [*arguments.flags.split(), f"--device={device.type}"]
        job = Job(flags, world, device, Path(folder))
        batches = batches_of(job)
        found, sides = prepare(job, chosen, batches)
        rounds = 2 if arguments.quick else arguments.rounds
        for number in range(rounds):
            turn(found, sides, batches, device, arguments.steps, number)
            if world.rank == 0:  # after each round, so that an interruption leaves a page of those before
                text = page(
                    list(found.values()), arguments.flags, world.world_size, device, number + 1, arguments.steps
                )
                print(f"round {number + 1} of {rounds}", flush=True)
                if not arguments.quick:
                    write_page(arguments.page, text)
            if any(gather(arguments.seconds is not None and time.perf_counter() - began > arguments.seconds)):
                break
        if world.rank == 0:
            print(text)
        # Last, so that the others' figures are not lost with it.
        if wrong := [side.name for side in found.values() if (side.why_not or "").startswith(WRONG)]:
            raise RuntimeError(f"{', '.join(wrong)}: {WRONG}; the page says how")


def batches_of(job: Job) -> list[Batch]:
    """An epoch of the embedded data, on the device: reading data isn't what is compared."""
    config = job.config()
    spec = config.spec
    dataset = data.load(
        config.dataset, root=config.data_root, seq_len=config.seq_len, vocab_size=spec.vocab_size(config.model_size)
    )
    steps = Batches(
        dataset.train,
        global_batch=config.global_batch(job.world.world_size),
        accumulation=1,
        seed=config.seed,
        rank=job.world.rank,
        world_size=job.world.world_size,
        device=job.device,
    )
    whole = config.global_batch(job.world.world_size)
    return [batch for step in steps for batch in step if batch.samples == whole]


def prepare(job: Job, chosen: dict, batches: Sequence[Batch]) -> tuple[dict[str, Found], dict[str, Side]]:
    """Build each side and compare its first losses with those of the first. One that differs isn't measured."""
    found: dict[str, Found] = {}
    sides: dict[str, Side] = {}
    for name, make in chosen.items():
        found[name] = Found(name)
        try:
            side = make(job)
            losses = []
            for batch in batches[:CHECKED_STEPS]:
                loss = side.step(batch).double()
                dist.all_reduce(loss)
                losses.append(float(loss) / job.world.world_size)
            found[name].peak_bytes = peak(side, batches, job.device)
        except (NotHere, ConfigError) as error:
            found[name].why_not = str(error)
            continue
        except (ImportError, RuntimeError) as error:
            # On a machine that was borrowed for half an hour the other sides are still worth their rows.
            if job.world.world_size > 1 or not sides:
                raise
            found[name].why_not = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            continue
        found[name].losses = losses
        expected = next(iter(found.values())).losses
        tolerance = HALF if name.endswith(("bf16", "fp16")) else TOLERANCE
        if any(abs(a - b) > tolerance * b for a, b in zip(losses, expected, strict=True)):
            found[name].why_not = f"{WRONG}: losses {losses} instead of {expected}"
            continue
        sides[name] = side
    return found, sides


def turn(
    found: dict[str, Found],
    sides: dict[str, Side],
    batches: Sequence[Batch],
    device: torch.device,
    steps: int,
    number: int,
) -> None:
    """Each side once. The order rotates, so that none always follows the same other."""
    names = list(sides)
    first = number % len(names)
    gc.collect()
    gc.disable()  # a collection falls into whichever side is under way
    for name in names[first:] + names[:first]:
        side = sides[name]
        dist.barrier()
        times = []
        for index in range(steps):
            began = time.perf_counter()
            side.step(batches[(number * steps + index) % len(batches)])
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
        # The first finds the caches full of another side's tensors.
        found[name].step_ms.append(1000 * max(gather(statistics.median(times[1:]))))
    gc.enable()


def peak(side: Side, batches: Sequence[Batch], device: torch.device) -> int:
    """Bytes of this side's tensors when they are most, on the rank where they are most."""
    # What is offloaded takes none of the device's memory.
    kept = {kind: [t for t in tensors if t.device.type == device.type] for kind, tensors in side.held().items()}
    ledger = Ledger()
    ledger.watch(side.model, kept)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        others = torch.cuda.memory_allocated(device) - ledger.live_bytes
        torch.cuda.reset_peak_memory_stats(device)
        side.step(batches[0])
        side.step(batches[1])
        return int(max(gather(torch.cuda.max_memory_allocated(device) - others)))
    with ledger:
        side.step(batches[0])
        side.step(batches[1])
    return int(max(gather(ledger.peak_bytes)))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with ending.exit_status():
        main()
