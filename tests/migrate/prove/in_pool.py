"""Programs recorded on the pool's ranks: a start of its own takes seconds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from migration.prove.launch import Program
from migration.prove.rank import run_script
from migration.prove.record import Record
from tests.harness import Ranks


def record_here(script: str, arguments: list[str], store: str, settings: dict[str, Any]) -> None:
    """On this rank, in a process group that the program makes by itself."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # what one rank takes down at once another one still connects to
    dist.destroy_process_group()
    before, generator = dict(os.environ), torch.get_rng_state()
    theirs = dist.init_process_group

    def init(backend: str = "", *_: Any, **__: Any) -> None:
        theirs("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)

    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), SCRATCH=os.path.dirname(store))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "init_process_group", init)
            run_script(settings, script, arguments)
    finally:
        os.environ.clear()
        os.environ.update(before)
        torch.set_rng_state(generator)
        if dist.is_initialized():
            dist.destroy_process_group()
        theirs("gloo", store=dist.FileStore(f"{store}-after", world), rank=rank, world_size=world)
        dist.barrier()  # as above, of the pool's next run


@dataclass
class InPool(Program):
    """A program whose ranks are the pool's."""

    pool: Ranks | None = None

    def record(self, folder: Path, **settings: Any) -> Record:
        folder.mkdir()
        assert self.pool is not None
        arguments = [str(self.script), self.arguments, str(folder / "store"), self.settings(folder, settings)]
        self.pool.run(record_here, *arguments, ranks=self.ranks, timeout=self.timeout)
        return self._read(folder)
