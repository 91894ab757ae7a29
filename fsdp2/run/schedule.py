"""The learning rate over a run: `--schedule`, `--warmup-steps`, `--lr-floor`.

A rate is a function of how many optimizer steps are done, and of how many there will be; so a resumed run goes on with
the same rates, and one that is made longer with those of a longer run. A step whose update was skipped counts.
"""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR

from fsdp2.config import Config


class Schedule:
    """Sets the rates of an optimizer.

    Attributes:
        scheduler: torch's, whose state belongs to the run's. For `step` without a warm-up it counts epochs, as
            the tutorials have it; else optimizer steps.
    """

    def __init__(self, config: Config, optimizer: Optimizer, steps_per_epoch: int) -> None:
        self._by_epoch = config.schedule == "step" and not config.warmup_steps
        self.scheduler: LRScheduler
        if self._by_epoch:
            self.scheduler = StepLR(optimizer, step_size=1, gamma=config.gamma)
        else:
            self.scheduler = LambdaLR(optimizer, lambda step: factor(config, step, steps_per_epoch))

    def after_step(self) -> None:
        if not self._by_epoch:
            self.scheduler.step()

    def after_epoch(self) -> None:
        if self._by_epoch:
            self.scheduler.step()


def factor(config: Config, step: int, steps_per_epoch: int) -> float:
    """What `--lr` is multiplied by when `step` optimizer steps are done.

    The warm-up rises linearly and reaches 1 after `--warmup-steps`; `cosine` and `linear` fall from there to
    `--lr-floor` at the end of the run.
    """
    warm, floor = config.warmup_steps, config.lr_floor
    if step < warm:
        return (step + 1) / (warm + 1)
    if config.schedule == "step":
        return float(config.gamma ** (step // steps_per_epoch))
    if config.schedule == "constant":
        return 1.0
    total = config.epochs * steps_per_epoch
    if config.max_steps is not None:
        total = min(total, config.max_steps)
    done = min(1.0, (step - warm) / max(1, total - warm))
    return floor + (1 - floor) * ((1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done)
