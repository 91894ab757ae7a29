"""Mixed precision where nothing casts the parameters: the forward runs under autocast.

FSDP casts parameters when it all-gathers them. DDP and a single process have no such moment; autocast picks a dtype
for each operation: other arithmetic, close results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from fsdp2.parallel.engine import Engine, Microbatch
from fsdp2.parallel.rules import Options


def reduces_in_fp32(options: Options) -> Iterator[str]:
    """Refuses to reduce gradients in another dtype than that of the parameters."""
    if options.reduce_dtype != "fp32" and options.reduce_dtype == options.mixed_precision:
        yield (
            f"--reduce-dtype {options.reduce_dtype} with --strategy {options.strategy}: its gradients are fp32, the "
            "dtype of its parameters; use --strategy fsdp2 or drop --reduce-dtype"
        )


class AutocastEngine(Engine):
    """A strategy whose model doesn't cast by itself: the forward runs under autocast."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler,
        context: AbstractContextManager[object],
    ) -> None:
        super().__init__(model, optimizer, scaler)
        self.autocast = context

    def forward(self, batch: Microbatch) -> Any:
        with self.autocast:
            return super().forward(batch)
