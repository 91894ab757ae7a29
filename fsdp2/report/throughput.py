"""Tokens a second, TFLOP/s and MFU of a step."""

from __future__ import annotations

from typing import Any

import torch

from fsdp2.config import Config


class Throughput:
    """The speed in a `train` record. `split` is the training's, or a list of a sample, and `ranks` share the work."""

    def __init__(self, config: Config, split: Any, device: torch.device, ranks: int) -> None:
        sample = split[0]
        # Of a sequence, without the rest that conversations leave empty.
        self.tokens = sample[1].numel() * getattr(split, "filled", 1.0) if config.spec.kind == "language" else None
        self.tflop: float | None = None  # of a sample, on each GPU
        self.peak: float | None = None
        self.lines: list[str] = []  # for the header
        if device.type == "cuda":
            from fsdp2.report.compute import flops_per_sample, peak_tflops

            gpu = torch.cuda.get_device_name(device)
            try:
                flops = flops_per_sample(config.spec, config.model_size, sample)
            except Exception as error:  # a stranger's forward may look at values, which meta doesn't have
                why = " ".join(str(error).split())[:160]
                failed = f"compute: unknown, so no TFLOP/s: a forward on meta fails ({type(error).__name__}: {why})"
                self.lines = [failed]
                return
            self.tflop = flops / 1e12 / ranks
            self.peak = peak_tflops(gpu, config.mixed_precision, config.matmul_precision)
            against = f"{self.peak:g} TFLOP/s" if self.peak else "unknown, so no MFU"
            self.lines = [f"compute: {flops / 1e9:.3g} GFLOP a sample; peak of {gpu}: {against}"]

    def __call__(self, samples: int, seconds: float) -> dict[str, Any]:
        """Samples a second over all ranks; tokens a second for language; on a GPU TFLOP/s of each, and MFU from 0 to 1
        if its peak is known."""
        rate = samples / seconds
        figures = {"samples_per_second": rate}
        if self.tokens is not None:
            figures["tokens_per_second"] = rate * self.tokens
        if self.tflop is not None:
            figures["tflops"] = rate * self.tflop
            if self.peak is not None:
                figures["mfu"] = figures["tflops"] / self.peak
        return figures
