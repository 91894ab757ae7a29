"""Checkpoints in the memory of each node, which outlives the processes of its ranks: `--memory-checkpoint`.

    /dev/shm/fsdp2-USER-RUN/  .lock  step-00000120/  __0_0.distcp …  .metadata  COMMIT.json

torchrun ends all ranks when one has died, and what they held is gone with them. What they wrote to /dev/shm is not.
Each node holds a whole copy of the model, a replica of HSDP, and keeps a whole checkpoint there, by the same protocol
as on a disk. When ranks are started again, the newest counts, and a node that has none gets it from one that has it.

Each checkpoint in memory records the start (process launch) that wrote it. `memory.json` in the run directory names the
last start. A checkpoint counts if that wrote it or resumed from it: others belong to steps that were done differently.
"""

from __future__ import annotations

import json
import os
import stat
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fsdp2.checkpoint.disk import file_system
from fsdp2.checkpoint.files import LocalFiles, publish
from fsdp2.checkpoint.places import open_files
from fsdp2.checkpoint.saver import Outcome, Saver
from fsdp2.checkpoint.state import AppState
from fsdp2.checkpoint.store import DamagedCheckpoint, Store, read_marker, verify
from fsdp2.config import Config
from fsdp2.options.errors import ConfigError
from fsdp2.options.settings_file import read_table
from fsdp2.parallel.shards import local
from fsdp2.run.directory.lock import WriterLock
from fsdp2.run.directory.room import SHARED_MEMORY, bytes_below, free_bytes, memory_folder
from fsdp2.run.directory.rundir import LINEAGE, RunDir
from fsdp2.run.job import Origin
from fsdp2.run.process.group import broadcast, gather, together
from fsdp2.run.process.limits import free_memory
from fsdp2.run.process.runtime import World
from fsdp2.run.resuming import changed_batch, check_checkpoint, length_before
from fsdp2.units import size
from fsdp2_extra.elastic.node_fetch import fetch

FLAG = "--memory-checkpoint"
ROOT = SHARED_MEMORY  # a test of several nodes on one machine gives each another


