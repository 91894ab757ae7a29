from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import Ranks, main_in_ranks, small


@pytest.fixture(scope="package")
def finished(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, that tests copy."""
    run = tmp_path_factory.mktemp("hostile") / "run"
    ranks.run(main_in_ranks, small(run, "--max-steps=1"))
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def soon() -> Iterator[None]:
    """A test that waits for a pipe or reads a device without end fails after 20 seconds."""

    def stop(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
