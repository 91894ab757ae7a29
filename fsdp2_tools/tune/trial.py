"""Short trials of several settings, on the ranks of one launch.

    torchrun --nproc_per_node 2 -m fsdp2_tools.tune.trial JOB.json

The job says `settings` (a command line each), `steps` (timed ones of each), `together`, `peak` and `out`. Trials
together are built first and then take their steps in turn, so that what slows the machine slows them all alike; one
after the other, each has the memory for itself. The findings go into `out`, one JSON object a line, so that a trial
that ends the process leaves those before it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp2.checkpoint.state import seed_everything
from fsdp2.config import Config, parse
from fsdp2.data.splits import Dataset
from fsdp2.evaluate import scored
from fsdp2.options.errors import ConfigError
from fsdp2.run.dataset import held_out_batches, load_data, training_batches
from fsdp2.run.process import ending, runtime
from fsdp2.run.process.group import gather, process_group
from fsdp2.run.process.runtime import World
from fsdp2.run.process.settings import growing_segments, process_settings
from fsdp2.train import make_engine, train_step
from fsdp2_extra.allocations.ledger import Ledger

# The first step makes what later ones find: gradients' memory, DTensor's rules, the allocator's blocks.
WARM_UP = 4
RECORDED = 2  # of them on a CPU, whose peak only a ledger knows
BATCHES = 8  # that are read, and gone through again


class Trial:
    """One setting, built and warmed up. Making it, and each step, is a collective call."""

    def __init__(self, config: Config, dataset: Dataset, world: World, device: torch.device, *, peak: bool) -> None:
        """`peak`: count bytes too, of an evaluation as well. `--memory-limit` holds here as in a training."""
        self.config, self.world, self.device = config, world, device
        batches = training_batches(config, dataset, world, device)
        self._batches = [list(microbatches) for microbatches in islice(batches, BATCHES)]
        self._done = 0
        self.losses: list[float] = []
        self.step_ms: list[float] = []
        self.peak_bytes = 0
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)  # by trials that share the memory
            torch.cuda.reset_peak_memory_stats(device)
        self.engine = make_engine(config, world, device, restoring=False)
        # Dropout of the first steps is the same for all settings.
        seed_everything(config.seed, world.rank // config.tp)
        self.losses += [self._step() for _ in range(WARM_UP - RECORDED)]
        with ExitStack() as watched:
            if peak and device.type == "cpu":
                ledger = Ledger(limit=config.memory_limit)
                ledger.watch(self.engine.model, self.engine.held())
                watched.enter_context(ledger)
            self.losses += [self._step() for _ in range(RECORDED)]
            if peak:  # one batch, as an evaluation takes it
                held_out = held_out_batches(dataset.test, config, world, device)
                with self.engine.evaluating():
                    scored(self.engine.forward, config.spec, islice(held_out, 1), device)
        if peak:
            on_gpu = device.type == "cuda"
            self.peak_bytes = torch.cuda.max_memory_allocated(device) - before if on_gpu else ledger.peak_bytes

    def timed_step(self) -> None:
        """A further step, and how long it took."""
        dist.barrier()
        began = time.perf_counter()
        self._step()
        self.step_ms.append(1000 * (time.perf_counter() - began))

    def _step(self) -> float:
        batch = self._batches[self._done % len(self._batches)]
        self._done += 1
        _, values = train_step(self.engine, iter(batch), self.config, self.world, [])
        return float(values[0])  # waits for the device

    def found(self) -> dict[str, Any]:
        """Of the slowest rank at each step, and of the fullest."""
        return {
            "losses": self.losses,
            "step_ms": [max(ranks) for ranks in zip(*gather(self.step_ms), strict=True)],
            "samples": self._batches[0][0].samples,
            "peak_bytes": max(gather(self.peak_bytes)),
        }


@growing_segments()
def main(job: dict[str, Any]) -> None:
    """Try each setting. A collective call; a trial that runs out of memory ends it with an exception."""
    configs = [parse(words) for words in job["settings"]]
    out, steps = Path(job["out"]), job["steps"]
    world = runtime.world()
    device = runtime.pick_device(configs[0].device, world)
    runtime.set_threads(configs[0].threads, world)
    with process_group(world, device), process_settings(configs[0]):
        # The settings differ in how they compute alone, so the samples and their order are the same.
        dataset = load_data(configs[0], world)
        trials: dict[int, Trial] = {}
        for number, config in enumerate(configs):
            if world.rank == 0:
                _append(out, {"begun": number})
            try:
                trials[number] = Trial(config, dataset, world, device, peak=job["peak"])
            except ConfigError as error:  # on every rank: the engine can't do it, and the next trial goes on
                if world.rank == 0:
                    _append(out, {"trial": number, "failed": str(error)})
            except (torch.OutOfMemoryError, MemoryError) as error:
                why = f"out of memory: {str(error).partition(chr(10))[0]}"
                _append(out, {"trial": number, "failed": why, "ended": True})
                raise
            if not job["together"]:
                _take(trials, steps, out, world)
                trials.clear()
                gc.collect()  # an engine is in cycles, and the next one needs its memory
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        gc.collect()
        _take(trials, steps, out, world)


def _take(trials: dict[int, Trial], steps: int, out: Path, world: World) -> None:
    """Timed steps of each in turn, every other time in the opposite order."""
    for sweep in range(steps):
        for trial in trials.values() if sweep % 2 == 0 else reversed(trials.values()):
            trial.timed_step()
    for number, trial in trials.items():
        found = trial.found()
        if world.rank == 0:
            _append(out, {"trial": number, **found})


def _append(out: Path, record: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def cli(arguments: Sequence[str]) -> None:
    main(json.loads(Path(arguments[0]).read_text()))


if __name__ == "__main__":
    with ending.exit_status():
        cli(sys.argv[1:])