class NodeFolder:
    """This node's folder in memory, locked by one run: checkpoints of its earlier starts, and those of this one."""

    def __init__(self, config: Config, run: RunDir, world: World, at_end: Callable[[Callable[[], None]], None]) -> None:
        """Take the folder; `at_end` gets what releases it. A collective call. Raises ConfigError on every rank."""
        self.world, self.shards = world, world.world_size // config.replicas
        self.folder = memory_folder(run.place, ROOT)
        self.store = Store(LocalFiles(self.folder))
        self.start: dict[str, Any] = broadcast({"start": uuid.uuid4().hex, "from": None})
        self._run = run
        self._check_nodes(gather((world.local_rank, world.local_world_size)))
        with together():
            if world.local_rank == 0:
                self._take(at_end)

    def _check_nodes(self, places: list[tuple[int, int]]) -> None:
        """Raise ConfigError unless each node holds whole copies. `places`: (local rank, ranks on the node) of each."""
        each = places[0][1]
        even = all(place == (rank % each, each) for rank, place in enumerate(places))
        if not even or each % self.shards:
            nodes = len({rank - place[0] for rank, place in enumerate(places)})
            raise ConfigError(
                f"{FLAG}: the model is sharded over {self.shards} ranks, and no node holds all of it, so a lost node "
                f"would take a part with it; use the same number of ranks on each node, and --replicas {nodes} or a "
                f"multiple, or drop {FLAG}"
            )

    def _take(self, at_end: Callable[[Callable[[], None]], None]) -> None:
        if file_system(ROOT) not in ("tmpfs", "ramfs"):
            raise ConfigError(f"{FLAG}: {ROOT} isn't a file system in memory here; drop {FLAG}")
        with suppress(FileExistsError):
            os.mkdir(self.folder, 0o700)
        found = os.lstat(self.folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(f"{FLAG}: {self.folder} isn't a folder of this user; move it away")
        at_end(WriterLock(self.folder, flag=f"{FLAG}:").release)
        self.store.remove_dead()

    def find(self, config: Config, origin: Origin) -> tuple[Origin, str, str | None] | None:
        """Find the newest checkpoint in any node's memory, and copy it to nodes that lack it. A collective call.

        Returns what the run goes on from and two notes, or None if `origin` is as new. Raises ConfigError on every
        rank.
        """
        lineage: dict[str, Any] = {}
        mine = on_disk = 0
        with together():
            if self.world.rank == 0:
                lineage = _lineage(self._run)
                on_disk = 0 if origin.checkpoint is None else read_marker(open_files(origin.checkpoint))["step"]
        lineage, on_disk = broadcast((lineage, on_disk))
        with together():
            mine = self._newest(lineage) if self.world.local_rank == 0 else 0
        newest = gather(mine)[:: self.world.local_world_size]
        step = max(newest)
        if step <= on_disk:
            return None
        holders = [node for node, there in enumerate(newest) if there == step]
        lacking = [node for node, there in enumerate(newest) if there < step]
        pairs = [(holders[i % len(holders)], node) for i, node in enumerate(lacking)]
        fetch(self.store, step, pairs, self.world)
        checkpoint = self.store.checkpoint(step)
        marker = read_marker(checkpoint)
        check_checkpoint(config, config.spec.described(config.model_size), checkpoint, marker)
        self.start["from"] = [marker["start"], step]
        got = f", which {len(lacking)} of {len(newest)} nodes got from another" if lacking else ""
        note = f"step {step} was in memory{got}: {self.folder}"
        origin = origin._replace(checkpoint=str(checkpoint), in_memory=True, before=length_before(marker))
        return origin, note, changed_batch(config, self.world, origin.before)

    def _newest(self, lineage: Mapping[str, Any]) -> int:
        """The newest step in this node's memory that counts; 0 if there is none."""
        for step in reversed(self.store.committed()):
            checkpoint = self.store.checkpoint(step)
            with suppress(DamagedCheckpoint):  # what is in memory isn't promised; on the disk there is another
                marker = read_marker(checkpoint)
                verify(checkpoint, hashes=False)
                if marker.get("start") == lineage.get("start") or [marker.get("start"), step] == lineage.get("from"):
                    return step
        return 0

    def keep_here(self) -> None:
        """Before the first step: invalidate the checkpoints in memory, except the one resumed from."""
        if self.world.rank == 0:
            publish(self._run.files, LINEAGE, json.dumps(self.start).encode())
        if self.world.local_rank == 0:
            self.store.clear(keep=(self.start["from"] or (None, None))[1])

    def require_room(self, needed: int) -> None:
        """Raise ConfigError on every rank if a node has too little memory for two checkpoints. A collective call.

        `check_room` estimates it beforehand; now the model has its memory. `needed`: bytes of this rank's part.
        """
        facts = gather((needed, bytes_below(self.folder) + _free()))
        for first in range(0, len(facts), self.world.local_world_size):
            # While one is written, the one before is still there.
            node_needs, free = 2 * sum(one for one, _ in facts[first : first + self.shards]), facts[first][1]
            if node_needs > free:
                raise ConfigError(
                    f"{FLAG}: two checkpoints take {size(node_needs)} of a node's memory, and {size(free)} are free on "
                    f"that of rank {first}; shard over more ranks, or drop {FLAG}"
                )

    def remove(self) -> None:
        """Give the memory back."""
        self.store.clear()
        (self.folder / ".lock").unlink()
        with suppress(OSError):  # a stranger's file in it; the checkpoints are gone
            self.folder.rmdir()


class NodeMemory:
    """Checkpoints that a run keeps in nodes' memories from the first step on; `failure`: why the last save failed."""

    def __init__(self, config: Config, folder: NodeFolder, app: AppState, device: torch.device) -> None:
        """A collective call. Raises ConfigError on every rank if a node has too little memory."""
        assert config.memory_checkpoint is not None
        self._every, self._folder, self._world = config.memory_checkpoint, folder, folder.world
        self.failure: str | None = None
        needed = sum(local(one).nbytes for one in tree_leaves(app.state_dict()) if isinstance(one, Tensor))
        app.release()
        folder.require_room(needed)
        self._rng = _GivenState()
        self._saver: Saver | None = None  # of one rank of those on this node that have the same shard
        if self._world.local_rank < folder.shards:
            first = self._world.rank - self._world.local_rank
            ranks = list(range(first, first + folder.shards))
            group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            assert isinstance(group, dist.ProcessGroup)
            app = app.with_parts({**app.parts, "rng": self._rng})
            background = config.async_checkpoint is not None
            self._saver = Saver(folder.store, app, device, keep=1, background=background, group=group)
        folder.keep_here()

    def due(self, step: int) -> bool:
        """Return whether the state after this step is kept."""
        return step % self._every == 0

    @property
    def busy(self) -> bool:
        """Return whether the save before is still being written on this rank."""
        return self._saver is not None and self._saver.busy

    def save(self, step: int, info: Mapping[str, Any], generators: list[dict[str, Any]]) -> None:
        """Keep the state after `step`. `generators` is each rank's state of its random generators.

        Raises nothing: `failure` says afterwards what went wrong.
        """
        if self._saver is None:
            return
        self._end(self._saver.wait())
        # The generators of all ranks that have this shard, on other nodes too: a lost node takes its own with it.
        shards = self._folder.shards
        alike = generators[self._world.local_rank % shards :: shards]
        self._rng.state = {rank: state for each in alike for rank, state in each.items()}
        self._end(self._saver.save(step, {**info, "start": self._folder.start["start"]}))

    def _end(self, ended: Outcome | None) -> None:
        if ended is None:  # of the one that goes on, which isn't dead
            return
        self.failure = None if ended.error is None else str(ended.error)
        if self.failure and self._world.local_rank == 0:
            try:
                self._folder.store.remove_dead()
            except OSError as error:
                self.failure += f"; what it left was not removed: {error}"

    def close(self) -> None:
        """Give the memory back, after the run's last checkpoint is on the disk. A collective call."""
        if self._saver is not None:
            self._saver.wait()
            self._saver.close()
        dist.barrier()
        if self._world.local_rank == 0:
            self._folder.remove()


class _GivenState:
    """A part of a checkpoint whose state is what it was given."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("a run restores each rank's own generators")


def _lineage(run: RunDir) -> dict[str, Any]:
    """Read `memory.json`. Empty if there is none, or none that can be read: then nothing in memory counts."""
    with suppress(ValueError):
        found = read_table(f"{run.place}/{LINEAGE}")
        if isinstance(found.get("start"), str):
            return found
    return {"start": "", "from": None}


def _free() -> int:
    """Bytes that can still be written to this node's memory."""
    disk, free = free_bytes(ROOT), free_memory()
    return min(one for one in (disk and disk[1], free) if one is not None)
