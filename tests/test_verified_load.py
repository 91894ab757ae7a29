"""A checkpoint is verified while it is loaded: in one pass, by any number of ranks, with no byte left out."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
import torch
import torch.distributed as dist

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.restore import read_weights, restore
from fsdp2.checkpoint.state import AppState, Progress, RandomState, WeightsOnly
from fsdp2.checkpoint.store import DamagedCheckpoint, Store
from tests.harness import Ranks, flip_a_bit, make_engine, one_step, save


def _app() -> AppState:
    engine = make_engine()
    rng = RandomState(dist.get_rank(), torch.device("cpu"))
    return AppState(engine.model, engine.optimizer, {"progress": Progress(1), "rng": rng})


def _save(folder: Path) -> None:
    engine = make_engine()
    one_step(engine)
    rng = RandomState(dist.get_rank(), torch.device("cpu"))
    save(Store(LocalFiles(folder)), AppState(engine.model, engine.optimizer, {"progress": Progress(1), "rng": rng}), 1)


@pytest.fixture
def checkpoint(ranks: Ranks, tmp_path: Path) -> Path:
    ranks.run(_save, tmp_path)
    return tmp_path / "step-00000001"


class CountingFiles(LocalFiles):
    """Counts the bytes that are read of each file."""

    read_of: dict[str, int]

    def open(self, name: str) -> BinaryIO:
        counts = self.read_of
        counts.setdefault(name, 0)

        class Counting(io.FileIO):
            def readinto(self, buffer: Any) -> int:
                count = super().readinto(buffer) or 0
                counts[name] += count
                return count

        return cast(BinaryIO, io.BufferedReader(Counting(str(self._path(name)))))


def _restore_and_count(checkpoint: Path) -> dict[str, int]:
    files = CountingFiles(checkpoint)
    files.read_of = {}
    restore(files, _app())
    return files.read_of


def test_at_the_same_world_size_each_shard_is_read_once(ranks: Ranks, checkpoint: Path) -> None:
    counts = ranks.run(_restore_and_count, checkpoint)
    sizes = {path.name: path.stat().st_size for path in checkpoint.glob("*.distcp")}
    assert set(sizes) == {"__0_0.distcp", "__1_0.distcp"}
    for rank, counted in enumerate(counts):
        own = f"__{rank}_0.distcp"
        assert sizes[own] <= counted[own] < 1.1 * sizes[own]  # read ahead, the end of a part is read twice
        # Of the other's, what is saved once for both: plain values, and the steps that the optimizer counts.
        assert counted.get(f"__{1 - rank}_0.distcp", 0) < sizes[f"__{1 - rank}_0.distcp"] / 2


def _load(how: str, checkpoint: Path) -> str:
    app, files = _app(), LocalFiles(checkpoint)
    load: dict[str, Callable[[], Any]] = {
        "all": lambda: restore(files, app),
        "weights": lambda: read_weights(WeightsOnly(app.model, None), files),
        "sizes": lambda: restore(files, app, hashes=False),
    }
    try:
        load[how]()
    except DamagedCheckpoint as error:
        return str(error)
    return "loaded"


def _loads(how: str, checkpoint: Path) -> list[str]:
    """Damage one byte after another, from the first of each file to its last, load, and mend it."""
    answers = []
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        file = checkpoint / name
        content = file.read_bytes()
        for position in range(0, len(content), len(content) // 6):
            dist.barrier()
            if dist.get_rank() == 0:
                changed = bytearray(content)
                changed[position] ^= 1
                file.write_bytes(changed)
            dist.barrier()
            answer = _load(how, checkpoint)
            answers.append("found" if f"{name} differs from what was committed" in answer else answer)
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_bytes(content)
    dist.barrier()
    answers.append(_load(how, checkpoint))
    return answers


@pytest.mark.parametrize(("how", "ranks_that_load"), [("all", 2), ("all", 3), ("weights", 1)])
def test_a_changed_byte_anywhere_is_found_by_every_rank(
    ranks: Ranks, checkpoint: Path, how: str, ranks_that_load: int
) -> None:
    for answers in ranks.run(_loads, how, checkpoint, ranks=ranks_that_load):
        assert len(answers) > 18
        assert set(answers[:-1]) == {"found"}
        assert answers[-1] == "loaded"


def test_with_sizes_alone_a_changed_byte_of_a_tensor_is_not_looked_for(ranks: Ranks, checkpoint: Path) -> None:
    shard = checkpoint / "__1_0.distcp"
    flip_a_bit(shard)
    assert ranks.run(_load, "sizes", checkpoint) == ["loaded"] * 2
    shard.write_bytes(shard.read_bytes()[:-1])
    for answer in ranks.run(_load, "sizes", checkpoint):
        assert "__1_0.distcp has" in answer
    flip_a_bit(checkpoint / ".metadata")
    for answer in ranks.run(_load, "sizes", checkpoint):
        assert "__1_0.distcp has" in answer
