"""Asynchronous checkpoints: training goes on, what is written is the state of that moment, nothing fails unheard."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2.checkpoint import staging
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.restore import restore
from fsdp2.checkpoint.saver import SaveFailed, Saver
from fsdp2.checkpoint.state import AppState, RandomState
from fsdp2.checkpoint.store import Store, verify
from fsdp2.config import parse
from fsdp2.parallel.engine import Engine
from fsdp2.run import checkpoints
from fsdp2.train import main
from tests.harness import Ranks, full_files, losses, make_engine, of_kind, one_step, same, small

Events = list[tuple[str, dict[str, Any]]]
Train = Callable[..., Events]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    real = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, real)


def _app(engine: Engine) -> AppState:
    parts: dict[str, Any] = {"rng": RandomState(dist.get_rank(), torch.device("cpu"))}
    return AppState(engine.model, engine.optimizer, parts)


def _copy_of(app: AppState) -> Any:
    """An independent copy of model and optimizer state: local tensors by name."""

    def copied(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: copied(value) for key, value in tree.items()}
        if isinstance(tree, torch.Tensor):
            return (tree.to_local() if hasattr(tree, "to_local") else tree).detach().clone()
        return tree

    state = app.state_dict()
    return copied({"model": state["model"], "optim": state["optim"]["state"]})


def _places_of_buffers(saver: Saver) -> dict[Any, int]:
    assert saver._staging is not None
    return {path: staging._local(tensor).data_ptr() for path, (_, tensor) in saver._staging._buffers.items()}


def _written_is_the_state_of_that_moment(flags: str, folder: Path) -> dict[str, Any]:
    """Train on while a save is held up in its copy and then in its first sync; compare what was written."""
    engine = make_engine(flags)
    app, store = _app(engine), Store(LocalFiles(folder))
    one_step(engine)
    saver = Saver(store, app, torch.device("cpu"), keep=2, background=True)
    written = threading.Event()
    real_copy, real_sync = staging._copy, LocalFiles.fsync

    def slow_copy(pairs: Any) -> None:
        time.sleep(0.5)  # the optimizer is faster, if nothing makes it wait
        real_copy(pairs)

    def slow_sync(self: LocalFiles, name: str) -> None:
        written.wait(60)
        real_sync(self, name)

    with replaced(staging, "_copy", slow_copy), replaced(LocalFiles, "fsync", slow_sync):
        at_save = _copy_of(app)
        in_flight = saver.save(1, {}) is None
        for _ in range(3):
            one_step(engine)
        busy = saver.busy  # after three more steps it is still being written
        written.set()
        saved = saver.wait()
    changed = not same(_copy_of(app), at_save)
    first_buffers = _places_of_buffers(saver)
    saver.save(2, {})
    saver.wait()
    reused = first_buffers == _places_of_buffers(saver)
    saver.close()
    verify(store.checkpoint(1))
    again = make_engine(flags)
    restore(store.checkpoint(1), _app(again))
    return {
        "in flight": in_flight and busy,
        "no error": saved is not None and saved.error is None,
        "trained on": changed,
        "equal": same(_copy_of(_app(again)), at_save),
        "buffers reused": reused,
    }


@pytest.mark.parametrize("flags", ["", "--strategy=ddp", "--strategy=fsdp1", "--cpu-offload --mixed-precision=fp16"])
def test_what_is_written_is_the_state_of_that_moment(ranks: Ranks, tmp_path: Path, flags: str) -> None:
    for result in ranks.run(_written_is_the_state_of_that_moment, flags, tmp_path):
        assert result == dict.fromkeys(result, True)


@pytest.mark.parametrize("flags", ["", "--model=cnn --strategy=fsdp1", "--strategy=none"])
def test_asynchronous_checkpoints_change_no_loss(
    train: Train, reference: Callable[..., list[float]], tmp_path: Path, flags: str
) -> None:
    n = 1 if "none" in flags else 2
    plain = train(*flags.split(), "--checkpoint-every=2", run="plain", n=n)
    events = train(*flags.split(), "--checkpoint-every=2", "--async-checkpoint", n=n)
    assert losses(events) == losses(plain)
    assert [event["step"] for event in of_kind(events, "checkpoint")] == [2, 4, 6]
    assert same(full_files(tmp_path / "run"), full_files(tmp_path / "plain"))
    # And what they hold goes on as if nothing had been.
    rest = train(*flags.split(), "--async-checkpoint", "--no-save-model", steps=9, n=n)
    assert losses(rest) == reference(*flags.split(), steps=9, n=n)[6:]


def _train_with_slow_syncs(line: list[str], seconds: float, stop_at: int = 0) -> Events:
    """A run whose every sync takes a while; with `stop_at`, this rank 0 gets SIGTERM after that step."""
    real, events = LocalFiles.fsync, []

    def slow(self: LocalFiles, name: str) -> None:
        time.sleep(seconds)
        real(self, name)

    def on_event(kind: str, data: dict[str, Any]) -> None:
        events.append((kind, data))
        if kind == "train" and data["step"] == stop_at and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    with replaced(LocalFiles, "fsync", slow):
        main(parse(line), on_event)
    return events


def test_while_one_is_in_flight_the_next_waits(ranks: Ranks, tmp_path: Path) -> None:
    line = small(tmp_path / "run", "--max-steps=5", "--checkpoint-every=1", "--async-checkpoint", "--keep=9")
    events = ranks.run(_train_with_slow_syncs, line, 0.02)[0]
    assert Store(LocalFiles(tmp_path / "run" / "checkpoints")).committed() == [1, 2, 3, 4, 5]
    assert [event["step"] for event in of_kind(events, "checkpoint")] == [1, 2, 3, 4, 5]


def test_or_it_is_skipped_and_said_so_and_the_last_never_is(ranks: Ranks, tmp_path: Path) -> None:
    line = small(tmp_path / "run", "--max-steps=8", "--checkpoint-every=1", "--async-checkpoint=skip", "--keep=9")
    events = ranks.run(_train_with_slow_syncs, line, 0.1)[0]
    committed = Store(LocalFiles(tmp_path / "run" / "checkpoints")).committed()
    skipped = [event["step"] for event in of_kind(events, "checkpoint_skipped")]
    assert skipped, "saves that took longer than a step were never skipped"
    assert sorted(committed + skipped) == list(range(1, 9))
    assert committed[-1] == 8


def test_a_stop_signal_waits_for_the_save_in_flight(ranks: Ranks, tmp_path: Path) -> None:
    line = small(tmp_path / "run", "--max-steps=20", "--checkpoint-every=2", "--async-checkpoint")
    events = ranks.run(_train_with_slow_syncs, line, 0.1, 2)[0]
    end = of_kind(events, "end")[0]
    assert end["step"] < 20
    assert end["reason"] == "SIGTERM"
    store = Store(LocalFiles(tmp_path / "run" / "checkpoints"))
    assert store.committed()[-1] == end["step"]
    verify(store.checkpoint(end["step"]))


def _train_with_a_full_disk(line: list[str], rank: int, failures: int) -> tuple[str, Events]:
    """A run in which the first saves fail on one rank, in its second shard's place; its error, if it stops."""
    events: Events = []
    left = [failures]
    real = LocalFiles.create

    def failing(self: LocalFiles, name: str) -> Any:
        if dist.get_rank() == rank and left[0] and name.endswith(".distcp") and not str(self).endswith("00000001"):
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path(name)))
        return real(self, name)

    with replaced(LocalFiles, "create", failing):
        try:
            main(parse(line), lambda kind, data: events.append((kind, data)))
        except SaveFailed as error:
            return str(error), events
    return "", events


