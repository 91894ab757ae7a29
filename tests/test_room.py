"""Room on disks and in memory: a run that can't end well for lack of it is refused before it starts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp2.checkpoint.disk import bytes_of
from fsdp2.checkpoint.metadata import load_metadata
from fsdp2.config import Config, parse
from fsdp2.options.errors import ConfigError
from fsdp2.run.directory import host_memory, room
from fsdp2.run.directory.host_memory import Sizes, memory_needs, on_node, pinned
from fsdp2.run.directory.room import checkpoints_at_once
from fsdp2.run.preflight import preflight
from fsdp2.run.process.runtime import World
from tests.harness import small

Events = list[tuple[str, dict[str, Any]]]
ONE = World(rank=0, world_size=1, local_rank=0, local_world_size=1)
TWO = World(rank=0, world_size=2, local_rank=0, local_world_size=2)
EIGHT = World(rank=0, world_size=8, local_rank=0, local_world_size=8)
SECOND_NODE = World(rank=2, world_size=4, local_rank=0, local_world_size=2)
GB = 10**9
LARGE = ["--model=llama", "--model-size=8b", "--dataset=random-tokens"]


@pytest.mark.parametrize("flags", ["", "--optimizer=sgd --ema=0.9 --freeze=conv_proj.*", "--optimizer=adadelta"])
def test_a_checkpoint_holds_what_was_counted(train: Callable[..., Events], tmp_path: Path, flags: str) -> None:
    train(*flags.split(), "--no-save-model", steps=1)
    (file,) = (tmp_path / "run" / "checkpoints").glob("*/.metadata")
    entries = load_metadata(file.read_bytes()).state_dict_metadata
    tensors = {name: one for name, one in entries.items() if isinstance(one, TensorStorageMetadata) and one.size}
    held = {name for name in tensors if name.startswith(("app.model.", "app.optim.", "app.ema."))}
    counted = bytes_of(Sizes(parse(small(tmp_path / "run", *flags.split()))).saved)
    assert sum(tensors[name].size.numel() * tensors[name].properties.dtype.itemsize for name in held) == counted


def _simulated(every: int, keep: int, keep_every: int | None, steps: int, there: list[int], done: int) -> int:
    """The most checkpoints at once, by doing what a run does."""
    most = len(there)
    for step in range(done + 1, steps + 1):
        if step % every == 0 or step == steps:
            there = [*there, step]
            most = max(most, len(there))
            there = [one for one in there[:-keep] if keep_every and one % keep_every == 0] + there[-keep:]
    return most


def test_as_many_checkpoints_are_counted_as_there_come_to_be() -> None:
    cases = 0
    for every in (1, 2, 3, 7):
        for keep in (1, 2, 3):
            for keep_every in (None, 2, 3, 5):
                for steps in (1, 2, 5, 6, 13, 24):
                    for there, done in (([], 0), ([], 4), ([4], 4), ([2, 3, 4], 4), ([1, 2, 3, 4, 5], 5)):
                        config = Config(
                            checkpoint_every=every, keep=keep, keep_every=keep_every, max_steps=max(steps, done)
                        )
                        wanted = _simulated(every, keep, keep_every, max(steps, done), there, done)
                        case = every, keep, keep_every, steps, there, done
                        assert checkpoints_at_once(config, there, done)[0] == wanted, case
                        cases += 1
    assert cases == 4 * 3 * 4 * 6 * 5


@pytest.mark.parametrize(
    ("flags", "most"),
    [
        ({}, 4),  # twelve epochs: three are kept, and the next is written beside them
        ({"epochs": 2}, 2),
        ({"keep": 1}, 2),
        ({"max_steps": 50}, 1),  # how many epochs these are is known from the data alone
        ({"checkpoint_every": 10}, 4),
        ({"checkpoint_every": "never"}, 0),
    ],
)
def test_what_only_the_data_says_is_not_guessed(flags: dict[str, Any], most: int) -> None:
    assert checkpoints_at_once(Config(**flags))[0] == most


def _refused(line: list[str], world: World = TWO) -> str:
    with pytest.raises(ConfigError) as error, preflight(parse(line), world).hold:
        pass
    return str(error.value)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Say how many bytes are free: on every disk, and in memory."""

    def say(*, disk: int = 10**15, memory: int = 10**15) -> None:
        monkeypatch.setattr(room, "free_bytes", lambda place: (1, disk, Path("/disk")))
        monkeypatch.setattr(host_memory, "free_memory", lambda: memory)

    return say


