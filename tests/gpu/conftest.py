from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu import harness
from tests.gpu.harness import DEVICE, Events, Ranks, needs, small


@pytest.fixture(autouse=True, scope="session")
def _there_is_a_gpu() -> None:
    if "FSDP2_TEST_DEVICE" not in os.environ:
        pytest.skip("has a run of its own: make test-gpu")
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU (make test-gpu; on the CPU: FSDP2_TEST_DEVICE=cpu)")


@pytest.fixture(scope="session")
def gpus(_there_is_a_gpu: None) -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture
def train(gpus: Ranks, tmp_path: Path) -> Callable[..., Events]:
    """Run `fsdp2.train` with the smallest model; rank 0's events. Skips where there are fewer GPUs than `count`."""

    def run(*flags: str, run: str = "run", count: int = 1) -> Events:
        needs(count)
        events: Events = gpus.run(harness.train, small(tmp_path / run, *flags), count=count)[0]
        return events

    return run
