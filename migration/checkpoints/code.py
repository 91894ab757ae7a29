"""The model's code, where it is at hand: one of those here by name, or `module:factory`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp2 import models
from fsdp2.models.spec import ModelSpec
from fsdp2.options.errors import ConfigError


@dataclass(frozen=True)
class Code:
    """The way to make a model and its loss. It can be sent to another process.

    Attributes:
        model: a name of `fsdp2.train`, or `module:factory`, which returns the unwrapped module.
        size: of the former.
        wrap: names of the classes whose modules are units of their own beside the root.
        loss: `module:function` of (model, step, rank), which returns a 0-d loss to call `backward` on.
    """

    model: str
    size: str | None = None
    wrap: tuple[str, ...] = ()
    loss: str | None = None

    def check(self, *, needs_loss: bool) -> None:
        """Raises ConfigError for what doesn't go together, or can't be imported."""
        if ":" not in self.model:
            if self.model not in models.NAMES:
                raise ConfigError(f"--model {self.model}: is none of {', '.join(models.NAMES)} and no module:factory")
            sizes = self._spec().sizes
            if self.size is not None and self.size not in sizes:
                raise ConfigError(f"--model-size {self.size}: must be one of {', '.join(sizes)}")
            if self.loss is not None:
                raise ConfigError(f"--loss with --model {self.model}: it has its own; drop --loss")
        elif self.size is not None:
            raise ConfigError(f"--model-size with --model {self.model}: the factory decides; drop --model-size")
        elif needs_loss and self.loss is None:
            raise ConfigError(
                f"--prove with --model {self.model}: give --loss module:function, which is called with the model, the "
                "step and the rank and returns a loss"
            )
        elif self.loss is not None:
            _imported("--loss", self.loss)
        self.units(self.on_meta())

    def _spec(self) -> ModelSpec:
        return models.get(self.model)

    def _size(self) -> str:
        return self.size or next(iter(self._spec().sizes))

    def build(self) -> nn.Module:
        """The unwrapped model, on the CPU, with any values. Raises ConfigError."""
        if ":" not in self.model:
            return self._spec().build(self._size())
        model = _imported("--model", self.model)()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"--model {self.model}: returned a {type(model).__name__} and no module")
        return model

    def on_meta(self) -> nn.Module:
        """The same without memory, for its names and shapes. Raises ConfigError."""
        with torch.device("meta"):
            return self.build()

    def units(self, model: nn.Module) -> list[nn.Module]:
        """List the modules wrapped beside the root, in order. Raises ConfigError for an unknown class."""
        there = {type(module).__name__ for module in model.modules()}
        if strange := [name for name in self.wrap if name not in there]:
            raise ConfigError(f"--wrap {strange[0]}: no module has that class; there are {', '.join(sorted(there))}")
        if self.wrap:
            return [m for m in model.modules() if type(m).__name__ in self.wrap and m is not model]
        return list(self._spec().blocks(model)) if ":" not in self.model else []

    def loss_of(self, model: Any, step: int, rank: int) -> Tensor:
        """The loss of a batch that is a function of step and rank alone."""
        torch.manual_seed(1000 * step + rank)  # for dropout too
        if self.loss is not None:
            loss: Tensor = _imported("--loss", self.loss)(model, step, rank)
            return loss
        spec = self._spec()
        vocabulary = spec.vocab_size(self._size())
        if vocabulary is not None:
            tokens = torch.randint(vocabulary, (2, 17))
            return spec.loss(model(tokens[:, :-1]), tokens[:, 1:]) / 32
        return spec.loss(model(torch.randn(4, 1, 28, 28)), torch.randint(10, (4,))) / 4


def _imported(flag: str, place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{flag} {place}: can't be imported ({error}); give module:function") from None
    if not callable(found):
        raise ConfigError(f"{flag} {place}: is not a function")
    return found


# Settings that say how an optimizer computes on a device, and not what: both sides get the same.
HERE: dict[str, Any] = {"foreach": True, "fused": None, "capturable": False}


def optimizer_class(wanted: str | None, groups: Sequence[dict[str, Any]], entries: set[str]) -> str:
    """The name in torch.optim of the optimizer that has such settings and state. Raises ConfigError."""
    if wanted is not None:
        if not hasattr(torch.optim, wanted):
            raise ConfigError(f"--optimizer-class {wanted}: torch.optim has no such class")
        return wanted
    if {"exp_avg", "exp_avg_sq"} <= entries:
        decoupled = groups[0].get("decoupled_weight_decay")
        if decoupled is None and any(group.get("weight_decay") for group in groups):
            raise ConfigError(
                "--prove: the checkpoint doesn't show whether Adam or AdamW decayed the weights; give --optimizer-class"
            )
        return "AdamW" if decoupled else "Adam"
    if "nesterov" in groups[0] and "dampening" in groups[0]:
        return "SGD"
    if "acc_delta" in entries:
        return "Adadelta"
    raise ConfigError("--prove: the state doesn't show which optimizer wrote it; give --optimizer-class")