def test_a_disk_that_is_too_small_is_refused_with_sizes_and_flags(tmp_path: Path, free: Callable[..., None]) -> None:
    run = tmp_path / "run"
    line = [*LARGE, f"--run-dir={run}", "--max-steps=10"]
    free(disk=64 * GB)
    assert _refused(line) == (
        f"--run-dir {run}: 1 checkpoint of 96.4 GB: 96.4 GB are needed beside what is there, and 64.0 GB are free on "
        "/disk; choose a larger disk, or use --checkpoint-every never, which writes none, to measure"
    )
    assert not run.exists(), "a refused run leaves nothing behind"
    with preflight(parse([*line, "--checkpoint-every=never"]), TWO).hold:
        pass
    free(disk=100 * GB)
    with preflight(parse(line), TWO).hold:
        pass
    message = _refused([*line, "--save-model"])
    assert "1 checkpoint of 96.4 GB and a full model, 32.1 GB while it is written: 128.5 GB are needed" in message
    assert "add --no-save-model" in message
    message = _refused([*line, "--checkpoint-every=1"])
    assert "4 checkpoints of 96.4 GB (--keep 3): 385.5 GB are needed" in message
    assert "choose a larger disk, lower --keep, or use" in message


def test_what_is_there_and_will_be_replaced_counts(
    train: Callable[..., Events], tmp_path: Path, free: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    train("--keep=1", "--no-save-model", "--checkpoint-every=1", steps=2)
    line = small(tmp_path / "run", "--keep=1", "--no-save-model", "--checkpoint-every=1", "--max-steps=9")
    one = bytes_of(Sizes(parse(line)).saved)
    # A file has some kB for each tensor on top, which are more than so small tensors.
    below = room.bytes_below
    monkeypatch.setattr(room, "bytes_below", lambda folder: one if below(folder) else 0)
    free(disk=one)
    job = preflight(parse(line), TWO)  # beside the one that is there, another
    with job.hold:
        assert job.origin.checkpoint is not None
    free(disk=0)
    with preflight(parse([*line, "--max-steps=2"]), TWO).hold:  # there is nothing left to do
        pass
    free(disk=one)
    assert "2 checkpoints of" in _refused([*line, "--resume=never"])  # those there are set aside, and stay
    assert "2 checkpoints of" in _refused([*line, f"--run-dir={tmp_path / 'other'}"])


def test_the_copies_of_a_run_at_a_url_are_looked_for_too(
    tmp_path: Path, free: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    free(disk=100 * GB)
    message = _refused([*LARGE, "--run-dir=memory://large", "--max-steps=5", "--save-model"], ONE)
    assert message.startswith("--run-dir memory://large, ")
    assert "the full model, before it is uploaded and this node's part of a checkpoint, before it is" in message
    assert "set TMPDIR to a folder with more room" in message


def test_a_folder_that_is_written_only_at_the_end_is_looked_at_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "full_model").mkdir(parents=True)
    # To root every folder says yes.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "full_model")
    message = _refused(small(tmp_path / "run"))
    assert f"{tmp_path / 'run' / 'full_model'} can't be written to; give this user the right to" in message


def test_the_file_system_is_that_of_the_nearest_folder(tmp_path: Path) -> None:
    found = room.free_bytes(tmp_path / "not" / "yet")
    assert found is not None
    assert found[0] == tmp_path.stat().st_dev
    assert found[2].is_mount()


def test_pinned_buffers_are_powers_of_two() -> None:
    assert [pinned(count) for count in (0, 1, 2, 3, 4096, 4097)] == [0, 1, 2, 4, 4096, 8192]
    config = parse([*LARGE, "--async-checkpoint"])
    saved = Sizes(config).saved
    for world in (ONE, EIGHT):
        assert on_node(saved, config, world, pinned) == pytest.approx(106.3 * GB, rel=1e-3)
    assert on_node(saved, config, ONE, lambda count: count) == bytes_of(saved) == pytest.approx(96.4 * GB, rel=1e-3)


def test_ranks_without_a_row_take_nothing() -> None:
    three = [torch.empty(3, 10, device="meta")]
    for world, rows in ((ONE, 3), (TWO, 4), (EIGHT, 3)):  # with two, each takes as many as the larger part
        assert on_node(three, Config(), world, lambda count: count) == rows * 10 * 4
    replicated = Config(strategy="ddp")
    assert on_node(three, replicated, EIGHT, lambda count: count) == 8 * three[0].nbytes


@pytest.mark.parametrize(
    ("flags", "gb"),
    [
        ([], 0.0),  # all is on the GPU
        (["--async-checkpoint"], 106.3),
        (["--cpu-offload"], 2 * 35.4 + 64.2),  # parameters and gradients are pinned
        (["--cpu-offload", "--async-checkpoint"], 2 * 35.4 + 64.2 + 96.4),
    ],
)
def test_what_a_gpu_run_takes_of_the_hosts_memory(flags: list[str], gb: float) -> None:
    config = parse([*LARGE, *flags])
    sizes = Sizes(config)
    needed = sum(memory_needs(config, sizes, ONE, on_gpu=True, loads_whole=False).values())
    assert needed == pytest.approx(gb * GB, rel=2e-3)
    first = sum(memory_needs(config, sizes, ONE, on_gpu=True, loads_whole=True).values())
    assert first == pytest.approx(max(gb, gb + 32.1 if "--async-checkpoint" not in flags else gb) * GB, rel=2e-3)


def test_memory_that_is_too_small_is_refused_on_each_node(tmp_path: Path, free: Callable[..., None]) -> None:
    run = tmp_path / "run"
    line = small(run, "--async-checkpoint")
    sizes = Sizes(parse(line))
    held, copies = (
        bytes_of(sizes.held) + bytes_of(sizes.trained) + bytes_of(sizes.optimizer_state),
        bytes_of(sizes.saved),
    )
    needed = sum(memory_needs(parse(line), sizes, TWO, on_gpu=False, loads_whole=False).values())
    assert held + copies <= needed < 1.1 * (held + copies), "ranks' parts may be a row larger"
    for world in (TWO, SECOND_NODE):
        free(memory=100_000)
        message = _refused(line, world)
        assert message.startswith("--async-checkpoint: this node's 2 ranks need ")
        assert "copies for --async-checkpoint" in message
        assert message.endswith("100.0 kB are available (a container's or a job's own limit counts); "
                                "shard over more nodes, or drop --async-checkpoint")  # fmt: skip
    free(memory=needed)
    job = preflight(parse(line), TWO)
    with job.hold:
        assert "memory: this node's 2 ranks need " in (job.note or "")
    free(memory=math.ceil(needed / host_memory.NEAR))
    job = preflight(parse(line), TWO)
    with job.hold:
        assert job.note is None


def test_a_checkpoint_in_memory_is_looked_for_before_anything_is_started(
    tmp_path: Path, free: Callable[..., None]
) -> None:
    line = small(tmp_path / "run", "--memory-checkpoint")
    free(memory=300_000)
    assert "two checkpoints of --memory-checkpoint" in _refused(line, ONE)
    free(disk=300_000)
    assert "--memory-checkpoint: two checkpoints, the newest and the next" in _refused([*line, "--max-steps=1"], ONE)
