"""Runs on a real S3 server are whole whatever the network does, and whoever is killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp2.checkpoint.store import MARKER, Store, verify
from fsdp2_extra.remote.files import RemoteFiles
from tests.harness import full_files, losses, of_kind, same, small
from tests.remote.runs import Events, Run, folder_of, good, other_lease, refusal, steps_in
from tests.remote.s3 import EVER, Bucket, Proxy, environment
from tests.test_launch import finish, start, torchrun, wait_for_step

Train = Callable[..., Events]


# --- a network that fails --------------------------------------------------------------------------------


def test_faults_in_the_middle_of_a_save_leave_no_trace(
    run_at: Run, train: Train, proxy: Proxy, bucket: Bucket, tmp_path: Path
) -> None:
    # With dropout, so that each rank's random state counts.
    whole = train("--model=cnn", "--checkpoint-every=2", run="whole", steps=4)
    proxy.fail("cut", "PUT .*__0_0.distcp", times=2, after=10_000)
    proxy.fail("refuse", "PUT .*__1_0.distcp", times=3)
    proxy.fail("lose", "PUT .*COMMIT.json", times=2)
    proxy.fail("slow", "PUT .*step-00000004/__1_0.distcp")
    proxy.fail("refuse", "PUT .*metrics.jsonl", times=3)
    proxy.fail("cut", "PUT .*full-model.pt", times=2, after=10_000)
    first = good(run_at("--model=cnn", "--checkpoint-every=2", steps=4))
    assert losses(first) == losses(whole)
    assert {kind: proxy.count(kind) for kind in ("cut", "refuse", "lose", "slow")} == {
        "cut": 4,
        "refuse": 6,
        "lose": 2,
        "slow": 1,
    }
    assert of_kind(first, "failure") == []
    proxy.fail("cut", "GET .*distcp", times=4)
    proxy.fail("refuse", "(GET|HEAD) .*", times=3)
    again = good(run_at("--model=cnn", "--resume=2", steps=4))
    assert losses(again) == losses(whole)[2:]
    assert same(full_files(folder_of(tmp_path / "here")), full_files(tmp_path / "whole"))


def test_a_server_that_never_answers_is_tried_again(run_at: Run, proxy: Proxy, bucket: Bucket) -> None:
    proxy.fail("hang", "PUT .*__1_0.distcp")
    proxy.fail("hang", "PUT .*COMMIT.json")
    events = good(run_at(steps=2, FSDP2_REMOTE_TIMEOUT="1"))
    assert [event["step"] for event in of_kind(events, "checkpoint")] == [2]
    assert proxy.count("hang") == 2


@pytest.mark.parametrize("flags", ["", "--async-checkpoint=wait"])
def test_a_server_that_stays_away_ends_the_run(run_at: Run, proxy: Proxy, bucket: Bucket, flags: str) -> None:
    proxy.when("PUT .*step-00000004/__1_0", lambda: proxy.fail("refuse", times=EVER))
    results = run_at("--checkpoint-every=2", *flags.split(), steps=200, FSDP2_LEASE_SECONDS="2")
    for _, error in results:
        assert error is not None
        assert f"SaveFailed: step 4 was not saved to {bucket.url()}/checkpoints: " in error
        assert (
            f"rank 1: Unreachable: writing __1_0.distcp to {bucket.url()}/checkpoints/step-00000004 failed 4" in error
        )
    assert of_kind(results[0][0], "failure")[-1]["rank"] == 0
    proxy.heal()
    assert [key for key in bucket.objects() if key.endswith(MARKER)] == [f"run/checkpoints/step-00000002/{MARKER}"]
    assert of_kind(good(run_at(steps=3)), "resume")[0]["step"] == 2, "it goes on when the server is back"


def test_a_run_that_is_to_continue_saves_again_when_the_server_is_back(
    run_at: Run, train: Train, proxy: Proxy, bucket: Bucket, here: None
) -> None:
    whole = losses(train(run="whole", steps=12))
    # Gone for about two saves and what is done after them.
    proxy.when("PUT .*step-00000004/__", lambda: proxy.fail("refuse", times=30))
    events = good(run_at("--checkpoint-every=2", "--keep=9", "--on-checkpoint-failure=continue", steps=12))
    assert losses(events) == whole
    failed = [event["step"] for event in of_kind(events, "failure")]
    saved = [event["step"] for event in of_kind(events, "checkpoint")]
    assert 4 in failed
    assert sorted(failed + saved) == [2, 4, 6, 8, 10, 12]
    assert saved[0] == 2
    assert saved[-1] == 12
    assert all(event["continues"] for event in of_kind(events, "failure"))
    store = Store(RemoteFiles(f"{bucket.url()}/checkpoints"))
    assert store.committed() == saved
    store.remove_dead()  # of a save that failed while nothing could be removed
    assert store.files.list("") == [store.name(step) for step in saved]
    for step in saved:
        verify(store.checkpoint(step))


# --- one writer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_a_run_that_has_lost_its_lease_does_not_commit(
    run_at: Run, proxy: Proxy, bucket: Bucket, on_failure: str
) -> None:
    other = other_lease()
    proxy.when("PUT .*step-00000004/__1_0", lambda: bucket.put("run/LEASE.json", other))
    flags = ["--checkpoint-every=2", f"--on-checkpoint-failure={on_failure}"]
    # A short lease is renewed every second, by a read and a put. The other's put between these two would be replaced,
    # which another run sees in its pause and gives up; this one doesn't look.
    (events, error), (_, others_error) = run_at(*flags, steps=200, FSDP2_LEASE_SECONDS="600")
    assert error == others_error
    lost = f"LeaseLost: {bucket.url()}: process 7 on elsewhere has taken it over; this run writes nothing more there"
    assert error == f"SaveFailed: step 4 was not saved to {bucket.url()}/checkpoints: rank 0: {lost}"
    assert [event["step"] for event in of_kind(events, "checkpoint")] == [2]
    left = {key.split("/")[-1] for key in bucket.objects("run/checkpoints/step-00000004/")}
    assert "__1_0.distcp" in left, "not cleaned: it is the other's now"
    assert MARKER not in left
    assert bucket.get("run/LEASE.json") == other
    # The other was killed, and who comes after it goes on from what was committed.
    (resume,) = of_kind(good(run_at(steps=3)), "resume")
    assert resume["step"] == 2
    assert "removed step-00000004, a save that was never committed" in resume["note"]


# --- as it is started ------------------------------------------------------------------------------------


def test_from_a_command_line_after_a_run_that_was_killed(proxy: Proxy, bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("run/LEASE.json", other_lease(seconds=1.0))
    line = [sys.executable, "-m", "fsdp2.train", *small(bucket.url(), "--max-steps=3")]
    status, out, err = finish(start(line, tmp_path, **environment(proxy.endpoint)))
    assert status == 0, err
    waiting = f"fsdp2: {bucket.url()} is in use by process 7 on elsewhere, or that run was killed; waiting up to 1"
    assert waiting in err
    assert f"run directory: {bucket.url()}" in out
    assert steps_in(bucket.get("run/metrics.jsonl")) == [1, 2, 3]
    assert "Unclosed" not in err
    assert "run/LEASE.json" not in bucket.objects()


@pytest.mark.slow
def test_killed_under_torchrun_and_resumed_elsewhere(proxy: Proxy, bucket: Bucket, tmp_path: Path, here: None) -> None:
    variables = environment(proxy.endpoint)
    line = ["-m", "fsdp2.train", *small(bucket.url(), "--checkpoint-every=2")]
    (tmp_path / "first").mkdir()
    process = start(torchrun(2, *line, "--max-steps=5000"), tmp_path / "first", **variables)
    try:
        while process.poll() is None and not list(tmp_path.glob("first/runs/*/metrics.jsonl")):
            time.sleep(0.05)
        wait_for_step(folder_of(tmp_path / "first"), process, step=5)
        assert "in use by a run that is still going (process " in refusal(bucket.url())
    finally:
        # Ranks first: torchrun gives each a session of its own, and they would outlive it.
        for rank in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(rank), signal.SIGKILL)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    committed = Store(RemoteFiles(f"{bucket.url()}/checkpoints")).committed()[-1]
    status, out, err = finish(start(torchrun(2, *line, f"--max-steps={committed + 3}"), tmp_path, **variables))
    assert status == 0, err
    assert f"resumed from {bucket.url()}/checkpoints/step-{committed:08d}" in out
    assert steps_in(bucket.get("run/metrics.jsonl")) == list(range(1, committed + 4))
    assert (folder_of(tmp_path) / "metrics.jsonl").read_bytes() == bucket.get("run/metrics.jsonl")
    assert "run/LEASE.json" not in bucket.objects()
