"""Parts of a checkpoint beside a model's weights, or in place of them: averages, adapters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2.checkpoint.state import plain_names
from fsdp2.config import Config
from fsdp2.parallel.engine import Engine
from fsdp2.run.initial_weights import not_saved
from fsdp2.run.process.group import gather


def add_parts(config: Config, engine: Engine) -> None:
    """Add what `--ema` and `--lora` keep to an engine and its checkpoints. A collective call, once it has its weights.

    With `--lora` a checkpoint holds the adapters alone, and says which weights they go beside.
    """
    if config.ema is not None:
        from fsdp2.parallel.ema import Ema

        engine.ema = Ema(plain_names(engine.model, keep_vars=True), config.ema)
        engine.parts = {**engine.parts, "ema": engine.ema}
    engine.not_saved = not_saved(config)
    if config.lora is not None:
        engine.parts = {**engine.parts, "base": base_of(config, engine.model)}


def base_of(config: Config, model: nn.Module) -> Base:
    """The part of a checkpoint for the weights that adapters go beside. A collective call."""
    is_frozen = not_saved(config)
    frozen = [tensor for name, tensor in plain_names(model).items() if is_frozen(name)]
    return Base(str(config.weights), checksum(frozen))


class Base:
    """Frozen weights that others are trained beside, as a part of a checkpoint: their place and a checksum."""

    def __init__(self, weights: str, checksum: int, what: str = "its adapters go beside") -> None:
        self.weights, self.checksum, self.what = weights, checksum, what

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "checksum": self.checksum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the checkpoint was trained beside other weights."""
        if state["checksum"] != self.checksum:
            raise ValueError(
                f"{self.what} the weights of {str(state['weights'])[:200]} at that time, and the weights of "
                f"{self.weights} differ"
            )


@torch.no_grad()
def checksum(tensors: Iterable[Tensor]) -> int:
    """The sum of the bits of all elements, as bfloat16, modulo 2^63: the same however the tensors are sharded.

    A collective call where they are sharded. It tells one training's weights from another's, and not one order of the
    same numbers from another.
    """
    whole, part = torch.zeros((2,), dtype=torch.int64)  # of what each rank has whole, as buffers, and of its shards
    sharded = False
    for tensor in tensors:
        mine = tensor
        if isinstance(tensor, DTensor):
            coordinate, sharded = tensor.device_mesh.get_coordinate(), True
            copies = zip(tensor.placements, coordinate or (), strict=True)
            if any(placement.is_replicate() and index for placement, index in copies):
                continue  # another rank has the same
            mine = tensor.to_local()
        bits = mine.to(torch.bfloat16).view(torch.int16) if mine.is_floating_point() else mine
        (part if isinstance(tensor, DTensor) else whole).add_(bits.sum(dtype=torch.int64).cpu())
    return (int(whole) + sum(gather(int(part)) if sharded else [])) % (1 << 63)
