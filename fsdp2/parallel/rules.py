"""A strategy's declarations about itself, as data and as the texts of its refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdp2.parallel.engine import Engine

Options = Any
"""An object with the flags as attributes, such as `fsdp2.config.Config`, which this room doesn't import."""


def nothing(*arguments: Any) -> Iterator[str]:
    """Refuses nothing."""
    return iter(())


@dataclass(frozen=True, kw_only=True)
class Rules:
    """A strategy's answers to the flags. A refusal is one line that names the flag and the fix.

    Attributes:
        honours: those that it honours of the options that only some strategies do.
        instead: option -> what the strategy does in its place, where the common reason of a refusal doesn't fit.
        refusals: (options) -> refusals of combinations.
        in_world: (options, number of ranks) -> refusals.
        on_device: (options, device type) -> refusals, of what isn't installed too.
        autocasts: whether its forward runs under autocast; the others cast the parameters.
        shards_state: whether each rank keeps and saves a part of the parameters or of the optimizer's state.
        reads_as_fsdp2: whether inference reads its checkpoints into a model that FSDP2 shards.
    """

    honours: tuple[str, ...]
    instead: Mapping[str, str] = field(default_factory=dict)
    refusals: Callable[[Options], Iterator[str]] = nothing
    in_world: Callable[[Options, int], Iterator[str]] = nothing
    on_device: Callable[[Options, str], Iterator[str]] = nothing
    autocasts: bool = False
    shards_state: bool = False
    reads_as_fsdp2: bool = False


SetWeights: TypeAlias = "Callable[[nn.Module], None]"


@dataclass(frozen=True, kw_only=True)
class Start:
    """The start of a strategy: the arguments of `parallelize`, which documents them."""

    build: Callable[[], nn.Module]
    blocks_of: Callable[[nn.Module], Sequence[nn.Module]]
    set_weights: SetWeights
    load_weights: SetWeights | None = None
    brought: Callable[[str], bool]
    device: torch.device
    world_size: int


@dataclass(frozen=True, kw_only=True)
class Baseline(Rules):
    """A strategy that FSDP2 is compared with. `build` returns its engine, with initial values or a file's."""

    build: Callable[[Options, Start], Engine]
