"""A run's decisions before its start: where it is written, what it goes on from, and what it says of that."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from fsdp2.options.errors import ConfigError
from fsdp2.run.directory.hold import Hold
from fsdp2.run.directory.rundir import RunDir
from fsdp2.run.process.group import broadcast, gather
from fsdp2.run.schedule import Length


class Origin(NamedTuple):
    """The checkpoint that a run goes on from, or none.

    Attributes:
        checkpoint: where it is.
        partial: of it the weights that fit, and nothing else.
        in_memory: it is in each node's memory, and of this run.
        before: the length of the run that wrote it.
        newest_kept: the step after which this run's directory's checkpoints are set aside; None for none of them.
    """

    checkpoint: str | None = None
    partial: bool = False
    in_memory: bool = False
    before: Length | None = None
    newest_kept: int | None = None


class Job:
    """The decisions before a run's start, on all ranks once they `agree`.

    Attributes:
        hold: the run's hold on its directory, a context that gives it back at the end.
        origin: what it goes on from.
        optimizer: settings that came with an import, and that no flag says.
        note: what the opening event says of these decisions.
    """

    def __init__(self, hold: Hold, model: str) -> None:
        """`model`: what the model on this rank is made of."""
        self.hold, self.origin, self._model = hold, Origin(), model
        self.optimizer: dict[str, Any] = {}
        self.note: str | None = None

    @property
    def run(self) -> RunDir:
        return self.hold.run

    def agree(self) -> None:
        """Take over what rank 0 has found out; it alone has looked at the run directory. A collective call.

        Raises ConfigError on every rank if one has made another model, since they would wait for ever; and as
        `Hold.agree` does.
        """
        self.origin, self.note = broadcast((self.origin, self.note))
        models = gather(hashlib.sha256(self._model.encode()).hexdigest())
        if other := [rank for rank, model in enumerate(models) if model != models[0]]:
            raise ConfigError(
                f"--model: rank {other[0]} made a model with other names, shapes or dtypes than rank 0's; the model "
                "must follow from the flags alone"
            )
        self.hold.agree()

    def go_on_from(self, origin: Origin, *notes: str | None) -> None:
        """Decide what the run goes on from, and say why in the opening event."""
        self.origin = origin
        self.add_note(*notes)

    def restores_own(self) -> bool:
        """Return whether the checkpoint is of this run, and not of another that this one goes on from."""
        checkpoint = self.origin.checkpoint or ""
        return not self.origin.partial and (self.origin.in_memory or checkpoint.startswith(f"{self.run.store.files}/"))

    def add_note(self, *texts: str | None) -> None:
        """Add to what the opening event says, on rank 0, which alone shows and writes it."""
        self.note = "; ".join(filter(None, (self.note, *texts))) or None

    def opening_event(self, data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The `start` or `resume` event."""
        data = {**data, "note": self.note}
        if self.origin.checkpoint is None:
            return "start", data
        return "start" if self.origin.partial else "resume", {**data, "checkpoint": self.origin.checkpoint}
