"""The interface of checkpoints in memory, and its empty form: `--memory-checkpoint` isn't given, and none is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from fsdp2.checkpoint.state import AppState
from fsdp2.config import Config
from fsdp2.run.job import Job
from fsdp2.run.rundir import LINEAGE, RunDir
from fsdp2.run.runtime import World


class InMemory(Protocol):
    """The checkpoints in memory of a run: `NodeMemory`, or `NotInMemory`."""

    world: World
    failure: str | None

    @property
    def busy(self) -> bool: ...

    def begin(self, run: RunDir) -> None: ...

    def due(self, step: int) -> bool: ...

    def open(self, config: Config, app: AppState, device: torch.device) -> None: ...

    def save(self, step: int, info: Mapping[str, Any], generators: list[dict[str, Any]]) -> None: ...

    def close(self) -> None: ...


class NotInMemory:
    """No checkpoints in memory. `begin` invalidates those that an earlier start of the run has left."""

    busy = False
    failure: str | None = None

    def __init__(self, world: World) -> None:
        self.world = world

    def begin(self, run: RunDir) -> None:
        """Before the first step: invalidate the checkpoints in memory."""
        if self.world.rank == 0 and run.files.size(LINEAGE) is not None:
            run.files.unlink(LINEAGE)

    def due(self, step: int) -> bool:
        """Return whether the state after this step is kept."""
        return False

    def open(self, config: Config, app: AppState, device: torch.device) -> None:
        """Nothing is to be made ready."""

    def save(self, step: int, info: Mapping[str, Any], generators: list[dict[str, Any]]) -> None:
        """Not called: no step is due."""
        raise AssertionError("no step is due")

    def close(self) -> None:
        """Nothing is to be given back."""


def agree(config: Config, job: Job, world: World) -> InMemory:
    """Take over what rank 0 has found out, and then what is in the nodes' memories. A collective call.

    Raises ConfigError on every rank, as `Job.agree` and `NodeMemory` do.
    """
    job.agree()
    if config.memory_checkpoint is None:
        return NotInMemory(world)
    from fsdp2.run.node_memory import NodeMemory

    return NodeMemory(config, config.memory_checkpoint, job, world)
