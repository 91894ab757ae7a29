"""The forward of a model that nothing casts: a baseline's, or one process's after a run in bf16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from fsdp2.parallel.precision import DTYPES


def autocast(device_type: str, compute: str | None) -> AbstractContextManager[object]:
    """The context of a forward that isn't FSDP's; `compute` is `bf16`, `fp16` or None for no cast.

    Source: https://docs.pytorch.org/docs/stable/amp.html
    """
    return nullcontext() if compute is None else torch.autocast(device_type, DTYPES[compute])
