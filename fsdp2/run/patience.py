"""How long ranks wait for each other: long where one may have much to do by itself, and in a step as the user says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

# A download, a first compilation, a shard on a slow disk.
LONG = timedelta(minutes=30)


class Patience:
    """The timeouts of a training's process groups, which begin as LONG.

    Args:
        seconds: in a step, from the second on: the first one compiles and connects. None stays with LONG.
        model: whose parameters tell the meshes.

    With gloo a rank that has waited in vain raises RuntimeError; nccl's watchdog ends the process.
    """

    def __init__(self, seconds: float | None, model: nn.Module) -> None:
        self._short = LONG if seconds is None else timedelta(seconds=seconds)
        self._now, self._steps = LONG, 0
        meshes = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
        groups = [dist.group.WORLD, *(group for mesh in meshes for group in mesh.get_all_groups())]
        self._groups = [group for group in groups if group is not None]

    def before_step(self) -> None:
        self._steps += 1
        if self._steps > 1:
            self._set(self._short)

    @contextmanager
    def long(self, *, stay: bool = False) -> Iterator[None]:
        """Wait long while the body runs; afterwards too if no step follows, as after an error."""
        before = self._now
        self._set(LONG)
        yield
        if not stay:
            self._set(before)

    def _set(self, timeout: timedelta) -> None:
        if timeout != self._now:
            for group in self._groups:
                set_timeout(timeout, group)
            self._now = timeout


def set_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """Let later operations of a group wait so long. Older versions of torch than 2.15 have it under a private name."""
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    change(timeout, group)
