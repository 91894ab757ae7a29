from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp2.config import Config
from fsdp2_tools.plan import memory


@pytest.fixture(autouse=True, scope="package")
def _each_execution_once() -> Iterator[None]:
    """Plans of the same flags and ranks, a second of computing each, are drawn from one execution."""
    done: dict[Any, memory.Execution] = {}
    original = memory.execute

    def execute(config: Config, *rest: Any, **more: Any) -> memory.Execution:
        # Where a run is kept and when it ends change nothing that is executed.
        key = (dataclasses.replace(config, run_dir=None, memory_limit=None), rest, tuple(more.items()))
        if key not in done:
            done[key] = original(config, *rest, **more)
        return done[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "execute", execute)
        yield
