"""An optimizer that was made before FSDP: FSDP1 kept its parameters alive, FSDP2 replaces them.

Such an optimizer would go on without an error and train nothing, so its first step raises.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_replaced: dict[int, weakref.ref[nn.Parameter]] = {}
_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@contextlib.contextmanager
def watching(module: nn.Module) -> Iterator[None]:
    """Remember the parameters of `module` that are others afterwards."""
    before = dict(module.named_parameters())
    yield
    if not _replaced:
        register_optimizer_step_pre_hook(_refuse_stale)
    for name, after in module.named_parameters():
        old = before.get(name)
        if old is not None and old is not after:
            _replaced[id(old)] = weakref.ref(old, partial(_forget, id(old)))


def _forget(key: int, _: object) -> None:
    _replaced.pop(key, None)  # its memory, and with it its id, may become another parameter's


def _refuse_stale(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _checked:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            known = _replaced.get(id(parameter))
            if known is not None and known() is parameter:
                raise RuntimeError(
                    f"{type(optimizer).__name__} was made before FSDP: FSDP2 replaces parameters, so that it would "
                    "train tensors that the model has no more. Make it after the model is sharded, of "
                    "model.parameters()"
                )
    _checked.add(optimizer)
