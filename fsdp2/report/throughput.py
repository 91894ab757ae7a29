"""Tokens a second, TFLOP/s and MFU of a step. The formula and what it leaves out are in docs/speed.md."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from fsdp2.config import Config
from fsdp2.models.spec import ModelSpec

# Dense peaks in TFLOP/s by a pattern in torch's name of the GPU: of bf16 and fp16, of TF32, of fp32. Twice as much is
# in the data sheets, where those count with sparsity. Sources, all of NVIDIA: the data sheets of A100 (June 2021), H100
# (SXM, PCIe, NVL), H200 SXM, L4, L40S and A10; for B200 an eighth of that of HGX B200.
PEAKS = {
    r"\bB200\b": (2250.0, 1125.0, 75.0),
    r"\bH200\b(?! NVL)": (989.4, 494.7, 66.9),
    r"\bH100 PCIe\b": (756.0, 378.0, 51.0),
    r"\bH100 NVL\b": (835.0, 417.5, 60.0),
    r"\bH100 80GB HBM3\b": (989.4, 494.7, 66.9),
    r"\bA100\b": (312.0, 156.0, 19.5),
    r"\bL40S\b": (362.0, 183.0, 91.6),
    r"\bL4\b": (121.0, 60.0, 30.3),
    r"\bA10\b": (125.0, 62.5, 31.2),
}


def peak_tflops(gpu: str, mixed_precision: str | None, matmul_precision: str) -> float | None:
    """The most that a GPU of this name does in the arithmetic of the run's products; None if it isn't known."""
    column = 0 if mixed_precision else {"highest": 2, "high": 1, "medium": 0}[matmul_precision]
    return next((peaks[column] for pattern, peaks in PEAKS.items() if re.search(pattern, gpu)), None)


def flops_per_sample(spec: ModelSpec, size: str, sample: tuple[Any, Tensor]) -> int:
    """Floating-point operations of one forward and backward of one sample, counted on meta: no memory, no arithmetic.

    torch counts the matrix products, convolutions and attention that run, and nothing else. The model is not the one
    that trains, so what recomputation adds is not in it.
    """
    from fsdp2.models.attention import MeetsConditions

    spec = spec.whole or spec  # a loss in chunks computes its last layer twice
    inputs, targets = tree_map(lambda tensor: tensor.to("meta").unsqueeze(0), sample)
    batch = SimpleNamespace(inputs=inputs, targets=targets)
    with torch.device("meta"), FlopCounterMode(display=False) as counter, MeetsConditions():
        spec.loss(spec.call(spec.on_meta(size).to("meta"), batch), batch.targets).backward()
    return int(counter.get_total_flops())


class Throughput:
    """The speed in a `train` record. `sample` is an item of the training split, and `ranks` share the work."""

    def __init__(
        self, config: Config, spec: ModelSpec, sample: tuple[Any, Tensor], device: torch.device, ranks: int
    ) -> None:
        self.tokens = sample[1].numel() if spec.kind == "language" else None
        self.tflop: float | None = None  # of a sample, on each GPU
        self.peak: float | None = None
        self.lines: list[str] = []  # for the header
        if device.type == "cuda":
            gpu = torch.cuda.get_device_name(device)
            try:
                flops = flops_per_sample(spec, config.model_size, sample)
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
