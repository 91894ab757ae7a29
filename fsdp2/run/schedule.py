"""The learning rate over a run: `--schedule`, `--warmup-steps`, `--lr-floor`.

A rate is a function of how many optimizer steps are done and of how many there will be. A resumed run goes on with the
same rates; one that is made longer, or whose steps have another number of samples, goes on with those of an
uninterrupted run of its new length. A step whose update was skipped counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR

from fsdp2.config import Config
from fsdp2.data.loader import Batches
from fsdp2.options.checks import FALLING, require_reached
from fsdp2.options.errors import ConfigError


@dataclass(frozen=True)
class Course:
    """The steps that lie before a run, from where it begins or goes on.

    Attributes:
        step: optimizer steps that are done by then.
        epoch: the epoch of the next step.
        left_in_epoch: optimizer steps until that epoch is over; 0 if it is.
        steps_per_epoch: of each further epoch.
        left: optimizer steps until the run is over.
    """

    step: int
    epoch: int
    left_in_epoch: int
    steps_per_epoch: int
    left: int

    @property
    def total(self) -> int:
        return self.step + self.left

    def epochs_after(self, step: int) -> int:
        """The number of epochs that are over when so many optimizer steps are done."""
        beyond = step - self.step - self.left_in_epoch
        return self.epoch + (0 if beyond < 0 else 1 + beyond // self.steps_per_epoch)


class Length(NamedTuple):
    """The length of a run: `--epochs`, `--max-steps`, and samples in an optimizer step."""

    epochs: int
    max_steps: int | None
    samples: int


def course(length: Length, batches: Batches, step: int, trained: int) -> Course:
    """The course of a run from the place in the data where `batches` stands.

    Args:
        step: optimizer steps that the schedule counts as done.
        trained: those that `--max-steps` counts; more than `step` where an imported checkpoint brought some.
    """
    size = len(batches.split)
    per_epoch, in_epoch = -(-size // length.samples), -(-(size - batches.position) // length.samples)
    left = in_epoch + (length.epochs - batches.epoch - 1) * per_epoch if batches.epoch < length.epochs else 0
    if length.max_steps is not None:
        left = max(0, min(left, length.max_steps - trained))
    return Course(step, batches.epoch, in_epoch, per_epoch, left)


class Schedule:
    """Sets the rates of an optimizer.

    Attributes:
        scheduler: torch's, whose state belongs to the run's. For `step` without a warm-up it counts epochs, as
            the tutorials have it; else optimizer steps.
        course: what lies before the run; its `step` is as the scheduler counts.
    """

    def __init__(self, config: Config, optimizer: Optimizer, batches: Batches) -> None:
        self._config, self._batches = config, batches
        self._by_epoch = config.schedule == "step" and not config.warmup_steps
        self._length = Length(config.epochs, config.max_steps, batches.global_batch)
        self.course = course(self._length, batches, 0, 0)
        self.scheduler: LRScheduler
        if self._by_epoch:
            self.scheduler = StepLR(optimizer, step_size=1, gamma=config.gamma)
        else:
            self.scheduler = LambdaLR(optimizer, lambda step: factor(config, step, self.course))

    def go_on(self, trained: int, before: Length | None) -> str | None:
        """Take up the course that a restored run has from here on; what to say if its length or its rates changed.

        The rate of the next step may be another than the checkpoint's, which was that of the earlier course: that of a
        run of the length `before`, if it is known. By now `trained` optimizer steps are done.
        """
        name, step = self._config.schedule, self.scheduler.last_epoch
        if not self._by_epoch and step > trained:
            raise ConfigError(f"--resume: the schedule counts {step} steps, and its run has done {trained}")
        self.course = course(self._length, self._batches, step, trained)
        if step == 0:
            require_reached(self._config.warmup_steps, self.course.total)
        if self._by_epoch:
            rates = [group["lr"] for group in self.scheduler.optimizer.param_groups]
            wanted = [base * self._config.gamma**step for base in self.scheduler.base_lrs]
            # Multiplied epoch by epoch, a rate differs from that in its last bits.
            if all(map(math.isclose, rates, wanted)):
                return None
            words = ", ".join(f"{rate:g}" for rate in sorted({*rates}))
            return f"--schedule step goes on from the checkpoint's learning rate {words}; another begins with --lr"
        rate = factor(self._config, step, self.course)
        for group, base in zip(self.scheduler.optimizer.param_groups, self.scheduler.base_lrs, strict=True):
            group["lr"] = base * rate
        if before is not None and step != trained:
            return f"--schedule {name}: it counts {step} of the {trained} steps that are done"
        if before is None or (name not in FALLING and not 0 < self._config.warmup_steps < 1):
            return None  # the rates don't follow from the run's length
        total, earlier = self.course.total, course(before, self._batches, step, trained).total
        if total == earlier:
            return None
        return (
            f"--schedule {name}: this run ends at step {total}, and was to end at step {earlier}; from here "
            f"on it has the learning rates of a run of {total} steps"
        )

    def after_step(self) -> None:
        if not self._by_epoch:
            self.scheduler.step()

    def after_epoch(self) -> None:
        if self._by_epoch:
            self.scheduler.step()


def factor(config: Config, step: int, ahead: Course) -> float:
    """The factor on `--lr` when `step` optimizer steps are done.

    The warm-up rises linearly and reaches 1 after `--warmup-steps`, which is a share of the run if it is below 1;
    `cosine` and `linear` fall from there to `--lr-floor` at the end of the run.
    """
    warm, floor = config.warmup_steps, config.lr_floor
    if warm < 1:
        warm = math.ceil(warm * ahead.total)
    if step < warm:
        return (step + 1) / (warm + 1)
    if config.schedule == "step":
        return float(config.gamma ** ahead.epochs_after(step))
    if config.schedule == "constant":
        return 1.0
    done = min(1.0, (step - warm) / max(1, ahead.total - warm))
    left = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done}[config.schedule]
    return floor + (1 - floor) * left
