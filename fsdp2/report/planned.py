"""A plan in the run directory, beside the measurements of its run.

`python -m fsdp2.plan … --run-dir RUN` leaves the plan there, as data: nothing here plans.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp2.checkpoint.places import open_files
from fsdp2.config import Config
from fsdp2.options.parser import to_flags
from fsdp2.options.settings_file import read_table
from fsdp2.report import PLAN
from fsdp2.units import printable, size

# Flags that change neither what a step holds nor how long it takes.
FREE = {"run-dir", "resume", "resume-partial", "epochs", "max-steps", "seed", "lr", "gamma", "schedule", "warmup-steps"}
FREE |= {"lr-floor", "checkpoint-every", "keep", "keep-every", "save-model", "inspect", "tensorboard", "memory-limit"}
FREE |= {"memory-snapshot", "device", "threads", "timeout", "data-root", "verify", "init-from", "init-partial"}
FREE |= {"keep-best", "doctor", "on-anomaly", "check-replicas", "track", "run-name", "tag", "on-checkpoint-failure"}
FREE |= {"eval-dataset", "eval-every", "bad-samples", "tokenizer", "text-field", "chat-fields", "bos", "betas"}
FREE |= {"trust-remote-code", "lora-alpha"}


@dataclass(frozen=True)
class Planned:
    """A plan of this many ranks.

    Attributes:
        tensors: bytes of a rank's tensors at the peak.
        step_ms: the least, the likely and the most; None if the plan has no time.
        peak_in: where the peak is.
        other: flags that the plan has with other values.
    """

    tensors: int
    step_ms: tuple[float, float, float] | None
    peak_in: str
    other: tuple[str, ...]

    @property
    def line(self) -> str:
        """For the header."""
        time = "" if self.step_ms is None else f", a step in {_range(self.step_ms)}"
        other = f" (planned with other {', '.join(self.other)})" if self.other else ""
        return f"plan: {size(self.tensors)} of tensors a rank, in {self.peak_in}{time}{other}"

    def beside(self, tensors: int | None, step_ms: Sequence[float]) -> list[str]:
        """For the end of a run, with what was measured on this rank; `tensors` is None where nobody counts them."""
        if tensors is None:
            counted = "not counted here (on a CPU --memory-snapshot or --memory-limit does)"
        else:
            counted = f"{size(tensors)} measured ({tensors / self.tensors - 1:+.1%})"
        lines = [f"planned {size(self.tensors)} of tensors; {counted}"]
        if self.step_ms is not None and step_ms:
            measured = statistics.median(step_ms)
            off = measured / self.step_ms[1] - 1
            lines.append(f"planned a step in {_range(self.step_ms)}; {measured:.1f} ms measured ({off:+.1%})")
        return lines


def advice(place: str, world_size: int) -> str | None:
    """Bytes of a rank that flags save by the plan in a run's directory; None where it says nothing."""
    try:
        content = read_table(f"{place}/{PLAN}")
        found = content["advice"]
        if found["plan"]["ranks"] != world_size:
            return None
        saved = [f"  {printable(str(flag)[:80]):44}{size(int(count))} less" for flag, count in found["singly"].items()]
        together = " ".join(printable(str(flag)[:80]) for flag in found["flags"])
        end = f"together, {together}: {size(int(found['plan']['bytes']))} a rank"
        return "\n".join([f"what each flag saves by itself, as {PLAN} has planned it:", *saved, end]) if saved else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _range(step_ms: tuple[float, float, float]) -> str:
    return f"{step_ms[1]:.1f} ms ({step_ms[0]:.1f} to {step_ms[2]:.1f})"


def read(config: Config, world_size: int) -> Planned | str | None:
    """The plan in a run's directory for this many ranks; what is wrong with it; None if there is none."""
    if config.run_dir is None or open_files(config.run_dir).size(PLAN) is None:  # a new directory has none
        return None
    try:
        content = read_table(f"{config.run_dir.rstrip('/')}/{PLAN}")
        plans = {one["ranks"]: one for one in content["plans"]}
        if world_size not in plans:
            ranks = printable(", ".join(map(str, plans)))[:80]
            return f"plan: {PLAN} is for {ranks} ranks; python -m fsdp2.plan --ranks {world_size}"
        one, flags = plans[world_size], to_flags(config)
        there = content["flags"]
        time, tensors = one.get("time"), one["tensors"]
        step_ms = None if time is None else (time["low"], time["milliseconds"], time["high"])
        if not all(0 < number < 1 << 63 for number in (tensors, *(step_ms or ()))):
            raise ValueError("it plans what no step takes")
        return Planned(
            tensors,
            step_ms,
            printable(str(one["peak"]["phase"])[:80]),
            tuple(f"--{flag}" for flag, value in flags.items() if flag not in FREE and there.get(flag) != value),
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"plan: {PLAN} can't be read as one; python -m fsdp2.plan … --run-dir writes it again"
