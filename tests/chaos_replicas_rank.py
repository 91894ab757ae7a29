"""The inside of `tests/chaos_replicas.py`: one rank of a run that loses a node."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from tqdm import tqdm

import fsdp2.train
from fsdp2.config import parse
from fsdp2.run.process import ending
from fsdp2_extra.elastic import node_memory
from tests.chaos_rank import PATIENCE, Fuse, Point, install
from tests.harness import SMALL

STEPS, RANKS, PER_NODE = 6, 4, 2
FLAGS = [
    *SMALL,
    "--model=cnn",
    "--replicas=2",
    "--memory-checkpoint",
    f"--max-steps={STEPS}",
    "--checkpoint-every=1000",
]


@dataclass(frozen=True)
class Loss(Point):
    """Where a node is lost."""

    memory: bool = True  # its memory too

    @property
    def node(self) -> int:
        return self.rank // PER_NODE


def rank_main(
    rank: int, store: str, folder: Path, name: str, memory: Path, flags: list[str], point: Loss | None
) -> None:
    """One rank of a run, in a process of its own. `memory` has a folder for that of each node."""
    with open(folder / f"{name}-rank{rank}.log", "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed process leaves behind
    os.environ.update(LOCAL_RANK=str(rank % PER_NODE), LOCAL_WORLD_SIZE=str(PER_NODE))
    cast(Any, node_memory).ROOT = memory / f"node{rank // PER_NODE}"
    fuse = Fuse(point, rank, folder / name)
    install(fuse)
    cast(Any, ending._ended_by_launcher).__defaults__ = (0.5,)
    timeout = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=timeout)

    def on_event(kind: str, data: dict[str, Any]) -> None:
        if kind == "train":
            fuse.around("step", f"step {data['step']}", lambda: None)
        if rank == 0 and kind in ("start", "resume"):
            (folder / f"{name}-begin.json").write_text(json.dumps([kind, data["step"], data.get("checkpoint")]))

    with ending.exit_status():
        fsdp2.train.main(parse([*FLAGS, *flags, f"--run-dir={folder / name}"]), on_event)
    (folder / f"{name}-moments{rank}.json").write_text(json.dumps(fuse.moments))
    dist.destroy_process_group()
