"""Sizes of a run's model: weights, the optimizer's averages, a checkpoint. No memory is taken.

The model is on `meta`, and its optimizer is made there, so the sizes are of no device and follow every optimizer.
"""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace

from torch import Tensor, nn

from fsdp2.config import Config
from fsdp2.parallel.freeze import freeze
from fsdp2.parallel.optimizer import make_optimizer
from fsdp2.run.parts import elsewhere


class Sizes:
    """The tensors that a run keeps of its model, on `meta`."""

    def __init__(self, config: Config, model: nn.Module | None = None) -> None:
        """`model`: on `meta`, with what `--freeze` freezes; None makes it."""
        self.config = config
        if model is None:
            model = config.spec.on_meta(config.model_size)
            freeze(model, config.freeze)
        self.model = model

    @cached_property
    def weights(self) -> list[Tensor]:
        """All weights and buffers of a full model."""
        return list(self.model.state_dict().values())

    @cached_property
    def held(self) -> list[Tensor]:
        """Parameters and buffers, each once."""
        return [*self.model.parameters(), *self.model.buffers()]

    @cached_property
    def trained(self) -> list[Tensor]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @cached_property
    def averages(self) -> list[Tensor]:
        """The optimizer's tensors: its counters of steps are left out."""
        # The fused kernels have no form for `meta`, and the same state.
        options = SimpleNamespace(**{**vars(self.config), "fused_optimizer": False})
        state = make_optimizer(options, self.model.parameters()).state.values()
        return [one for values in state for one in values.values() if isinstance(one, Tensor) and one.dim()]

    @cached_property
    def saved(self) -> list[Tensor]:
        """A checkpoint's tensors: weights (of a run of adapters, these alone), the optimizer's, those of `--ema`."""
        left_out = elsewhere(self.config)
        weights = [one for name, one in self.model.state_dict().items() if not left_out(name)]
        return [*weights, *self.averages, *(self.trained if self.config.ema is not None else ())]
