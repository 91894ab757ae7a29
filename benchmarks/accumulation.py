"""Costs of the modes of `--grad-accumulation-sync`: milliseconds a step, and bytes of tensors on a rank.

    torchrun --nproc_per_node 2 benchmarks/accumulation.py --model-size small --batch-size 4

All modes live in the same processes and take turns, so that they share the machine's good and bad moments. Data is
random images; flags are those of the training, a ViT.
"""

from __future__ import annotations

import statistics
import sys
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist

from fsdp2 import train
from fsdp2.allocations.ledger import Ledger
from fsdp2.config import parse
from fsdp2.parallel.engine import Engine
from fsdp2.run.process import runtime
from fsdp2.run.process.group import process_group

ROUNDS, MICROBATCHES = 8, 4


def microbatch(engine: Engine, size: int, last: bool) -> None:
    batch = SimpleNamespace(inputs=torch.randn(size, 1, 28, 28), last=last)
    loss = torch.nn.functional.cross_entropy(engine.forward(batch), torch.arange(size) % 10)
    engine.backward(loss / MICROBATCHES, last)


def step(engine: Engine, size: int) -> None:
    for index in range(MICROBATCHES):
        microbatch(engine, size, index == MICROBATCHES - 1)
    engine.clip(None)
    engine.step()


def measured_bytes(engine: Engine, size: int) -> tuple[int, int]:
    """Measure the bytes that a microbatch leaves behind, and the most that is alive in a step."""
    with Ledger() as ledger:
        ledger.watch(engine.model, engine.held())
        before = ledger.live_bytes
        microbatch(engine, size, False)
        time.sleep(0.1)  # gloo's thread lets go of buffers a moment later
        between = ledger.live_bytes - before
        for index in range(1, MICROBATCHES):
            microbatch(engine, size, index == MICROBATCHES - 1)
        engine.clip(None)
        engine.step()
    return between, ledger.peak_bytes


def main() -> None:
    world = runtime.world()
    runtime.set_threads(1, world)
    device = torch.device("cpu")
    with process_group(world, device):
        engines, size = {}, 0
        for mode, replicas in (("every", 1), ("last", 1), ("every", 2), ("last", 2), ("replica", 2)):
            own = [f"--grad-accumulation={MICROBATCHES}", f"--grad-accumulation-sync={mode}"]
            config = parse([*sys.argv[1:], *own, f"--replicas={replicas}", "--device=cpu"])
            spec, size = config.spec, config.batch_size
            engines[mode, replicas] = train.make_engine(config, spec, world, device, restoring=False)
        for engine in engines.values():
            step(engine, size)
        times: dict[tuple[str, int], list[float]] = {key: [] for key in engines}
        for _ in range(ROUNDS):
            for key, engine in engines.items():
                dist.barrier()
                began = time.perf_counter()
                step(engine, size)
                dist.barrier()
                times[key].append((time.perf_counter() - began) * 1000)
        for key, engine in engines.items():
            between, peak = measured_bytes(engine, size)
            if world.rank == 0:
                low, middle = min(times[key]), statistics.median(times[key])
                print(f"| `{key[0]}` | {key[1]} | {low:.0f} | {middle:.0f} | {between / 1e6:.1f} | {peak / 1e6:.1f} |")


if __name__ == "__main__":
    main()
