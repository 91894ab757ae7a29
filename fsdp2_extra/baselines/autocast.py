"""Mixed precision where nothing casts the parameters: the forward runs under autocast.

FSDP casts parameters when it all-gathers them. DDP and a single process have no such moment; autocast picks a dtype
for each operation: other arithmetic, close results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fsdp2.parallel.autocast import autocast
from fsdp2.parallel.engine import Engine, Microbatch
from fsdp2.parallel.optimizer import make_optimizer
from fsdp2.parallel.precision import gradient_scaler
from fsdp2.parallel.rules import Options, Start


def reduces_in_fp32(options: Options) -> Iterator[str]:
    """Refuses to reduce gradients in another dtype than that of the parameters."""
    if options.reduce_dtype != "fp32" and options.reduce_dtype == options.mixed_precision:
        yield (
            f"--reduce-dtype {options.reduce_dtype} with --strategy {options.strategy}: its gradients are fp32, the "
            "dtype of its parameters; use --strategy fsdp2 or drop --reduce-dtype"
        )


class AutocastEngine(Engine):
    """A strategy whose model doesn't cast by itself: the forward runs under autocast."""

    def __init__(self, model: nn.Module, options: Options, start: Start) -> None:
        kind, compute = start.device.type, options.mixed_precision
        super().__init__(model, make_optimizer(options, model.parameters()), gradient_scaler(kind, compute))
        self.autocast = autocast(kind, compute)

    def forward(self, batch: Microbatch) -> Any:
        with self.autocast:
            return super().forward(batch)
