from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import lanes, thorough
from tests.harness import LEAVES_NOTHING, Ranks, losses, main_in_ranks, small

ROOT = Path(__file__).parent.parent
# Real subsets of MNIST and Fashion-MNIST in torchvision's layout, where a checkout has them.
DATA_ROOT = ROOT.parent / "shared" / "data"


def pytest_configure(config: pytest.Config) -> None:
    lanes.configure(config)
    try:
        import hypothesis
    except ImportError:  # a borrowed GPU machine hasn't it, and no test there needs it
        return
    # By default an example that takes more than 0.2 s fails, and one does on a busy machine.
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)  # before pytest takes its choice by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    thorough.mark(items)


def pytest_collection_finish() -> None:
    """Collect garbage more seldom, and not among what the tests' modules have imported: it took an eighth of a plan."""
    gc.freeze()
    gc.set_threshold(20_000)


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # at the end of the process libraries look for what nobody has given back


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pool = Ranks(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture(autouse=True, scope="module")
def _no_rank_outlives_its_module(ranks: Ranks) -> Iterator[None]:
    yield
    ranks.close()


@pytest.fixture(autouse=True)
def _no_module_outlives_its_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module that a test wrote leaves with it: the next may ask that its own of this name isn't imported."""
    before = set(sys.modules)
    yield
    temporary = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(temporary):
            del sys.modules[name]


Events = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def train(ranks: Ranks, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Events]:
    """Run `fsdp2.train` on N ranks with a command line; rank 0's events.

    It is the smallest model on few steps, and its run directory is below the test's folder.
    """
    writes = LEAVES_NOTHING if request.node.get_closest_marker("losses_alone") else ()

    def run(*flags: str, n: int = 2, run: str = "run", steps: int | None = 6, timeout: float = 120) -> Events:
        line = small(tmp_path / run, *writes)
        if steps is not None:
            line.append(f"--max-steps={steps}")
        events: Events = ranks.run(main_in_ranks, [*line, *flags], ranks=n, timeout=timeout)[0]
        return events

    return run


@pytest.fixture(scope="module")
def known() -> dict[str, list[float]]:
    """Losses that several tests of a module compare with, by what they are of; filled when first needed."""
    return {}


@pytest.fixture
def reference(train: Callable[..., Events], known: dict[str, list[float]]) -> Callable[..., list[float]]:
    """The losses of a run with flags that is undisturbed, from one run for all tests of a module."""

    def of(*flags: str, n: int = 2, steps: int = 6) -> list[float]:
        name = f"{n} ranks, {steps} steps: {' '.join(flags)}"
        if name not in known:
            events = train(*flags, *LEAVES_NOTHING, n=n, steps=steps, run=f"reference-{len(known)}")
            known[name] = losses(events)
        return known[name]

    return of


@pytest.fixture
def data_root() -> Path:
    if not (DATA_ROOT / "FashionMNIST").is_dir():
        pytest.skip(f"needs the image files in {DATA_ROOT}, which this checkout doesn't have")
    return DATA_ROOT
