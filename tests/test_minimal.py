"""`fsdp2.minimal` is `fsdp2.train` on one screen: the same losses, bit for bit, and it goes on where it was killed."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from fsdp2 import minimal
from fsdp2.config import Config
from tests.harness import Ranks, losses, main_in_ranks


def trained(folder: Path, epochs: int) -> list[float]:
    """The losses of `minimal.train` on a tiny model. In `Ranks`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minimal, "build", partial(minimal.build, size="tiny"))
        return minimal.train(folder, torch.device("cpu"), epochs)


def said(folder: Path, epochs: int) -> str:
    """What `minimal.train` prints on a tiny model. In `Ranks`."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trained(folder, epochs)
    return printed.getvalue()


def test_losses_are_those_of_train_also_after_a_resume_on_other_ranks(ranks: Ranks, tmp_path: Path) -> None:
    flags = [
        "--epochs=2",
        "--model-size=tiny",
        "--clip-grad-norm",
        "--explicit-prefetching=1",
        "--no-save-model",
        "--threads=1",
    ]
    events = ranks.run(main_in_ranks, [*flags, "--device=cpu", f"--run-dir={tmp_path / 'run'}"])[0]
    first = ranks.run(trained, tmp_path / "minimal", 1)[0]
    (tmp_path / "minimal" / "unfinished").mkdir()  # what a kill in the middle of a save leaves
    (tmp_path / "minimal" / "unfinished" / "__0_0.distcp").write_bytes(b"torn")
    second = ranks.run(trained, tmp_path / "minimal", 2)[0]
    assert first + second == losses(events)
    third = ranks.run(trained, tmp_path / "minimal", 3, ranks=3)[0]
    assert len(third) == 8  # 1,437 samples in steps of 3 x 64
    assert third[-1] < second[-1]
    # A finished training that is started again has nothing to do, and says so.
    first_rank, second_rank = ranks.run(said, tmp_path / "minimal", 3)
    assert (first_rank, second_rank) == ("rank 0 of 2: 3/3 epochs done\n", "rank 1 of 2: 3/3 epochs done\n")


def without_groups(folder: Path) -> list[float]:
    """As `trained`, without the loops over blocks: the page's first change, which leaves one group. In `Ranks`."""
    source, count = re.subn(r"    for [^\n]*blocks[^\n]*\n(        [^\n]*\n)+", "", inspect.getsource(minimal.build))
    assert count == 2, "the page says that there are two"
    with pytest.MonkeyPatch.context() as patch:
        exec(source, there := {**vars(minimal)})
        patch.setattr(minimal, "build", there["build"])
        return trained(folder, 1)


def test_without_groups_it_has_the_same_losses(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks.run(trained, tmp_path / "groups", 1)
    assert ranks.run(without_groups, tmp_path / "one") == expected


def test_its_model_is_that_of_train() -> None:
    assert inspect.signature(minimal.build).parameters["size"].default == Config().model_size


def test_one_screen() -> None:
    assert len(Path(minimal.__file__).read_text().splitlines()) <= 90
