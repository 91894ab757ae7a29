"""The weights that a model begins with: drawn, read from a file, or kept beside the adapters that are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2.checkpoint.state import plain_names
from fsdp2.config import Config
from fsdp2.models.initial import reset_parameters


def not_saved(config: Config) -> Callable[[str], bool]:
    """Make a test by name for weights that no checkpoint of a run holds: with `--lora`, all but the adapters."""
    if config.lora is None:
        return lambda name: False
    from fsdp2_extra.models.lora import is_adapter

    return lambda name: not is_adapter(name)


class DrawnWeights:
    """Draws the initial values of a model, or of a part of one. A collective call where the model has no table.

    Without a table a model's own code says what it starts from. Rank 0 makes it a second time, in its memory and from
    the seed alone, and sends each rank what that holds, one tensor after the other.

    Args:
        brought: whether something else brings what has this name in the state dict: a checkpoint, or a file.
    """

    def __init__(self, config: Config, *, brought: Callable[[str], bool]) -> None:
        self._config, self._brought = config, brought
        self._own: dict[str, Tensor] | None = None

    def __call__(self, model: nn.Module) -> None:
        spec, seed = self._config.spec, self._config.seed
        if spec.lora is not None:
            from fsdp2_extra.models.lora import draw_adapters

            draw_adapters(model, seed, brought=self._brought)
        if spec.initial_values:
            reset_parameters(model, spec.initial_values, seed, brought=self._set_elsewhere)
            return
        wanted = self._wanted()
        targets = {name: tensor for name, tensor in plain_names(model).items() if name in wanted}
        if targets:
            from fsdp2.checkpoint.full_dtensor import scatter

            scatter(self._drawn() if dist.get_rank() == 0 else {}, targets)

    def makes_whole(self) -> bool:
        """Return whether rank 0 has the whole model in its memory meanwhile."""
        return not self._config.spec.initial_values and bool(self._wanted())

    def _wanted(self) -> set[str]:
        # Names in the state dict: a part of a model that a strategy makes has buffers beside it, too.
        names = self._config.spec.described(self._config.model_size).state_dict()
        return {name for name in names if not self._set_elsewhere(name)}

    def _set_elsewhere(self, name: str) -> bool:
        return self._brought(name) or (self._config.lora is not None and not not_saved(self._config)(name))

    def _drawn(self) -> dict[str, Tensor]:
        if self._own is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._config.seed)
                self._own = self._config.spec.build(self._config.model_size).state_dict()
        return self._own


class LoadedWeights:
    """Loads the weights that the run starts from into a model. A collective call; raises ConfigError on every rank.

    Of a model with adapters, these are all weights but the adapters, also where the run goes on from a checkpoint.

    Attributes:
        facts: with `--init-partial`, how many tensors were loaded from where, and a line for each that was left out.
    """

    def __init__(self, config: Config, *, restoring: bool) -> None:
        self._config, self._restoring = config, restoring
        self.wanted = config.weights is not None and (not restoring or config.lora is not None)
        self.facts: dict[str, Any] = {}

    def brings(self, name: str) -> bool:
        """Return whether these, or the checkpoint that the run goes on from, set the weight of this name."""
        config = self._config
        if self._restoring:
            return not config.resume_partial
        if not self.wanted or config.init_partial:
            return False
        return config.lora is None or not_saved(config)(name)  # of a model with adapters all but these

    def __call__(self, model: nn.Module) -> None:
        from fsdp2.run.init_from import load_into

        self.facts = load_into(model, self._config)
