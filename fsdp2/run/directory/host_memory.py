"""Memory of a node that a run takes: what it offloads, what it copies to save, and what it loads whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from types import SimpleNamespace

from torch import Tensor, nn

from fsdp2.checkpoint.disk import bytes_of
from fsdp2.config import Config
from fsdp2.options.errors import ConfigError
from fsdp2.options.strategies import rules_of
from fsdp2.parallel.freeze import freeze
from fsdp2.parallel.optimizer import make_optimizer
from fsdp2.run.initial_weights import not_saved
from fsdp2.run.process.limits import free_memory
from fsdp2.run.process.runtime import World
from fsdp2.units import size

NEAR = 0.8  # of the memory that is available; more is worth a note, since batches and libraries take some too


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
    def optimizer_state(self) -> list[Tensor]:
        """The optimizer's tensors, without its counters of steps."""
        # The fused kernels have no form for `meta`, and the same state.
        options = SimpleNamespace(**{**vars(self.config), "fused_optimizer": False})
        state = make_optimizer(options, self.model.parameters()).state.values()
        return [one for values in state for one in values.values() if isinstance(one, Tensor) and one.dim()]

    @cached_property
    def saved(self) -> list[Tensor]:
        """A checkpoint's tensors: weights (of a run of adapters, these alone), the optimizer's, those of `--ema`."""
        left_out = not_saved(self.config)
        weights = [one for name, one in self.model.state_dict().items() if not left_out(name)]
        return [*weights, *self.optimizer_state, *(self.trained if self.config.ema is not None else ())]


def pinned(count: int) -> int:
    """The bytes that torch takes for a pinned buffer: the next power of two.

    Source: `CachingHostAllocatorImpl::allocate` in ATen/core/CachingHostAllocator.h, as of 2.15.
    """
    return 1 << (count - 1).bit_length() if count else 0


def on_node(tensors: Iterable[Tensor], config: Config, world: World, taken: Callable[[int], int]) -> int:
    """Bytes that this node's ranks take for their parts of some tensors; a buffer of n bytes takes `taken(n)`."""
    local = world.local_world_size
    if not rules_of(config.strategy).shards_state:
        return local * sum(taken(one.nbytes) for one in tensors)
    shards = world.world_size // config.replicas
    total = 0
    for one in tensors:
        if not one.dim():
            total += local * taken(one.nbytes)
            continue
        rows = -(-one.shape[0] // shards)  # FSDP2 splits the first dimension; the last ranks may have none of it
        holders = math.ceil(one.shape[0] / rows) if rows else 0
        copies = max(1, local // shards)
        total += copies * min(holders, local, shards) * taken(rows * one.shape[1:].numel() * one.itemsize)
    return total


def memory_needs(config: Config, sizes: Sizes, world: World, *, on_gpu: bool, loads_whole: bool) -> dict[str, int]:
    """Bytes of memory that this node's ranks take at one time, by use or by the flag that asks for it.

    Activations, batches and libraries come on top of them. With `loads_whole`, rank 0 of this node has all weights a
    second time before the first step.
    """

    def here(tensors: Iterable[Tensor], taken: Callable[[int], int] = int) -> int:
        return on_node(tensors, config, world, taken)

    offloads = config.cpu_offload and on_gpu
    always, saving, loading = dict[str, int](), dict[str, int](), dict[str, int]()
    if (not on_gpu or offloads) and config.nvme_offload is None:
        # FSDP2 pins parameters and gradients; the optimizer's own tensors aren't.
        taken = pinned if offloads and config.strategy == "fsdp2" else int
        what = "--cpu-offload" if offloads else "parameters, gradients and optimizer state"
        always[what] = here(sizes.held, taken) + here(sizes.trained, taken) + here(sizes.optimizer_state)
        always[what] += here(sizes.trained) if config.ema is not None else 0
    if config.async_checkpoint is not None:
        pins = on_gpu and not offloads
        copies = here(sizes.saved, pinned if pins else int) * (1 if config.memory_checkpoint is None else 2)
        saving[f"copies for --async-checkpoint{' (pinned)' * pins}"] = copies
    if config.memory_checkpoint is not None:
        saving["two checkpoints of --memory-checkpoint"] = 2 * bytes_of(sizes.saved)
    if loads_whole:
        loading["the whole model, in rank 0,"] = bytes_of(sizes.weights)
    return always | max(saving, loading, key=lambda parts: sum(parts.values()))


def check_memory(config: Config, needs: Mapping[str, int], world: World) -> str | None:
    """A note if this node's memory is nearly too small. Raises ConfigError if it is too small."""
    free, needed = free_memory(), sum(needs.values())
    if free is None or not needs:
        return None
    ranks = f"{world.local_world_size} rank{'s' * (world.local_world_size > 1)}"
    parts = ", ".join(f"{what} {size(count)}" for what, count in needs.items())
    says = f"this node's {ranks} need {size(needed)} of its memory ({parts}), and {size(free)} are available"
    if needed > free:
        asked = [flag for flag, given in (
            ("--async-checkpoint", config.async_checkpoint is not None),
            ("--memory-checkpoint", config.memory_checkpoint is not None),
            ("--cpu-offload", config.cpu_offload),
        ) if given]  # fmt: skip
        flag = asked[0] if asked else f"--model {config.model} --model-size {config.model_size}"
        ways = ["shard over more nodes", *(f"drop {one}" for one in asked)]
        ways += [] if asked else ["choose a smaller model"]
        raise ConfigError(f"{flag}: {says} (a container's or a job's own limit counts); {', or '.join(ways)}")
    return f"memory: {says}" if needed > NEAR * free else None
