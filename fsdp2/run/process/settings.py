"""Settings of a run's whole process: arithmetic of fp32, determinism, attention, garbage collection, the GPU's
allocator. Taken back at its end, since a notebook goes on."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from fsdp2.config import Config

# What cuBLAS needs for repeatable sums: 8 buffers of 4 MiB.
# https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility
WORKSPACE, DETERMINISTIC_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"

# Where torch's allocator of GPU memory looks for its settings, the first time that it is used.
# https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"


def grows_segments(variables: Mapping[str, str]) -> bool:
    """True if the segments of a run's GPU allocator grow, as they do unless a variable says they don't."""
    said = next((variables[name] for name in ALLOCATOR if name in variables), EXPANDABLE)
    return EXPANDABLE.lower() in said.lower().replace(" ", "")


@contextmanager
def growing_segments() -> Iterator[None]:
    """Let segments of a GPU's memory grow, unless there is none or a variable of the environment is set.

    To be entered before anything uses the GPU: the allocator reads the variable once, and keeps it afterwards. Batches
    of different lengths then leave fewer holes between tensors.
    """
    if not torch.cuda.is_available() or any(name in os.environ for name in ALLOCATOR):
        yield
        return
    os.environ[ALLOCATOR[-1]] = EXPANDABLE
    try:
        yield
    finally:
        os.environ.pop(ALLOCATOR[-1], None)


@contextmanager
def process_settings(config: Config) -> Iterator[GarbageCollection]:
    """Set the process as the flags of precision, determinism, attention and garbage say, for as long as the body runs.

    cuDNN's convolutions, for which torch has TF32 on by default, follow `--matmul-precision`, too. With
    `--deterministic` an operation that has no deterministic algorithm raises RuntimeError.
    """
    cudnn = torch.backends.cudnn
    with ExitStack() as back:
        for name in ("allow_tf32", "deterministic", "benchmark"):
            back.callback(setattr, cudnn, name, getattr(cudnn, name))
        back.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        enabled = torch.are_deterministic_algorithms_enabled()
        back.callback(torch.use_deterministic_algorithms, enabled, warn_only=warn_only)
        if WORKSPACE not in os.environ:
            back.callback(os.environ.pop, WORKSPACE, None)
        torch.set_float32_matmul_precision(config.matmul_precision)
        cudnn.allow_tf32 = config.matmul_precision != "highest"
        if config.deterministic:
            os.environ.setdefault(WORKSPACE, DETERMINISTIC_WORKSPACE)  # read when cuBLAS starts
            cudnn.deterministic, cudnn.benchmark = True, False
            torch.use_deterministic_algorithms(True)
        garbage = GarbageCollection(config.gc_every)
        back.callback(garbage.end)
        if config.attention != "auto":
            from fsdp2.models.attention import kernels

            back.enter_context(kernels(config.attention))
        yield garbage


class GarbageCollection:
    """Python's collection of reference cycles, between steps and at the same step on all ranks.

    Left alone, Python collects on each rank when it likes; one rank that does so makes all others wait in their next
    collective, and with many ranks nearly every step has one. The idea is torchtitan's.
    """

    def __init__(self, every: int) -> None:
        self.every, self._was_enabled = every, gc.isenabled()
        self._froze = False
        if every:
            gc.disable()

    def after_step(self, step: int) -> None:
        """Collect if it is time. The first time, everything that is alive, imported modules above all, is put aside
        for good, so that later collections look only at what is newer."""
        if self.every and step % self.every == 0:
            gc.collect()
            if not self._froze and gc.get_freeze_count() == 0:  # else the caller has put objects aside, and keeps them
                gc.freeze()
                self._froze = True

    def end(self) -> None:
        """Give Python its own collection back."""
        if self._froze:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
