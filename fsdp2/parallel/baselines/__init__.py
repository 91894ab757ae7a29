"""The strategies that FSDP2 is compared with. To add one, write its file and give it a line here."""

from __future__ import annotations

from fsdp2.parallel.baselines import ddp, fsdp1, none, zero
from fsdp2.parallel.baselines.rules import Baseline

BASELINES: dict[str, Baseline] = {
    "fsdp1": fsdp1.BASELINE,
    "ddp": ddp.BASELINE,
    "zero1": zero.ZERO,
    "zero2": zero.ZERO,
    "zero3": zero.ZERO3,
    "none": none.BASELINE,
}
