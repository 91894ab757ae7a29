"""Records what a training run allocates while it is entered."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from fsdp2.parallel.engine import Engine
from fsdp2_extra.allocations import cuda_history
from fsdp2_extra.allocations.ledger import Ledger
from fsdp2_extra.allocations.timeline import Timeline, dump, file_name

Write = Callable[[str, bytes], Any]


class Recorder(AbstractContextManager["Recorder"]):
    """Writes `rank<r>_memory_timeline.json.gz` at its end, and on a GPU `rank<r>_memory_snapshot.pickle`.

    Args:
        facts: of the run and this rank, for who reads the timeline; `rank` is needed.
        write: (name, bytes) to a file of the run; None writes nothing.
        limit: bytes of tensors beyond which the run ends as if the device had no more.
    """

    def __init__(
        self, engine: Engine, device: torch.device, facts: dict[str, Any], write: Write | None, limit: int | None
    ) -> None:
        self.engine, self.device, self.facts, self.write = engine, device, facts, write
        self.ledger = Ledger(limit=limit)
        self.has_history = device.type == "cuda" and write is not None

    def phase(self, name: str, step: int) -> None:
        """A listener of Phases."""
        if self.ledger.phases[-1].name == "backward":
            # Before a step ends that sets them free: which tensors are gradients their parameters alone know.
            self.ledger.mark("gradients", self.engine.gradients())
        self.ledger.phase(name, step)

    def timeline(self) -> Timeline:
        """The recording, complete when this has been left."""
        facts = {**self.facts, "complete_from": self.ledger.complete_from}
        if self.device.type == "cuda":  # what the allocator has counted, rounding and caching included
            facts["allocated_bytes"] = torch.cuda.max_memory_allocated(self.device)
            facts["reserved_bytes"] = torch.cuda.max_memory_reserved(self.device)
        return Timeline(facts, self.ledger.allocations, self.ledger.phases, self.ledger.collectives)

    def __enter__(self) -> Recorder:
        if self.has_history:
            cuda_history.start()
        self.ledger.__enter__()
        self.ledger.watch(self.engine.model, self.engine.held())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.ledger.mark("gradients", self.engine.gradients())  # a step may have been cut short
        self.ledger.__exit__(kind, error, trace)
        rank = self.facts["rank"]
        history = cuda_history.take() if self.has_history else None
        if self.write is not None:
            self.write(file_name(rank), dump(self.timeline()))
            if history is not None:
                self.write(f"rank{rank}_memory_snapshot.pickle", history)
