"""An examination among threads of one process: each is a rank with its own `Here`, and all share a store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp2.config import Config
from fsdp2.run.process.runtime import World
from fsdp2_tools.doctor.asking import Asker, Here, Question


def examined(
    ranks: int,
    questions: Mapping[str, Question],
    ask: Callable[[Asker], Any],
    *,
    seconds: float = 5.0,
    configs: Sequence[Config] | None = None,
) -> Any:
    """What `ask` returns on rank 0 while the others serve; raises what rank 0 raises.

    Args:
        configs: of each rank; by default all have the default.
    """
    store = dist.HashStore()

    def asker(rank: int) -> Asker:
        world = World(rank, ranks, rank, ranks)
        config = Config() if configs is None else configs[rank]
        return Asker(Here(world, torch.device("cpu"), store, seconds, config=config), questions)

    threads = [threading.Thread(target=asker(rank).serve, daemon=True) for rank in range(1, ranks)]
    for thread in threads:
        thread.start()
    first = asker(0)
    try:
        return ask(first)
    finally:
        first.end(None)
