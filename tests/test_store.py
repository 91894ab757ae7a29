"""Checkpoints on disk: what is dead is cleaned, what is damaged stops, what doesn't fit is refused."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from fsdp2.checkpoint.files import LocalFiles, NotAFile
from fsdp2.checkpoint.planner import StrictLoadPlanner
from fsdp2.checkpoint.safe_reader import SafeReader
from fsdp2.checkpoint.store import HASH, MARKER, DamagedCheckpoint, Store, fingerprint, read_marker, verify
from fsdp2.config import Config
from fsdp2.options.errors import ConfigError
from fsdp2.run.preflight import preflight
from fsdp2.run.process.runtime import World
from fsdp2.train import main
from tests.harness import Ranks, main_in_ranks, of_kind, small

Events = list[tuple[str, dict[str, Any]]]
Train = Callable[..., Events]


TWO = World(0, 2, 0, 2)


def _refusal(run: Path, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight(Config(**{"run_dir": str(run), "model_size": "tiny", "max_steps": 9, **flags}), TWO)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def finished(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that tests only read, or copy."""
    run = tmp_path_factory.mktemp("finished") / "run"
    ranks.run(main_in_ranks, small(run, "--max-steps=3", "--checkpoint-every=2"))
    return run


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_checkpoint_of_another_model_names_what_differs(finished: Path) -> None:
    message = _refusal(finished, model_size="seed")
    assert "is of another model" in message
    assert "class_token: [1, 1, 32] there, [1, 1, 128] here" in message
    assert f"(--config {finished}/config.json has all that the run had), another --run-dir" in message
    assert "is of another model" in _refusal(finished, model="cnn")


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"optimizer": "sgd"}, "--optimizer sgd"),
        ({"seed": 2}, "--seed 2"),
        ({"lr": 0.1}, "--lr 0.1"),
        ({"freeze": ("conv_proj.*",)}, "--freeze"),
        ({"mixed_precision": "fp16"}, "--mixed-precision fp16"),
        ({"resume": "1"}, "it has 2, 3"),
    ],
)
def test_a_resume_that_would_silently_differ_is_refused(finished: Path, flags: dict[str, Any], part: str) -> None:
    assert part in _refusal(finished, **flags)


def test_resume_path_into_a_run_with_checkpoints_is_refused(finished: Path, copy: Path) -> None:
    assert "has checkpoints of its own" in _refusal(copy, resume=str(finished))


def test_the_marker_lists_every_file(finished: Path) -> None:
    directory = finished / "checkpoints" / "step-00000003"
    files = LocalFiles(directory)
    marker = read_marker(files)
    others = {path.name for path in directory.iterdir()} - {MARKER}
    assert set(marker["files"]) == others == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    for name, entry in marker["files"].items():
        assert entry == fingerprint(files, name)
    assert (marker["step"], marker["world_size"], marker["mesh"]) == (3, 2, {"replicate": 1, "shard": 2, "tp": 1})
    assert marker["config"]["model-size"] == "tiny"
    assert marker["environment"]["torch"] == torch.__version__
    verify(files)


def test_a_dead_save_is_cleaned_and_passed_over(copy: Path, train: Train) -> None:
    (copy / "checkpoints" / "step-00000003" / MARKER).unlink()
    events = train(steps=4)
    resume = of_kind(events, "resume")[0]
    assert resume["step"] == 2
    assert "step-00000003, a save that was never committed" in resume["note"]


def test_only_dead_saves_means_a_fresh_start_that_says_so(copy: Path, train: Train) -> None:
    for step in (2, 3):
        (copy / "checkpoints" / f"step-0000000{step}" / MARKER).unlink()
    start = of_kind(train(steps=1), "start")[0]
    assert "no checkpoint was ever committed here; starting fresh" in start["note"]


@pytest.mark.parametrize("damage", ["missing", "shorter", "marker"])
def test_damage_stops_before_the_start_and_is_named(copy: Path, damage: str) -> None:
    directory = copy / "checkpoints" / "step-00000003"
    shard = directory / "__1_0.distcp"
    if damage == "missing":
        shard.unlink()
    elif damage == "shorter":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        (directory / MARKER).write_text("{")
    message = _refusal(copy)
    assert "is damaged" in message
    assert ("COMMIT.json" if damage == "marker" else "__1_0.distcp") in message
    # The explicit way on.
    job = preflight(Config(run_dir=str(copy), model_size="tiny", resume="2"), TWO)
    with job.hold:
        assert job.origin.checkpoint is not None
        assert job.origin.checkpoint.endswith("/step-00000002")


def test_a_changed_byte_stops_the_resume_on_all_ranks(copy: Path, ranks: Ranks) -> None:
    shard = copy / "checkpoints" / "step-00000003" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    for message in ranks.run(_resume_fails, str(copy)):
        assert "damaged" in message
        assert "__1_0.distcp differs from what was committed" in message


