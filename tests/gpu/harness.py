"""Run functions on ranks that each have a GPU, in processes that make their process group as a launcher's would.

    results = ranks.run(function, argument, …, count=1)

nccl takes one rank a GPU, so that most tests have one rank: FSDP2 shards nothing then and runs all the same, nccl and
streams included. `FSDP2_TEST_DEVICE=cpu` runs the same tests on the CPU with gloo, which shakes errors out of them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2.config import Config, parse
from fsdp2.parallel.engine import Engine
from fsdp2.run.process import runtime
from fsdp2.run.process.group import process_group
from fsdp2.train import main, make_engine
from tests.gpu.deadline import print_stacks

ROOT = Path(__file__).parent.parent.parent
DEVICE = os.environ.get("FSDP2_TEST_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
TIMEOUT = 150.0 if ON_GPU else 300.0  # seconds of a test; then its ranks print their stacks

Events = list[tuple[str, dict[str, Any]]]


def available() -> int:
    """Ranks that this machine can run."""
    return torch.cuda.device_count() if ON_GPU else 4


def needs(count: int) -> None:
    """Skip a test where there are fewer GPUs."""
    if available() < count:
        pytest.skip(f"needs {count} GPUs, and there are {available()}")


def small(run: Path | str, *flags: str) -> list[str]:
    """The command line of the smallest run, into a run directory."""
    return ["--model-size=tiny", "--batch-size=16", "--max-steps=6", f"--device={DEVICE}", f"--run-dir={run}", *flags]


class Ranks:
    """Processes that are kept from one test to the next; after a failure there are new ones."""

    def __init__(self) -> None:
        self._workers: list[ProcessPoolExecutor] = []

    def run(self, function: Callable[..., Any], *arguments: Any, count: int = 1) -> list[Any]:
        """The results of `function(*arguments)` on each rank. Raises what a rank raises."""
        while len(self._workers) < count:
            # Not forked: a process that has used CUDA can't be.
            spawn = multiprocessing.get_context("spawn")
            self._workers.append(ProcessPoolExecutor(1, spawn, initializer=faulthandler.enable))
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        futures = [
            worker.submit(_as_rank, rank, count, port, function, arguments)
            for rank, worker in enumerate(self._workers[:count])
        ]
        deadline = time.monotonic() + TIMEOUT
        try:
            return [future.result(max(0.0, deadline - time.monotonic())) for future in futures]
        except TimeoutError:
            print_stacks({process.pid or 0 for process in multiprocessing.active_children()})
            self.close()
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for process in multiprocessing.active_children():
            process.kill()
        for worker in self._workers:
            worker.shutdown(wait=False, cancel_futures=True)
        self._workers = []


def _as_rank(rank: int, count: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # read when cuBLAS starts; without it sums may differ between runs
        }
    )
    # Bit-equal losses are what most tests compare. Not with warn_only, where attention kernels (flash, cuDNN's,
    # the memory-efficient one) sum in any order. An operation that has no deterministic kernel fails its test; where
    # that hides the others, FSDP2_TEST_WARN_ONLY=1 lets it pass, and bits may then differ by chance.
    torch.use_deterministic_algorithms(True, warn_only=os.environ.get("FSDP2_TEST_WARN_ONLY") == "1")
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(rank)
    return function(*arguments)


def train(flags: list[str]) -> Events:
    """`fsdp2.train` with a command line; this rank's events. To be run by `Ranks`."""
    events: Events = []
    main(parse(flags), lambda kind, data: events.append((kind, data)))
    return events


@contextlib.contextmanager
def rank() -> Iterator[tuple[runtime.World, torch.device]]:
    """The process group of a test that needs no run: this rank and its device."""
    world = runtime.world()
    device = runtime.pick_device(DEVICE, world)
    with process_group(world, device):
        yield world, device


def engine(config: Config, world: runtime.World, device: torch.device) -> Engine:
    return make_engine(config, world, device, restoring=False)


def losses(events: Events) -> list[float]:
    return [data["loss"] for kind, data in events if kind == "train"]


def assert_bit_equal(found: list[float], expected: list[float]) -> None:
    """Assert equal losses; on a GPU, where other kernels may have been chosen, near ones, and print by how much."""
    if found == expected:
        return
    away = max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))
    assert ON_GPU, f"not bit-equal: {found} and {expected}"
    assert away <= 1e-6, f"neither bit-equal nor near ({away:.1e} relative): {found} and {expected}"
    print(
        f"not bit-equal, {away:.1e} relative: sums in another order, by kernels or sizes that differ; allowed is 1e-6"
    )


def of_kind(events: Events, wanted: str) -> list[dict[str, Any]]:
    return [data for kind, data in events if kind == wanted]


def launched(*command: str, count: int = 1, output: Any = subprocess.PIPE) -> subprocess.Popen[str]:
    """torchrun with a module and its arguments, in a process group of its own."""
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(count)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return subprocess.Popen(
        [*line, "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "-m", *command],
        text=True,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
