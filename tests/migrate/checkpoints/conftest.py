from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fsdp2.options.errors import ConfigError
from migration.__main__ import main
from tests.harness import Ranks
from tests.migrate.checkpoints import fsdp1


@dataclass
class Saved:
    """What FSDP1 left of one training, in every form, and its losses from there on."""

    folder: Path
    losses: list[float]
    groups: int


def _saved(ranks: Ranks, folder: Path, *, orig: bool) -> Saved:
    first, second = ranks.run(_save, folder, orig)
    assert first != second, "each rank has its own batch"
    return Saved(folder, first, 2 if orig else 1)


def _save(folder: Path, orig: bool) -> list[float]:
    return fsdp1.save_all(folder, orig=orig)


@pytest.fixture(scope="package")
def flat(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """use_orig_params=False: flat parameters, whose `step` is one storage for all of a unit."""
    return _saved(ranks, tmp_path_factory.mktemp("flat"), orig=False)


@pytest.fixture(scope="package")
def orig(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """use_orig_params=True, and two parameter groups."""
    return _saved(ranks, tmp_path_factory.mktemp("orig"), orig=True)


Cli = Callable[..., tuple[int, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command in this process: its exit status, and what it printed or why it was refused."""

    def call(*arguments: object) -> tuple[int, str]:
        status, refusal = 0, ""
        try:
            main(["checkpoint", *map(str, arguments)])
        except ConfigError as error:
            status, refusal = 2, str(error)
        except SystemExit as end:
            status = int(str(end.code))
        printed = capsys.readouterr().out
        if status == 2:
            assert (printed, "\n" in refusal) == ("", False)
        return status, refusal or printed

    return call


def everything(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


# Each makes a source in a folder, and returns what to convert, with further arguments.
