"""A plan beside torch's own tracker of memory, which counts in another way."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from fsdp2.config import Config, parse
from fsdp2.run.process.runtime import World
from fsdp2.train import train_step
from fsdp2_extra.allocations.ledger import Ledger
from fsdp2_tools.plan import batches, fake
from fsdp2_tools.plan.execute import engine_without_values
from tests.plan.taken import planned

LLAMA = "--model=llama --model-size=debug --batch-size=3 --seq-len=96 --dataset=random-tokens --test-batch-size=1"
LLAMA += " --no-save-model"
# What a plan counts beside: the order of an epoch's 1,024 samples, and what the step before has to report.
BESIDE = 4 * 1024 + 32


def fsdp_tracker(model: Any, optimizer: Any) -> Any:
    """Private: torch has no public tool that counts the memory of FSDP2 by kind. Here it is a test's second opinion."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    return FSDPMemTracker(model, optimizer)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flags", ["", "--reshard-after-forward=true --optimizer=sgd"])
def test_torchs_tracker_counts_the_same_bytes(flags: str) -> None:
    line = f"{LLAMA} {flags}"
    config = parse(line.split())
    # Without gloo's copy, which the tracker doesn't see.
    assert planned(line, gpu=True).parts["training"].bytes - BESIDE == _tracked(config)


def _tracked(config: Config) -> int:
    config = dataclasses.replace(config, on_nonfinite="continue")
    world = World(0, 2, 0, 2)
    with fake.fake_group(0, 2), ExitStack() as modes:
        engine = engine_without_values(config, config.spec, world, torch.device("cpu"), modes, fake.Values(), None)
        tracker = fsdp_tracker(engine.model, engine.optimizer)
        tracker.track_inputs((torch.empty(0),))
        with tracker:
            for step in range(2):
                ledger = Ledger(fake=True)  # to be told what is data
                microbatches = batches.microbatches(config, config.spec, world, ledger)
                train_step(engine, microbatches, config, world, [False, False])
                if step == 0:
                    tracker.reset_mod_stats()  # the first lacks the optimizer's state
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return int(snapshot["Total"])
