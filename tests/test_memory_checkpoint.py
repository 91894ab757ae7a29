"""--memory-checkpoint: checkpoints in the memory of each node. Also the short form of `make chaos-replicas`."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.store import Store, fingerprint
from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.run.process.runtime import World
from fsdp2.train import main
from fsdp2_extra.elastic import node_fetch, node_memory
from tests.chaos_replicas import Reference, check, prepare
from tests.chaos_replicas_rank import Loss
from tests.harness import Ranks, flip_a_bit, losses, main_in_ranks, small


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fsdp2-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, memory: Path) -> Reference:
    return prepare(tmp_path_factory.mktemp("chaos"), memory, backgrounds=(False,))


def _operation(reference: Reference, rank: int, wanted: str, number: int = -1, **where: Any) -> Loss:
    moments = reference.moments[False, where.get("resumed", False), rank]["operation"]
    return Loss("operation", [i for i, moment in enumerate(moments, 1) if moment == wanted][number], rank, **where)


LOSSES: dict[str, Callable[[Reference], Loss]] = {
    "in a training step": lambda reference: Loss("step", 4, rank=2),
    "half-way through a shard": lambda reference: _operation(reference, 0, "data __0_0.distcp", -1000, when="torn"),
    "while it gets the other's copy": lambda reference: _operation(
        reference, 3, "create __1_0.distcp", 0, when="after", resumed=True
    ),
    "by one rank, and its memory stays": lambda reference: Loss("step", 4, rank=1, memory=False),
}


@pytest.mark.parametrize("where", LOSSES)
def test_a_run_that_loses_a_node_goes_on_from_the_others_memory_bit_for_bit(reference: Reference, where: str) -> None:
    check(reference, LOSSES[where](reference))


def _train(
    flags: list[str], root: Path, until: int | None = None, nodes: int = 1, patches: dict[str, Any] | None = None
) -> Any:
    """A run's events. With `until`, the run dies when that step is logged; of a refused one its text."""
    rank, per_node = dist.get_rank(), dist.get_world_size() // nodes
    events: list[tuple[str, dict[str, Any]]] = []

    def on_event(kind: str, data: dict[str, Any]) -> None:
        events.append((kind, data))
        if kind == "train" and data["step"] == until:
            raise RuntimeError("the end of this test's run")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(rank % per_node))
        patch.setenv("LOCAL_WORLD_SIZE", str(per_node))
        patch.setattr(node_memory, "ROOT", root)
        for name, value in (patches or {}).items():
            patch.setattr(name, value)
        try:
            main(parse(flags), on_event)
        except Exception as error:
            return events if until is not None and "the end of this test" in str(error) else str(error)
    return events


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fsdp2-test-", dir="/dev/shm") as folder:
        yield Path(folder)


def _begin(events: list[tuple[str, dict[str, Any]]]) -> tuple[str, int]:
    kind, data = events[0]
    return kind, data["step"]


KEEPING = ["--memory-checkpoint", "--checkpoint-every=1000", "--no-save-model"]


PIECES = ["--model=llama", "--model-size=debug", "--dataset=random-tokens", "--seq-len=16", "--sp=2"]


@pytest.mark.parametrize("more", [[], PIECES], ids=["", "pieces of sequences"])
def test_ranks_that_are_started_again_go_on_from_memory(
    ranks: Ranks, tmp_path: Path, root: Path, more: list[str]
) -> None:
    flags = small(tmp_path / "run", *more, *KEEPING, "--max-steps=6")
    ranks.run(_train, flags, root, 4)
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))
    events = ranks.run(_train, flags, root)[0]
    assert _begin(events) == ("resume", 3)  # step 4 was logged and not kept yet
    whole = ranks.run(main_in_ranks, small(tmp_path / "whole", *more, "--no-save-model", "--max-steps=6"))[0]
    assert losses(events) == losses(whole)[3:]
    assert not list(root.iterdir()), "the memory is given back"


def test_the_last_step_of_an_epoch_is_kept_too(ranks: Ranks, tmp_path: Path, root: Path) -> None:
    flags = small(tmp_path / "run", *KEEPING[1:], "--memory-checkpoint=2", "--max-steps=6", "--global-batch-size=800")
    events = ranks.run(_train, flags, root, 3)[0]
    assert [data["epoch"] for kind, data in events if kind == "train"] == [0, 0, 1]
    assert _begin(ranks.run(_train, flags, root)[0]) == ("resume", 2)


def test_memory_of_an_earlier_start_does_not_count(ranks: Ranks, tmp_path: Path, root: Path) -> None:
    flags = small(tmp_path / "run", "--checkpoint-every=1000", "--no-save-model", "--max-steps=6")
    ranks.run(_train, [*flags, "--memory-checkpoint"], root, 5)
    ranks.run(_train, flags, root, 2)  # from the start, and without keeping anything
    assert _begin(ranks.run(_train, [*flags, "--memory-checkpoint"], root)[0]) == ("start", 0)


def test_a_newer_checkpoint_on_the_disk_is_taken(ranks: Ranks, tmp_path: Path, root: Path) -> None:
    flags = small(tmp_path / "run", "--memory-checkpoint=2", "--checkpoint-every=3", "--no-save-model", "--max-steps=6")
    ranks.run(_train, flags, root, 4)
    assert [file.name for file in root.glob("*/step-*")] == ["step-00000002"]
    events = ranks.run(_train, flags, root)[0]
    assert _begin(events) == ("resume", 3)
    assert events[0][1]["checkpoint"].startswith(str(tmp_path))


