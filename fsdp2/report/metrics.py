"""The reports of a run: events, the metrics file, and the values of a step on their way from the device.

`emit(kind, data)` is called on every rank; a listener decides on which of them it does anything.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp2.checkpoint.disk import disk_errors
from fsdp2.checkpoint.files import LocalFiles, publish

OnEvent = Callable[[str, dict[str, Any]], None]


class MetricsFile:
    """metrics.jsonl: one JSON object a line, written by rank 0.

    Floats are written in full precision; infinity and NaN, which JSON has no numbers for, as null.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._file = open(path, "a+b") if rank == 0 else None  # noqa: SIM115 - lives as long as the run

    def __call__(self, kind: str, data: dict[str, Any]) -> None:
        if self._file is not None:
            said = {"kind": kind, **data, "time": round(time.time(), 3)}
            record = {key: None if _not_finite(value) else value for key, value in said.items()}
            with disk_errors(self._path):
                self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
                self._file.flush()

    def position(self, *, durable: bool = True) -> int:
        """Bytes written; durable when this returns, because a checkpoint on a disk will refer to them."""
        if self._file is None:
            return 0
        with disk_errors(self._path):
            if durable:
                os.fsync(self._file.fileno())
            return self._file.seek(0, os.SEEK_END)

    def cut(self, position: int, step: int) -> str | None:
        """Forget what was written after `position`, where the file ended at the checkpoint of `step`.

        The steps after it will be done again. The record of the checkpoint itself stays: it could only be written
        after the position was taken. A file that is damaged before the position is written again with the records
        that can be read; then a line is returned that says what is missing.
        """
        if self._file is None or self.position(durable=False) == position == 0:
            return None
        from fsdp2.report import records  # here: a run that begins reads none

        if not records.is_whole(self._file, position, step):
            lines, missing = records.readable(self._file, step)
            self._file.close()
            publish(LocalFiles(self._path.parent), self._path.name, lines)
            self._file = open(self._path, "a+b")  # noqa: SIM115
            return missing
        self._file.seek(position)
        line = self._file.readline(records.LONGEST_LINE)
        record = records.parse(line) or {}
        if position and (record.get("kind"), record.get("step")) == ("checkpoint", step):
            position += len(line)
        self._file.truncate(position)
        return None

    def last_steps(self, count: int) -> list[dict[str, Any]]:
        """The newest `train` records, at most `count`, the oldest first; [] on ranks that don't write."""
        if self._file is None:
            return []
        from fsdp2.report import records

        self._file.seek(max(0, self._file.seek(0, os.SEEK_END) - count * records.USUAL_LINE))
        found = [record for line in self._file if (record := records.parse(line)) and record["kind"] == "train"]
        return found[-count:]

    def close(self) -> None:
        if self._file is not None:
            with disk_errors(self._path):  # it writes what an earlier write could not
                self._file.close()


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def nonfinite(record: dict[str, Any]) -> str:
    """Name the values of a `train` record that are NaN or infinite; "" if none is.

    Under fp16 an overflow of gradients is no fault: the gradient scaler leaves out the step and lowers its scale.
    """
    names = {"loss": "loss"} if "loss_scale" in record else {"loss": "loss", "grad_norm": "gradient norm"}
    return " and ".join(f"the {name} is {record[key]}" for key, name in names.items() if _not_finite(record[key]))


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes this rank has held: allocated on its GPU, else resident in the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS counts bytes, others KiB


class StepLog:
    """Emits a `train` event for each step, one step late.

    The values are copied from the device while the next step is being issued; reading them at once would
    make the CPU wait for the GPU in every step. `stop` is how many ranks have had a stop signal, `failed`
    how many have seen a save fail, `nonfinite` in how many steps so far the loss or gradients were no numbers: all
    read the same sums at the same step, and so stop together.

    Args:
        on_nonfinite: is called with the step and what of it was no number, when that is known.
        on_finite: is called with the record of each other step.
        speed: (samples, seconds) -> what the record says of a step's speed.
    """

    def __init__(
        self,
        emit: OnEvent,
        device: torch.device,
        on_nonfinite: Callable[[int, str], None] = lambda step, what: None,
        on_finite: Callable[[dict[str, Any]], None] = lambda record: None,
        speed: Callable[[int, float], dict[str, Any]] = lambda samples, seconds: {
            "samples_per_second": samples / seconds
        },
    ) -> None:
        self.emit, self.device, self.speed = emit, device, speed
        self.on_nonfinite, self.on_finite = on_nonfinite, on_finite
        self.stop = self.failed = self.nonfinite = 0
        self._waiting: tuple[dict[str, Any], Tensor, torch.cuda.Event | None] | None = None
        self._clock = time.perf_counter()

    def add(self, data: dict[str, Any], values: Tensor) -> None:
        """Queue a step.

        Args:
            data: step, epoch, lr, samples, and what else is known on the CPU.
            values: (4,) float64 on the device: mean loss, gradient norm, ranks that have had a stop signal,
                ranks that have seen a save fail.
        """
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        event = None
        if self.device.type == "cuda":
            values = values.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        timing = {"step_ms": 1000 * seconds, **self.speed(data["samples"], seconds)}
        self.flush()
        self._waiting = ({**data, **timing}, values, event)

    def flush(self) -> None:
        """Emit what is waiting."""
        if self._waiting is None:
            return
        data, values, event = self._waiting
        self._waiting = None
        if event is not None:
            event.synchronize()
        loss, norm, stop, failed = values.tolist()
        self.stop, self.failed = int(stop), int(failed)
        record = {"step": data["step"], "epoch": data["epoch"], "loss": loss, "lr": data["lr"], "grad_norm": norm}
        record |= {**data, "peak_memory_bytes": peak_memory_bytes(self.device)}
        self.emit("train", record)
        if what := nonfinite(record):
            self.nonfinite += 1
            self.on_nonfinite(data["step"], what)
        else:
            self.on_finite(record)

    def restart_clock(self) -> None:
        """Leave what was done between steps (evaluation, a checkpoint) out of the next step's time."""
        self._clock = time.perf_counter()
