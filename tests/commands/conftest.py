from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from fsdp2.checkpoint.store import MARKER
from fsdp2_tools.checkpoint.__main__ import main
from tests.commands.common import Cli, State, checkpoint, flip
from tests.harness import Ranks, main_in_ranks, small


@pytest.fixture(scope="package")
def finished(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five steps with checkpoints 2, 4 and 5, that tests only read, or copy."""
    run = tmp_path_factory.mktemp("finished") / "run"
    ranks.run(main_in_ranks, small(run, "--max-steps=5", "--checkpoint-every=2"))
    return run


@pytest.fixture(scope="package")
def full(finished: Path) -> State:
    state: State = torch.load(finished / "full_model" / "full-model.pt", weights_only=True)
    return state


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def mixed(run: Path) -> Path:
    """Checkpoints 2 (superseded), 4 (damaged: a changed byte), 5 and 6 (dead)."""
    shutil.copytree(checkpoint(run), checkpoint(run, 6))
    (checkpoint(run, 6) / MARKER).unlink()
    flip(checkpoint(run, 4) / "__1_0.distcp")
    checkpoint(run, 2).rename(run / "checkpoints" / "superseded-1-step-00000002")
    return run


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command in this process: its exit status, output and errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return call
