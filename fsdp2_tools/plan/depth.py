"""Equal blocks planned once: a model with fewer of them, and what a whole one needs, by the difference of two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fsdp2.config import Config
from fsdp2.options.own_model import blocks_of
from fsdp2.parallel.prefetch import groups_ahead

PLAIN = (int, float, str, bool, type(None))


def depths(config: Config) -> tuple[int, int, int] | None:
    """(blocks of the model, of a short one, of one that is longer by a group); None if short ones would say too little.

    The first and last groups differ from the others by what is prefetched and kept around them, so a short model has
    enough for both ends and one between. A model with fewer blocks than the two together is executed as it is.
    """
    model = config.spec.on_meta(config.model_size)
    blocks = blocks_of(config)(model)
    if len({_kind(block) for block in blocks}) != 1 or _container(model, blocks) is None:
        return None
    group = config.shard_granularity if isinstance(config.shard_granularity, int) else 1
    ahead = max(count or 0 for count in groups_ahead(config))
    short = (4 + 2 * ahead) * group
    short += (len(blocks) - short) % group
    longer = short + group
    return (len(blocks), short, longer) if len(blocks) > short + longer else None


def shorten(model: nn.Module, blocks_of: Callable[[Any], Sequence[nn.Module]], count: int) -> nn.Module:
    """The model with `count` of its blocks, which are equal."""
    container = _container(model, blocks_of(model))
    assert container is not None, "depths says which models can be shortened"
    while len(container) > count:
        del container[count // 2]
    return model


def _container(model: nn.Module, blocks: Sequence[nn.Module]) -> Any:
    """The list that holds the blocks and nothing else."""
    lists = (module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential)))
    return next((one for one in lists if list(one.children()) == list(blocks)), None)


def _kind(block: nn.Module) -> Any:
    """Equal for blocks that compute the same: modules, shapes, dtypes, and the settings that modules hold."""
    modules = tuple(
        (name, type(module), tuple(sorted((k, repr(v)) for k, v in vars(module).items() if _is_setting(k, v))))
        for name, module in block.named_modules()
    )
    tensors = (*block.named_parameters(), *block.named_buffers())
    return modules, tuple((name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors)


def _is_setting(name: str, value: Any) -> bool:
    return isinstance(value, PLAIN) and name != "layer_idx"  # transformers numbers its layers