def test_on_fewer_ranks_memory_is_taken_too(ranks: Ranks, tmp_path: Path, root: Path) -> None:
    flags = small(tmp_path / "run", *KEEPING, "--global-batch-size=32", "--max-steps=6")
    ranks.run(_train, flags, root, 4)
    kind, data = ranks.run(_train, flags, root, ranks=1)[0][0]
    assert (kind, data["step"], data["random_state_restored"]) == ("resume", 3, False)


def test_damage_in_memory_is_refused(ranks: Ranks, tmp_path: Path, root: Path) -> None:
    flags = small(tmp_path / "run", *KEEPING, "--max-steps=6")
    ranks.run(_train, flags, root, 4)
    flip_a_bit(next(root.glob("*/step-*/__0_0.distcp")))
    for text in ranks.run(_train, flags, root):
        assert "differs from what was committed" in text
        assert str(root) in text
        assert "remove" in text


def test_a_node_without_a_whole_copy_is_refused(ranks: Ranks, tmp_path: Path, root: Path) -> None:
    for text in ranks.run(_train, small(tmp_path / "run", *KEEPING), root, None, 2):
        assert text.startswith("--memory-checkpoint: the model is sharded over 2 ranks, and no node holds all of it")
        assert "--replicas 2" in text


def test_a_strategy_without_shards_is_refused() -> None:
    with pytest.raises(ConfigError, match="--memory-checkpoint with --strategy ddp"):
        parse(["--memory-checkpoint", "--strategy=ddp"])


def test_two_nodes_that_share_a_memory_are_refused(ranks: Ranks, tmp_path: Path, root: Path) -> None:
    for text in ranks.run(_train, small(tmp_path / "run", *KEEPING, "--replicas=2"), root, None, 2):
        assert "in use by a run that is still going" in text


def test_too_little_memory_is_refused_before_the_first_step(ranks: Ranks, tmp_path: Path, root: Path) -> None:
    patches = {"fsdp2_extra.elastic.node_memory._free": _nearly_nothing}
    for text in ranks.run(_train, small(tmp_path / "run", *KEEPING), root, None, 1, patches):
        assert "--memory-checkpoint: two checkpoints take " in text
        assert " of a node's memory, and 100.0 kB are free on that of rank 0" in text


def _nearly_nothing() -> int:
    return 100_000


@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_a_memory_that_is_full_is_said(ranks: Ranks, tmp_path: Path, root: Path, on_failure: str) -> None:
    flags = small(tmp_path / "run", *KEEPING, "--max-steps=4", f"--on-checkpoint-failure={on_failure}")
    results = ranks.run(_train, flags, root, None, 1, {"fsdp2.checkpoint.files.LocalFiles.create": _full})
    if on_failure == "stop":
        assert all("--memory-checkpoint: step 1 was not saved" in text for text in results)
        assert all("No space left on device" in text for text in results)
    else:
        failures = [data for kind, data in results[0] if kind == "failure"]
        assert ["step 1 was not saved" in failures[0]["error"], failures[0]["continues"]] == [True, True]
        assert Store(LocalFiles(tmp_path / "run" / "checkpoints")).committed() == [4]


_create = LocalFiles.create


def _full(files: LocalFiles, name: str) -> Any:
    if "/dev/shm/" in str(files):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    return _create(files, name)


def test_a_folder_that_is_no_folder_of_this_user_is_refused(ranks: Ranks, tmp_path: Path, root: Path) -> None:
    place = node_memory.memory_folder(str(tmp_path / "run"), root)
    place.symlink_to(tmp_path)
    for text in ranks.run(_train, small(tmp_path / "run", *KEEPING), root):
        assert f"{place} isn't a folder of this user" in text


def _refuses(*where: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fetched(folder: Path, step: int, full: str = "") -> bytes | str:
    """Two nodes of a rank have another checkpoint of one step; the second is given the first's, or is told why not."""
    rank = dist.get_rank()
    store = Store(LocalFiles(folder / str(rank)))
    store.begin(step)
    files = store.checkpoint(step)
    files.write("part", b"of rank %d" % rank)
    store.commit(step, {"part": fingerprint(files, "part")}, {"start": str(rank)})
    with pytest.MonkeyPatch.context() as patch:
        if full and rank == 1:
            patch.setattr(node_fetch, full, _refuses)
        try:
            node_fetch.fetch(store, step, [(0, 1)], World(rank, 2, 0, 1))
        except ConfigError as error:
            return str(error)
    return files.read("part")


def test_a_step_in_memory_that_does_not_count_gives_way(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(_fetched, tmp_path, 130) == [b"of rank 0"] * 2


def test_a_node_whose_memory_takes_no_marker_is_told_to_all(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks.run(_fetched, tmp_path, 130, "publish"):
        assert "--memory-checkpoint: step 130 could not be copied to this node: [Errno 28] No space left" in str(text)


def test_a_save_in_memory_that_goes_on_is_not_called_dead() -> None:
    memory = object.__new__(node_memory.NodeMemory)
    memory.failure = "step 2 was not saved"  # nothing else of it is needed, and nothing is removed
    memory._end(None)
    assert memory.failure == "step 2 was not saved"