@pytest.mark.parametrize("mode", ["", "--async-checkpoint"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_save_stops_all_ranks_and_harms_no_other(ranks: Ranks, tmp_path: Path, mode: str, rank: int) -> None:
    line = small(tmp_path / "run", "--max-steps=9", "--checkpoint-every=1", *mode.split())
    results = ranks.run(_train_with_a_full_disk, line, rank, 1)
    for message, events in results:
        assert f"rank {rank}: DiskError: [Errno 28] No space left on device" in message
        # Steps after it: none, or with a save in the background a few; the same on both ranks.
        assert len(losses(events)) == len(losses(results[0][1])) < 9
    store = Store(LocalFiles(tmp_path / "run" / "checkpoints"))
    assert store.committed() == [1]
    assert store.files.list("") == ["step-00000001"], "the failed save still takes room"
    verify(store.checkpoint(1))


@pytest.mark.parametrize("mode", ["", "--async-checkpoint"])
def test_or_it_is_reported_and_training_goes_on(ranks: Ranks, train: Train, tmp_path: Path, mode: str) -> None:
    flags = ["--checkpoint-every=1", "--on-checkpoint-failure=continue", "--keep=9", *mode.split()]
    line = small(tmp_path / "run", "--max-steps=6", *flags)
    message, events = ranks.run(_train_with_a_full_disk, line, 1, 2)[0]
    assert message == ""
    assert losses(events) == losses(train(run="plain"))
    failures = of_kind(events, "failure")
    assert [failure["step"] for failure in failures] == [2, 3]
    assert all("No space left" in failure["error"] and failure["continues"] for failure in failures)
    assert Store(LocalFiles(tmp_path / "run" / "checkpoints")).committed() == [1, 4, 5, 6]


@pytest.mark.parametrize("mode", ["", "--async-checkpoint"])
def test_a_run_whose_last_save_fails_is_no_success(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    line = small(tmp_path / "run", "--max-steps=3", "--checkpoint-every=1", "--on-checkpoint-failure=continue")
    for message, events in ranks.run(_train_with_a_full_disk, [*line, *mode.split()], 1, 99):
        assert "ended at step 3, and its last checkpoint is of an earlier step" in message
        assert not of_kind(events, "end")


def _fails_unseen_by_one_rank(line: list[str]) -> str:
    """A save fails before the last step, and one rank doesn't look before the loop has ended."""
    real = Saver.ended

    def ended(self: Saver) -> Any:
        if dist.get_rank() == 1:
            return None
        while self.busy:
            time.sleep(0.01)
        return real(self)

    with replaced(Saver, "ended", ended):
        return _train_with_a_full_disk(line, 1, 1)[0]


def test_a_failure_that_only_one_rank_has_seen_in_time_stops_both(ranks: Ranks, tmp_path: Path) -> None:
    line = small(tmp_path / "run", "--max-steps=3", "--checkpoint-every=2", "--async-checkpoint")
    for message in ranks.run(_fails_unseen_by_one_rank, line):
        assert "step 2 was not saved" in message


def _failing_copy(folder: Path) -> str:
    """A copy that fails on one rank alone is heard of on both."""
    engine = make_engine()
    saver = Saver(Store(LocalFiles(folder)), _app(engine), torch.device("cpu"), keep=1, background=True)

    def failing(pairs: Any) -> None:
        if dist.get_rank() == 1:
            raise MemoryError("no room for the copy")

    with replaced(staging, "_copy", failing):
        saver.save(1, {})
        saved = saver.wait()
    saver.close()
    return str(saved and saved.error)


def test_a_failed_copy_is_heard_of_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks.run(_failing_copy, tmp_path):
        assert "step 1 was not copied for saving: rank 1: MemoryError('no room for the copy')" in message


class _Stream:
    """Stands in for a GPU's stream and event: it notes what it is asked, and a tensor on `meta` for one on the GPU."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.asked.append(name)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_beside_a_gpu_what_is_on_the_cpu_is_copied_by_the_thread(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    stage = staging.Staging(torch.optim.Adam([weight]), torch.device("cpu"))
    gpu, real = _Stream(), staging._copy
    copied: list[tuple[str, bool]] = []
    stage._stream = gpu  # type: ignore[assignment]
    for name, value in (("current_stream", lambda: gpu), ("stream", lambda _: nullcontext()), ("Event", lambda: gpu)):
        monkeypatch.setattr(torch.cuda, name, value)

    def copy(pairs: Any, stream: Any = None) -> None:
        copied.extend((pair[1].device.type, stream is gpu) for pair in pairs)
        real([pair for pair in pairs if pair[1].device.type == "cpu"], stream)

    monkeypatch.setattr(staging, "_copy", copy)
    offloaded, sharded = torch.arange(3.0), torch.ones(2, device="meta")
    buffer = torch.zeros(3)
    stage._start([(buffer, offloaded), *([(torch.zeros(2), sharded)] if on_gpu else [])])
    assert copied == [("meta", True)] * on_gpu, "a tensor on the CPU was given to the GPU's stream"
    assert not stage._finished.is_set(), "the optimizer would change what is still to be copied"
    stage.finish()
    assert copied[-1] == ("cpu", False)
    assert torch.equal(buffer, offloaded)
    assert stage._finished.is_set()
    stage._before_step()
    assert gpu.asked == ["wait_stream", "record", "synchronize", "wait_event"], "both are waited for"


def _without_room_for_the_full_model(run: Path) -> list[int]:
    """The checkpoints of a run that fails at its end, while the last of them is still being written."""
    write = Saver._write

    def slow(*given: Any) -> Any:
        time.sleep(0.5)
        return write(*given)

    line = small(run, "--max-steps=2", "--async-checkpoint", "--save-model")
    slowly, failing = replaced(Saver, "_write", slow), replaced(checkpoints, "save_full", _no_room)
    with slowly, failing, pytest.raises(OSError, match="no room"):
        main(parse(line))
    return Store(LocalFiles(run / "checkpoints")).committed()


def _no_room(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "no room")


def test_a_full_model_that_fails_leaves_the_last_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(_without_room_for_the_full_model, tmp_path / "run") == [[2]] * 2
