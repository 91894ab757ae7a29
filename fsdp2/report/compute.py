"""The arithmetic of a model, and of GPUs. The formula and what it leaves out are in docs/speed.md."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

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
