"""Loss and accuracy on a whole split, the same at any world size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.config import Config
from fsdp2.data.loader import Batch
from fsdp2.data.splits import IGNORED, Split
from fsdp2.models.spec import ModelSpec
from fsdp2.run.dataset import held_out_batches
from fsdp2.run.process.runtime import World


def evaluate(
    forward: Callable[[Batch], Any], split: Split, config: Config, world: World, device: torch.device
) -> dict[str, float]:
    """Mean loss, accuracy from 0 to 1, and count of targets, summed over ranks; of language perplexity too.

    A collective call.

    Call it in evaluation mode without gradients. Counts are summed as integers and losses in float64, so
    uneven shares don't shift the means.
    """
    sums = scored(forward, config.spec, held_out_batches(split, config, world, device), device)
    if not world.share(config.tp, config.sp).counts:
        sums.zero_()
    if world.world_size > 1:
        dist.all_reduce(sums)
    total, correct, count = sums.tolist()
    result = {"loss": total / count, "accuracy": correct / count, "count": int(count)}
    if config.spec.kind == "language":
        with numpy.errstate(over="ignore"):  # of a run that diverges it is infinite
            result["perplexity"] = float(numpy.exp(numpy.float64(result["loss"])))
    return result


def scored(forward: Callable[[Batch], Any], spec: ModelSpec, batches: Iterable[Batch], device: torch.device) -> Tensor:
    """Of this rank's batches (3,) float64: the sum of losses, correct targets, and targets. A collective call."""
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in batches:
        outputs = forward(batch)  # also for a placeholder: other ranks wait for this one's part
        if batch.valid:
            loss, correct = spec.scored(outputs, batch.targets)
            sums += torch.stack([loss.double(), correct, (batch.targets != IGNORED).sum()])
    return sums
