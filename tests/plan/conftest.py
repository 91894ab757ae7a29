from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp2.config import Config
from fsdp2_tools.plan import execute as executing


@pytest.fixture(autouse=True, scope="package")
def _each_execution_once() -> Iterator[None]:
    """Plans of the same flags and ranks, a second of computing each, are drawn from one execution."""
    done: dict[Any, executing.Execution] = {}
    original = executing.execute

    @functools.wraps(original)
    def execute(config: Config, *rest: Any, **more: Any) -> executing.Execution:
        # When a run ends changes nothing that is executed, nor does its folder: at a URL rank 0 gathers a large model.
        place = config.run_dir if "://" in (config.run_dir or "") else None
        key = (dataclasses.replace(config, run_dir=place, memory_limit=None), rest, tuple(more.items()))
        if key not in done:
            done[key] = original(config, *rest, **more)
        return done[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executing, "execute", execute)
        yield
