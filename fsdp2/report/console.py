"""The console of a run: a header, progress, and how to go on. Rank 0 alone prints."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from fsdp2.report.metrics import nonfinite
from fsdp2.units import short, size

SECONDS_BETWEEN_LINES = 5.0
FEW_STEPS = 20  # of a whole run: each has a line
NEVER = "as --checkpoint-every never asks"


def speed(data: dict[str, Any]) -> str:
    """The speed of a `train` record in words."""
    tokens = data.get("tokens_per_second")
    words = [f"{data['samples_per_second']:.0f} samples/s" if tokens is None else f"{tokens:.0f} tokens/s"]
    if "tflops" in data:
        mfu = f"MFU {data['mfu']:.1%}" if "mfu" in data else "MFU unknown"
        words += [f"{data['tflops']:.1f} TFLOP/s", mfu]
    return "  ".join(words)


def tokens_of(data: dict[str, Any]) -> int:
    """Tokens in the step of a `train` record; 0 for images."""
    if "tokens_per_second" not in data:
        return 0
    return round(data["tokens_per_second"] / data["samples_per_second"] * data["samples"])


def in_words(data: dict[str, Any], colon: str = ": ", comma: str = ", ") -> str:
    """An evaluation beside its loss: the share of right classes, or the perplexity and the share of right tokens."""
    if "perplexity" not in data:
        return f"test accuracy{colon}{data['accuracy']:.2%}"
    return f"perplexity{colon}{data['perplexity']:.2f}{comma}tokens right{colon}{data['accuracy']:.2%}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as far as they matter."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


class Console:
    """A listener: a progress bar in a terminal, plain lines elsewhere."""

    def __init__(
        self,
        rank: int,
        steps_per_epoch: int,
        epochs: int,
        max_steps: int | None = None,
        named: Sequence[str] = (),
        to_read: Sequence[str] = (),
        export: str = "",
    ) -> None:
        """Words that a command needs which goes on with this run (`named`), or is `to_read` its model; the format in
        which its library reads it."""
        self.active, self.steps_per_epoch, self.epochs = rank == 0, steps_per_epoch, epochs
        self.max_steps = max_steps or sys.maxsize
        self._pause = 0.0 if min(steps_per_epoch * epochs, self.max_steps) <= FEW_STEPS else SECONDS_BETWEEN_LINES
        self.in_terminal = sys.stderr.isatty()
        self._named, self._to_read = (f" {shlex.join(words)}" if words else "" for words in (named, to_read))
        self._export = export
        self._bar: Any = None
        self._printed = self._warned = 0.0
        self._nonfinite = self._tokens = 0
        self._tested: dict[str, Any] | None = None  # the last evaluation
        self._first: tuple[int, float] | None = None  # the first step, and when it was reported

    def line(self, text: str) -> None:
        if self.active:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def __call__(self, kind: str, data: dict[str, Any]) -> None:
        handler = getattr(self, f"_{kind}", None)
        if self.active and handler is not None:
            handler(data)

    def lines(self, texts: list[str]) -> None:
        for text in texts:
            self.line(text)

    def _start(self, data: dict[str, Any]) -> None:
        self.lines(data["header"] + ([data["note"]] if data["note"] else []))
        if "left_out" in data:
            place = data.get("checkpoint") or data["weights"]
            self.line(f"loaded {data['loaded']} tensors of {short(place)}; left out:")
            self.lines([f"  {line}" for line in data["left_out"]] or ["  nothing"])

    def _resume(self, data: dict[str, Any]) -> None:
        self._start(data)
        seeded = "" if data["random_state_restored"] else "; random generators reseeded"
        self.line(f"resumed from {short(data['checkpoint'])} at step {data['step']}, epoch {data['epoch'] + 1}{seeded}")

    def _train(self, data: dict[str, Any]) -> None:
        if data.get("skipped") and "loss_scale" in data:
            self.line(
                f"step {data['step']}: gradients overflowed in fp16; step skipped, "
                f"loss scale now {data['loss_scale']:g}"
            )
        elif what := nonfinite(data):
            self._nonfinite += 1
            if self._nonfinite == 1 or time.monotonic() - self._warned > SECONDS_BETWEEN_LINES:
                self._warned = time.monotonic()
                update = "; parameters are not updated" if data.get("skipped") else ""
                so_far = f"; {self._nonfinite} such steps so far" if self._nonfinite > 1 else ""
                self.line(f"step {data['step']}: {what}{update}{so_far}")
        self._tokens += tokens_of(data)
        figures = f"loss {data['loss']:.4f}  grad norm {data['grad_norm']:.3f}  {speed(data)}{self._left(data)}"
        if self.in_terminal:
            if self._bar is None:
                self._bar = tqdm(total=self.steps_per_epoch, unit="step", leave=False)
            self._bar.set_description_str(f"epoch {data['epoch'] + 1}/{self.epochs}", refresh=False)
            self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update(data["step_in_epoch"] - self._bar.n)  # redraws ten times a second at most
        elif time.monotonic() - self._printed >= self._pause:
            self._printed = time.monotonic()
            self.line(f"epoch {data['epoch'] + 1}/{self.epochs}  step {data['step']}  {figures}")

    def _left(self, data: dict[str, Any]) -> str:
        """The time until the last step, by how long the steps since the first took, evaluations and saves included."""
        now = time.monotonic()
        first, since = self._first = self._first or (data["step"], now)
        steps = (self.epochs - data["epoch"]) * self.steps_per_epoch - data["step_in_epoch"]
        steps = min(steps, self.max_steps - data["step"])
        if data["step"] == first or not steps:
            return ""  # the first step of a process is the slowest, and behind the last is nothing
        of = f" for {steps * tokens:,} tokens" if (tokens := self._tokens // (data["step"] - first + 1)) else ""
        return f"  {duration(steps * (now - since) / (data['step'] - first))} left{of}"

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _eval(self, data: dict[str, Any]) -> None:
        self._close_bar()
        self._tested = data
        self.line(
            f"epoch {data['epoch'] + 1}/{self.epochs}  step {data['step']}  test loss {data['loss']:.4f}  "
            + in_words(data, " ", "  ")
        )
        if not math.isfinite(data["loss"]):
            self.line(
                f"step {data['step']}: the test loss is no number: a sample's outputs overflow, or weights are NaN, "
                "which the next save finds out"
            )

    def _failure(self, data: dict[str, Any]) -> None:
        self._close_bar()
        if data.get("continues"):
            self.line(f"checkpoint failed: {data['error']}; training goes on")

    def _anomaly(self, data: dict[str, Any]) -> None:
        self.line(f"step {data['step']}: {data['what']}")

    def _compiled(self, data: dict[str, Any]) -> None:
        self.line(data["what"])

    def _checkpoint_skipped(self, data: dict[str, Any]) -> None:
        self.line(f"step {data['step']}: checkpoint skipped, because {data['reason']}")

    def _end(self, data: dict[str, Any]) -> None:
        self._close_bar()
        run = short(data["run_dir"])
        quoted = shlex.quote(run)  # so that the command can be pasted
        if data["reason"] == "already finished":
            self.line(f"{run} is finished: {data['step']} steps are done; raise --epochs or --max-steps to go on")
        elif data["reason"] == "finished":
            tokens = f", on {self._tokens:,} tokens" if self._tokens else ""
            self.line(f"trained {data['steps']} steps in {data['seconds']:.1f} s{tokens}")
        elif data["left"] is None:
            seconds = f"after {data['seconds']:.1f} s"
            self.line(f"{data['reason']}: stopped at step {data['step']} {seconds}; nothing is saved, {NEVER}")
        else:
            self.line(f"{data['reason']}: saved at step {data['step']} after {data['seconds']:.1f} s")
        if data["nonfinite_steps"]:
            self.line(f"in {data['nonfinite_steps']} of {data['steps']} steps the loss or gradients were no numbers")
        self.line(f"run directory: {run}")
        if self._tested is not None:
            self.line(in_words(self._tested))
        left_out = data.get("full_model_left_out_bytes")
        if left_out is not None:
            self.line(f"full-model.pt is not written, since the model has {size(left_out)}; --save-model asks for it")
        if data["reason"] in ("finished", "already finished"):
            if data["left"] == "checkpoint":
                self.line(f"next: python -m fsdp2.checkpoint export {quoted} model.pt --format pt")
            elif data["left"] is not None:
                self.line(f"next: python -m fsdp2.infer {quoted}{self._to_read}")
                if self._export:
                    self.line(f"next: python -m fsdp2.checkpoint export {quoted} model --format {self._export}")
            else:
                self.line(f"no checkpoint and no model is written, {NEVER}")
        elif data["left"] is not None:
            flags = f"--config {shlex.quote(f'{run}/config.json')} --run-dir {quoted}{self._named}"
            self.line(f"next: the same command with {flags} goes on from there")
