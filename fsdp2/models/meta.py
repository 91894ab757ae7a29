"""Models without memory for their parameters, whoever wrote them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are made inside have their parameters on meta, and their buffers in memory.

    A model's code computes buffers where it makes them, such as the frequencies of rotary embeddings, and many are in
    no state dict: made on meta, their values would be lost. A parameter's memory is given back before anything is
    written to it.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        made = module._parameters[name]
        # A parameter that is tied to another is on meta already, and has to stay the same object.
        if made is not None and not made.is_meta:
            attributes: dict[str, Any] = vars(made)
            empty = nn.Parameter(torch.empty_like(made, device="meta"), requires_grad=made.requires_grad)
            vars(empty).update(attributes)
            module._parameters[name] = empty

    nn.Module.register_parameter = on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
