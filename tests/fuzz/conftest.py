from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.fuzz.runs import FLAGS, Stage, tree
from tests.harness import Ranks, main_in_ranks, small


@pytest.fixture(scope="package")
def finished(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of 2 ranks with checkpoints 2 and 3, a full model and the timelines of its memory. Nobody changes it."""
    run = tmp_path_factory.mktemp("fuzz") / "run"
    ranks.run(main_in_ranks, small(run, *FLAGS))
    before = tree(run)
    yield run
    assert tree(run) == before


@pytest.fixture(scope="package")
def _group() -> Iterator[None]:
    """A process group of one rank, so that no example has to make one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def stage(finished: Path, _group: None, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    if not Path("/proc/self/statm").exists():
        pytest.skip("limits memory as Linux does")
    return Stage(finished, tmp_path_factory.mktemp("stage"))