def _resume_fails(run: str) -> str:
    try:
        main(Config(run_dir=run, model_size="tiny", batch_size=16, max_steps=4, device="cpu"))
    except ConfigError as error:
        return str(error)
    return "resumed from a damaged checkpoint"


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    store = Store(LocalFiles(tmp_path))
    store.begin(1)
    store.commit(1, {}, {})
    with pytest.raises(FileExistsError, match="never overwritten"):
        store.begin(1)
    assert store.committed() == [1]


def test_without_a_marker_there_is_nothing(tmp_path: Path) -> None:
    store = Store(LocalFiles(tmp_path))
    store.begin(7)
    store.checkpoint(7).write("__0_0.distcp", b"half")
    assert store.committed() == []
    assert store.remove_dead() == ["step-00000007"]
    with pytest.raises(DamagedCheckpoint, match=r"COMMIT\.json can't be read"):
        read_marker(store.checkpoint(7))


def test_a_marker_that_is_not_known_to_be_durable_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run says that the step wasn't saved, and a resume goes on from it."""
    store, real = Store(LocalFiles(tmp_path)), LocalFiles.fsync

    def failing(self: LocalFiles, name: str) -> None:
        if (self.root / MARKER).exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(self, name)

    store.begin(1)
    monkeypatch.setattr(LocalFiles, "fsync", failing)
    with pytest.raises(OSError, match="Input/output error"):
        store.commit(1, {}, {})
    assert store.committed() == []
    assert store.remove_dead() == ["step-00000001"]


def test_the_best_is_of_the_losses_on_the_newest_ones_data(tmp_path: Path) -> None:
    store = Store(LocalFiles(tmp_path / "checkpoints"))
    losses: dict[int, dict[str, Any]] = {
        1: {"eval_loss": 1.0, "eval_data": "a"},
        2: {"eval_loss": 7.0, "eval_data": "b"},
        3: {"eval_loss": 5.0, "eval_data": "b"},
        4: {"eval_loss": 5.0, "eval_data": "b"},
        5: {},
        6: {"eval_loss": "low", "eval_data": "b"},
    }
    for step, marker in losses.items():
        store.begin(step)
        store.commit(step, {".metadata": {"size": 0, HASH: ""}}, marker)
    assert store.retain(1, keep_best=True) == [1, 2, 3, 5]
    assert store.committed() == [4, 6]  # the later one of two that are alike


def test_one_checkpoint_that_stays_keeps_no_others(tmp_path: Path) -> None:
    store = Store(LocalFiles(tmp_path / "checkpoints"))
    for step in (1, 2, 3, 4):
        store.begin(step)
        store.commit(step, {".metadata": {"size": 0, HASH: ""}}, {})
    (tmp_path / "checkpoints" / "step-00000002").rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoints" / "step-00000002").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotAFile, match="step-00000002 is a link"):
        store.retain(1)
    assert store.committed() == [2, 4]


def test_a_dead_save_that_cannot_be_removed_is_one_line(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = copy / "checkpoints" / "step-00000003"
    (dead / MARKER).unlink()

    def unlink(_: Any, name: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(dead))

    monkeypatch.setattr(LocalFiles, "unlink", unlink)
    assert f"Permission denied: this user may not use {dead}, the file system is /" in _refusal(copy)


class Payload:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("/tmp/fsdp2-was-here"),))


def test_metadata_that_would_run_code_is_not_unpickled(copy: Path) -> None:
    directory = copy / "checkpoints" / "step-00000003"
    SafeReader(LocalFiles(directory)).read_metadata()
    (directory / ".metadata").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(DamagedCheckpoint, match="which a checkpoint's metadata never holds"):
        SafeReader(LocalFiles(directory)).read_metadata()


def _strictness(folder: Path) -> list[str]:
    """Load checkpoints with too much, too little and other shapes."""
    saved = {"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)}
    dcp.save(saved, checkpoint_id=folder)
    messages = []
    for target in (
        {"a": torch.ones(3), "b": torch.ones(2)},
        {**saved, "d": torch.ones(1)},
        {"a": torch.ones(4), "b": torch.ones(2, dtype=torch.int64), "c": torch.ones(1)},
    ):
        try:
            dcp.load(target, checkpoint_id=folder, planner=StrictLoadPlanner())
            messages.append("loaded")
        except CheckpointException as error:
            messages.append(str(error))
    return messages


def test_restoring_is_strict_in_both_directions(ranks: Ranks, tmp_path: Path) -> None:
    for extra, missing, shapes in ranks.run(_strictness, tmp_path):
        assert "c: in the checkpoint, and nothing to load it into" in extra
        assert "d: not in the checkpoint" in missing
        assert "a: torch.float32 (3,) in the checkpoint, torch.float32 (4,) here" in shapes
        assert "b: torch.float32 (2,) in the checkpoint, torch.int64 (2,) here" in shapes
