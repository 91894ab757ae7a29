"""A rank's phase at each moment, by the calls of its engine's methods."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from fsdp2.parallel.engine import Engine

# What a rank does from the call of an engine's method on, and after it.
OF_ENGINE = {
    "begin_step": ("data", "data"),
    "forward": ("forward", "forward"),  # the loss, which the loop computes, belongs to it
    "backward": ("backward", "data"),
    "clip": ("optimizer", "optimizer"),
    "step": ("optimizer", "between"),
}
OF_CHECKPOINTS = {"save": "checkpoint", "write_full_model": "full model"}
Listener = Callable[[str, int], Any]  # (phase, number of the step that it belongs to)


class Phases(AbstractContextManager["Phases"]):
    """While entered, tells each listener of each phase as it begins.

    Args:
        step: the number of optimizer steps done.
        checkpoints: an object whose `save` writes checkpoints, and whose `write_full_model` writes the whole model.
    """

    def __init__(self, engine: Engine, checkpoints: Any, step: Callable[[], int]) -> None:
        self.engine, self.checkpoints, self.step = engine, checkpoints, step
        self.listeners: list[Listener] = []
        self._replaced: list[tuple[Any, str]] = []

    def __enter__(self) -> Phases:
        for method, (during, after) in OF_ENGINE.items():
            self._tell(self.engine, method, during, after)
        for method, during in OF_CHECKPOINTS.items():
            self._tell(self.checkpoints, method, during, "between")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        for owner, method in self._replaced:
            delattr(owner, method)  # the class's own is seen again

    def _tell(self, owner: Any, method: str, during: str, after: str) -> None:
        original = getattr(owner, method)

        def told(*args: Any, **kwargs: Any) -> Any:
            # In evaluation the engine's forward is no forward of a step.
            evaluating = owner is self.engine and not self.engine.model.training
            self._say("evaluation" if evaluating else during)
            result = original(*args, **kwargs)
            if after != during:
                self._say(after)
            return result

        setattr(owner, method, told)
        self._replaced.append((owner, method))

    def _say(self, phase: str) -> None:
        step = self.step() + 1
        for listener in self.listeners:
            listener(phase, step)
