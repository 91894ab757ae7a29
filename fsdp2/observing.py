"""A run's observation of itself beside its metrics: memory, time, and how memory ran out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from fsdp2.config import Config
from fsdp2.options.own_model import blocks_of
from fsdp2.parallel.engine import Engine
from fsdp2.run.checkpoints import Checkpoints
from fsdp2.run.process.runtime import World

if TYPE_CHECKING:
    from fsdp2_extra.allocations.recorder import Recorder


@contextmanager
def observed(
    config: Config, engine: Engine, checkpoints: Checkpoints, world: World, device: torch.device
) -> Iterator[Callable[[], int | None]]:
    """Record the training as `--memory-snapshot`, `--memory-limit` and `--profile` ask.

    Yields what tells the most bytes of this rank's tensors so far: the allocator of a GPU, else a ledger; None without.

    An out-of-memory error gets a note of what was alive, and of the flags that would have saved some of it.
    """
    blocks = _names_of_blocks(engine, config)
    facts = {"rank": world.rank, "world_size": world.world_size, "device": device.type, "strategy": config.strategy}
    facts |= {"model": f"{config.model} {config.model_size}", "blocks": blocks}
    recorder: Recorder | None = None
    run, record = checkpoints.run, checkpoints.hold.write
    with ExitStack() as observers:
        if config.memory_snapshot or config.memory_limit or config.profile:
            from fsdp2_extra.allocations.phases import Phases

            phases = observers.enter_context(Phases(engine, checkpoints, lambda: checkpoints.progress.step))
        if config.memory_snapshot or config.memory_limit:
            from fsdp2_extra.allocations.recorder import Recorder

            write = record if config.memory_snapshot else None
            recorder = observers.enter_context(Recorder(engine, device, facts, write, config.memory_limit))
            phases.listeners.append(recorder.phase)
        if config.profile:
            from fsdp2_extra.allocations.profile import Profile

            profile = observers.enter_context(Profile(world.rank, device, record))
            phases.listeners.append(profile.phase)

        def tensors() -> int | None:
            if device.type == "cuda":
                return torch.cuda.max_memory_allocated(device)
            return None if recorder is None else recorder.ledger.peak_bytes

        try:
            yield tensors
        except torch.OutOfMemoryError as error:
            from fsdp2.report import planned
            from fsdp2_extra.allocations import out_of_memory

            alive = recorder.ledger.alive() if recorder else out_of_memory.known_state(engine, device)
            error.add_note(out_of_memory.report(alive, config, device.type, world.world_size, blocks))
            if planned_advice := planned.advice(run.place, world.world_size):
                error.add_note(planned_advice)
            error.add_note(out_of_memory.planning(config, device, world.world_size, run.place))
            raise
    if config.profile:
        from fsdp2.run.beside import tool

        page = tool("--profile", "memory.page").page  # needs an extra; preflight has checked that it is there
        name = f"rank{world.rank}_memory_profile.html"
        source = "torch.profiler, which sees nothing of what was allocated before its first step"
        record(name, page(profile.timeline(facts), source).encode())


def _names_of_blocks(engine: Engine, config: Config) -> list[str]:
    """The names that the blocks of a model have once it is wrapped."""
    plain = config.spec.on_meta(config.model_size)
    blocks = set(blocks_of(config)(plain))
    wrapped: dict[str, str] = {}
    for name, _ in engine.model.named_modules():  # a wrapper before that which it wraps
        inner = re.sub(r"\b_(fsdp_wrapped|checkpoint_wrapped|orig)_mod(ule)?\b\.?", "", name.removeprefix("module."))
        wrapped.setdefault(inner.rstrip("."), name)
    return [wrapped[name] for name, module in plain.named_modules() if module in blocks and name in wrapped]
