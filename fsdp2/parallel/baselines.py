"""The strategies that FSDP2 is compared with. To add one, write its file, and give it a name and a line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp2.parallel.rules import Baseline

NAMES = ("fsdp1", "ddp", "zero1", "zero2", "zero3", "none")


def baseline(name: str) -> Baseline:
    """The strategy of a name, with its rules; imports only that strategy's file. Raises KeyError for another name."""
    if name == "fsdp1":
        from fsdp2_extra.baselines import fsdp1

        return fsdp1.BASELINE
    if name == "ddp":
        from fsdp2_extra.baselines import ddp

        return ddp.BASELINE
    if name == "none":
        from fsdp2_extra.baselines import none

        return none.BASELINE
    if name in ("zero1", "zero2", "zero3"):
        from fsdp2_extra.baselines import zero

        return zero.ZERO3 if name == "zero3" else zero.ZERO
    raise KeyError(name)
