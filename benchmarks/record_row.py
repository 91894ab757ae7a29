"""One row of benchmarks/records.py, in a process of its own: `train_step` with made-up tokens, and what it took.

python3 benchmarks/record_row.py OUT.json SECONDS [flags of fsdp2.train]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fsdp2.config import Config, parse
from fsdp2.data.loader import Batch
from fsdp2.options.errors import ConfigError
from fsdp2.options.parser import to_flags
from fsdp2.parallel.engine import Engine
from fsdp2.report.throughput import Throughput
from fsdp2.run.process import ending, runtime
from fsdp2.run.process.group import gather, process_group
from fsdp2.run.process.runtime import World
from fsdp2.run.process.settings import process_settings
from fsdp2.train import make_engine, train_step
from fsdp2_extra.allocations.ledger import Ledger, by_kind

WARM_UP = 3  # steps: cuBLAS's workspaces, compiling, the optimizer's state
LEAST, MOST = 2, 12  # timed steps


def main(out: Path, seconds: float, flags: list[str]) -> None:
    """Writes what was found when it is known: the times before the ledger's step, which is slower.

    Args:
        seconds: in which the row should be done.
    """
    began = time.monotonic()
    world = runtime.world()
    warnings.simplefilter("ignore")
    try:
        config = parse(flags)
    except ConfigError as error:
        write(out, world, {"failed": str(error)})
        return
    settings = to_flags(config)
    if config.lora is not None:  # draw what it would load: 8B are 32 GB, and a step takes as long with any weights
        object.__setattr__(config, "init_from", None)
    device = runtime.pick_device(config.device, world)
    with process_group(world, device, config), process_settings(config):
        runtime.set_threads(config.threads, world)
        try:
            measure(config, world, device, out, began, seconds, settings)
        except ConfigError as error:
            write(out, world, {"failed": str(error)})
        except torch.OutOfMemoryError as error:
            write(out, world, {"failed": f"out of memory: {str(error).partition(chr(10))[0][:200]}"})


def measure(
    config: Config,
    world: World,
    device: torch.device,
    out: Path,
    began: float,
    seconds: float,
    settings: dict[str, Any],
) -> None:
    gpu = device.type == "cuda"
    engine = make_engine(config, world, device, restoring=False)
    batch = made_up(config, world, device)
    losses: list[torch.Tensor] = []

    def step() -> None:
        _, values = train_step(engine, iter([batch] * config.grad_accumulation), config, world, [])
        losses.append(values[0].detach())

    def wait() -> None:
        if gpu:
            torch.cuda.synchronize(device)

    built = time.monotonic() - began
    for _ in range(WARM_UP):
        step()
    wait()
    ready = time.monotonic() - began
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    times: list[float] = []
    # A third of what is left: the ledger's step, and the end, take their time too.
    until = time.monotonic() + (seconds - ready) / 3
    while len(times) < LEAST or (len(times) < MOST and time.monotonic() < until):
        start = time.perf_counter()
        step()
        wait()
        times.append(1000 * (time.perf_counter() - start))
    worst = gather(times)
    steps = [max(ranks) for ranks in zip(*worst, strict=False)]
    middle = statistics.median(steps)
    speed = Throughput(config, [(batch.inputs[0], batch.targets[0])], device, world.world_size)
    samples = config.batch_size * config.grad_accumulation * world.world_size
    found: dict[str, Any] = {
        "step_ms": middle,
        "all_ms": steps,
        **speed(samples, middle / 1000),
        "losses": [float(loss) for loss in losses],
        "built_seconds": built,
        "ready_seconds": ready,
        "world_size": world.world_size,
        "device": device.type,
        "settings": settings,
    }
    if gpu:
        free, total = torch.cuda.mem_get_info(device)
        found |= {
            "allocated_bytes": torch.cuda.max_memory_allocated(device),
            "reserved_bytes": torch.cuda.max_memory_reserved(device),
            "device_bytes": total - free,
        }
    write(out, world, found)
    if config.compile:  # what a compiled graph allocates passes no ledger
        return
    counts = counted(engine, batch, step, device)
    write(out, world, {**found, "ledger": counts})


def counted(engine: Engine, batch: Batch, step: Callable[[], None], device: torch.device) -> dict[str, int]:
    """Bytes of a further step: of kinds of tensors, `ledger` = the most at once, `allocated` = by the allocator, less
    what it had beside the ledger's tensors, and `reserved`; both 0 without a GPU."""
    # What is offloaded takes none of the device's memory.
    held = {kind: [t for t in tensors if t.device.type == device.type] for kind, tensors in engine.held().items()}
    activations, backward = 0, engine.backward

    def noting(loss: torch.Tensor, last_microbatch: bool) -> None:
        nonlocal activations
        ledger.phase("backward", 3)
        activations = by_kind(ledger.alive()).get("activations", 0)
        backward(loss, last_microbatch)

    vars(engine)["backward"] = noting
    others, gpu = 0, device.type == "cuda"
    with Ledger() as ledger:
        ledger.watch(engine.model, held)
        ledger.mark("data", [batch.inputs, batch.targets])
        state = by_kind(ledger.alive())
        if gpu:
            torch.cuda.synchronize(device)
            others = torch.cuda.memory_allocated(device) - ledger.live_bytes
            torch.cuda.reset_peak_memory_stats(device)
        ledger.phase("forward", 3)
        step()
    vars(engine)["backward"] = backward
    counts = {kind: state.get(kind, 0) for kind in ("parameters", "optimizer")}
    counts |= {"activations": activations, "ledger": ledger.peak_bytes, "allocated": 0, "reserved": 0}
    if gpu:
        torch.cuda.synchronize(device)
        counts["allocated"] = torch.cuda.max_memory_allocated(device) - others
        counts["reserved"] = torch.cuda.max_memory_reserved(device)
    return counts


def made_up(config: Config, world: World, device: torch.device) -> Batch:
    """A batch of random images or tokens: memory doesn't depend on what is in them."""
    if (vocabulary := config.spec.vocab_size(config.model_size)) is not None:
        inputs = targets = torch.randint(vocabulary, (config.batch_size, config.seq_len), device=device)
    else:
        inputs = torch.randn(config.batch_size, 1, 28, 28, device=device)
        targets = torch.randint(10, (config.batch_size,), device=device)
    ranks = world.world_size
    return Batch(inputs, targets, True, config.batch_size * ranks, targets.numel() * ranks, True)


def write(out: Path, world: World, found: dict[str, Any]) -> None:
    if world.rank == 0:
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    with ending.exit_status():
        main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
