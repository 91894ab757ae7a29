"""Runs on a real S3 server: the same as local ones, found again elsewhere, and whole whatever the network does."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp2.checkpoint import remote
from fsdp2.checkpoint.remote import RemoteFiles
from fsdp2.checkpoint.store import MARKER, DamagedCheckpoint, Store, verify
from fsdp2.config import Config
from fsdp2.options import ConfigError
from fsdp2.preflight import preflight
from fsdp2.runtime import World
from tests.harness import Ranks, full_files, losses, of_kind, same
from tests.s3 import EVER, Bucket, Proxy, environment, main_at, s3_server, surroundings
from tests.test_launch import finish, start, torchrun, wait_for_step
from tests.test_resume import metrics_of

Events = list[tuple[str, dict[str, Any]]]
Train = Callable[..., Events]
Run = Callable[..., list[tuple[Events, str | None]]]

ONE, TWO = World(0, 1, 0, 1), World(0, 2, 0, 2)
SMALL = ["--model-size=tiny", "--batch-size=16", "--threads=1", "--device=cpu"]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def one_proxy(server: str) -> Iterator[Proxy]:
    with Proxy(server) as proxy:
        yield proxy


@pytest.fixture
def proxy(one_proxy: Proxy) -> Iterator[Proxy]:
    yield one_proxy
    one_proxy.heal()


@pytest.fixture
def bucket(server: str) -> Bucket:
    return Bucket(server)


@pytest.fixture
def run_at(ranks: Ranks, proxy: Proxy, bucket: Bucket, tmp_path: Path) -> Run:
    """`fsdp2.train` on N ranks with s3://BUCKET/run, on a "machine" of its own; each rank's events and error."""

    def run(
        *flags: str, n: int = 2, steps: int = 6, machine: str = "here", url: str | None = None, **more: str
    ) -> list[tuple[Events, str | None]]:
        (tmp_path / machine).mkdir(exist_ok=True)
        line = [*SMALL, f"--max-steps={steps}", f"--run-dir={url or bucket.url()}", *flags]
        return ranks.run(main_at, environment(proxy.endpoint, **more), tmp_path / machine, line, ranks=n)

    return run


@pytest.fixture
def here(proxy: Proxy, tmp_path: Path) -> Iterator[None]:
    """This process where `run_at`'s ranks are by default."""
    (tmp_path / "here").mkdir(exist_ok=True)
    with surroundings(environment(proxy.endpoint), tmp_path / "here"):
        yield


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_SECONDS", 0.05)


def good(results: list[tuple[Events, str | None]]) -> Events:
    """Rank 0's events of a run that went well on every rank."""
    assert [error for _, error in results] == [None] * len(results)
    return results[0][0]


def folder_of(machine: Path) -> Path:
    (folder,) = (machine / "runs").iterdir()
    return folder


def steps_in(content: bytes) -> list[int]:
    records = [json.loads(line) for line in content.splitlines()]
    return [record["step"] for record in records if record["kind"] == "train"]


# --- the same run as a local one -------------------------------------------------------------------------


@pytest.mark.parametrize("flags", ["", "--async-checkpoint=wait"])
def test_a_run_goes_on_elsewhere_as_if_it_were_local(
    run_at: Run, train: Train, bucket: Bucket, tmp_path: Path, flags: str
) -> None:
    whole = losses(train(run="whole", steps=6))
    first = good(run_at("--checkpoint-every=2", *flags.split(), steps=4, machine="first"))
    assert losses(first) == whole[:4]
    shards = [".metadata", MARKER, "__0_0.distcp", "__1_0.distcp"]
    assert bucket.objects("run/checkpoints/") == [
        f"run/checkpoints/step-0000000{s}/{f}" for s in (2, 4) for f in shards
    ]
    assert [event["path"] for event in of_kind(first, "checkpoint")] == [
        f"{bucket.url()}/checkpoints/step-0000000{step}" for step in (2, 4)
    ]
    assert steps_in(bucket.get("run/metrics.jsonl")) == [1, 2, 3, 4]

    # Steps 3 and 4 were done, and then the machine was lost before their commit.
    bucket.delete(f"run/checkpoints/step-00000004/{MARKER}")
    second = good(run_at(*flags.split(), steps=6, machine="second"))
    (resume,) = of_kind(second, "resume")
    assert resume["step"] == 2
    assert "removed step-00000004, a save that was never committed" in resume["note"]
    assert resume["checkpoint"] == f"{bucket.url()}/checkpoints/step-00000002"
    assert losses(second) == whole[2:]
    here = folder_of(tmp_path / "second")
    assert [r["step"] for r in metrics_of(here) if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert bucket.get("run/metrics.jsonl") == (here / "metrics.jsonl").read_bytes()
    assert json.loads(bucket.get("run/config.json"))["flags"]["max-steps"] == 6
    for name in ("full-model.pt", "full-optimizer.pt"):
        assert bucket.get(f"run/full_model/{name}") == (here / "full_model" / name).read_bytes()
    assert same(full_files(here), full_files(tmp_path / "whole"))
    left = {key.split("/")[1] for key in bucket.objects()}
    assert left == {"checkpoints", "config.json", "full_model", "metrics.jsonl"}, "no lease is left, and nothing else"


def test_another_number_of_ranks_goes_on_as_from_a_folder(
    run_at: Run, train: Train, bucket: Bucket, tmp_path: Path
) -> None:
    flags = ["--global-batch-size=32"]
    train(*flags, steps=3)
    good(run_at(*flags, steps=3))
    there, local = run_at(*flags, steps=5, n=1), train(*flags, steps=5, n=1)
    assert losses(good(there)) == losses(local)
    assert len(losses(local)) == 2
    assert same(full_files(folder_of(tmp_path / "here")), full_files(tmp_path / "run"))


def test_a_local_run_goes_on_from_one_at_a_url(run_at: Run, train: Train, bucket: Bucket, tmp_path: Path) -> None:
    whole = losses(train(run="whole", steps=5))
    good(run_at(steps=3))
    before = bucket.objects()
    second = good(run_at(f"--resume={bucket.url()}", steps=5, url=str(tmp_path / "second")))
    assert losses(second) == whole[3:]
    assert of_kind(second, "resume")[0]["checkpoint"] == f"{bucket.url()}/checkpoints/step-00000003"
    assert bucket.objects() == before


def test_old_checkpoints_are_removed_and_newer_ones_set_aside(run_at: Run, bucket: Bucket, here: None) -> None:
    flags = ["--checkpoint-every=1", "--keep=2"]
    first = losses(good(run_at(*flags, steps=4)))
    store = Store(RemoteFiles(f"{bucket.url()}/checkpoints"))
    assert store.committed() == [3, 4]
    assert {key.split("/")[2] for key in bucket.objects("run/checkpoints/")} == {store.name(step) for step in (3, 4)}

    assert losses(good(run_at(*flags, "--resume=3", steps=4))) == first[3:]
    again = good(run_at(*flags, "--resume=never", steps=4))
    assert losses(again) == first
    assert "2 checkpoints of the earlier run are set aside" in of_kind(again, "start")[0]["note"]
    assert steps_in(bucket.get("run/metrics.jsonl")) == [1, 2, 3, 4]
    aside = ["1-step-00000003", "1-step-00000004", "2-step-00000004"]
    names = [*(store.name(step) for step in (3, 4)), *(f"superseded-{name}" for name in aside)]
    assert store.files.list("") == names
    for name in names:
        verify(store.files.at(name))


def test_memory_is_for_one_process(ranks: Ranks, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/run"
    flags = [*SMALL, f"--run-dir={url}"]
    whole, rest = ranks.run(_twice_in_memory, tmp_path, flags, ranks=1)[0]
    assert losses(good([rest])) == losses(good([whole]))[2:]
    with pytest.raises(ConfigError, match=f"--run-dir {url} with 2 ranks: memory:// lives inside one process"):
        preflight(Config(run_dir=url), TWO)


def _twice_in_memory(folder: Path, flags: list[str]) -> list[tuple[Events, str | None]]:
    first = main_at({}, folder, [*flags, "--max-steps=4", "--checkpoint-every=2"])
    return [first, main_at({}, folder, [*flags, "--max-steps=4", "--resume=2"])]


# --- what is refused -------------------------------------------------------------------------------------


def refusal(url: str, world: World = ONE, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight(Config(run_dir=url, model_size="tiny", **flags), world)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_damage_is_named(run_at: Run, bucket: Bucket, here: None) -> None:
    good(run_at("--checkpoint-every=2", steps=4))
    shard = "run/checkpoints/step-00000004/__1_0.distcp"
    content = bytearray(bucket.get(shard))
    content[len(content) // 2] ^= 1
    bucket.put(shard, bytes(content))
    checkpoint = RemoteFiles(f"{bucket.url()}/checkpoints/step-00000004")
    with pytest.raises(DamagedCheckpoint, match=r"__1_0\.distcp has another content than was committed"):
        verify(checkpoint)
    for events, error in run_at(steps=5):
        assert events == []
        assert "__1_0.distcp has another content than was committed; choose an older one" in str(error)
    bucket.put(shard, bytes(content[:-1]))
    assert f"__1_0.distcp has {len(content) - 1} bytes and not {len(content)}" in refusal(bucket.url())
    bucket.delete(shard)
    assert "step-00000004: __1_0.distcp is missing; choose an older one with --resume STEP" in refusal(bucket.url())
    bucket.put(f"run/checkpoints/step-00000004/{MARKER}", b"{")
    assert "COMMIT.json can't be read (ValueError: it is no JSON, 1 bytes)" in refusal(bucket.url())


def test_a_place_that_cannot_be_used_is_one_line(
    proxy: Proxy, bucket: Bucket, here: None, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = bucket.url()
    missing = f"{bucket.url()}x".replace(bucket.name, "no-such-bucket")
    assert f"--run-dir {missing}: can't be used (The specified bucket does not exist); check the URL" in refusal(
        missing
    )
    assert "names no bucket; give s3://bucket/run" in refusal("s3://")
    assert "S3:// is no kind of place that fsspec knows" in refusal("S3://bucket/run")
    assert "is a local folder; give it as a path" in refusal("file:///somewhere")
    proxy.fail("refuse", times=EVER)
    assert f"reading LEASE.json of {url} failed 4 times, last with OSError: [Errno 16] Service Unavailable" in refusal(
        url
    )
    proxy.heal()
    proxy.fail("refuse", "checkpoints", times=EVER)  # once the lease is held
    assert f"--run-dir {url}: listing all of {url}/checkpoints failed 4 times" in refusal(url)
    assert f"--resume {url}: looking for COMMIT.json in {url} failed" not in refusal("runs/local", resume=url)
    proxy.heal()
    proxy.fail("refuse", times=EVER)
    assert f"--resume {url}: looking for COMMIT.json in {url} failed 4 times" in refusal("runs/local", resume=url)
    proxy.heal()
    assert bucket.objects() == [], "each has given its lease back"
    for wrong in ("soon", "0", "-1", "inf", "nan"):
        monkeypatch.setenv("FSDP2_REMOTE_TIMEOUT", wrong)
        assert f"variable FSDP2_REMOTE_TIMEOUT={wrong} must be a number above 0" in refusal(url)
    monkeypatch.setenv("FSDP2_REMOTE_TIMEOUT", "20")
    monkeypatch.setenv("FSDP2_LEASE_SECONDS", "x")
    assert f"--run-dir {url}: the environment variable FSDP2_LEASE_SECONDS=x must be a number" in refusal(url)
    monkeypatch.setenv("FSDP2_LEASE_SECONDS", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")  # where nobody listens
    assert "failed 4 times, last with EndpointConnectionError" in refusal(url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:2")  # clients that were made keep what they have found
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    assert "failed once, last with NoCredentialsError: Unable to locate credentials" in refusal(url)


def test_a_missing_package_is_named_with_its_extra() -> None:
    program = "import sys; sys.modules['s3fs'] = None; from fsdp2.checkpoint.remote import RemoteFiles; "
    result = subprocess.run(
        [sys.executable, "-c", program + "RemoteFiles('s3://bucket/run')"], capture_output=True, text=True
    )
    line = "ImportError: s3:// needs a package that isn't installed; pip install 'fsdp2-reference[s3]'"
    assert result.stderr.splitlines()[-1] == line


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="needs gcsfs to be absent")
def test_a_missing_package_is_a_refusal(tmp_path: Path) -> None:
    line = "gs:// needs a package that isn't installed; pip install 'fsdp2-reference[gcs]'"
    assert f"--run-dir gs://bucket/run: {line}" in refusal("gs://bucket/run")
    assert f"--resume gs://bucket/run: {line}" in refusal(str(tmp_path / "run"), resume="gs://bucket/run")


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
    other = json.dumps({"id": "other", "host": "elsewhere", "pid": 7, "seconds": 0.5, "beat": 1}).encode()
    proxy.when("PUT .*step-00000004/__1_0", lambda: bucket.put("run/LEASE.json", other))
    flags = ["--checkpoint-every=2", f"--on-checkpoint-failure={on_failure}"]
    (events, error), (_, others_error) = run_at(*flags, steps=200)
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


def test_under_torchrun_after_a_run_that_was_killed(proxy: Proxy, bucket: Bucket, tmp_path: Path) -> None:
    killed = {"id": "killed", "host": "elsewhere", "pid": 7, "seconds": 1.0, "beat": 3}
    bucket.put("run/LEASE.json", json.dumps(killed).encode())
    line = torchrun(2, "-m", "fsdp2.train", *SMALL, f"--run-dir={bucket.url()}", "--max-steps=3")
    status, out, err = finish(start(line, tmp_path, **environment(proxy.endpoint)))
    assert status == 0, err
    waiting = f"fsdp2: {bucket.url()} is in use, or was left without an end, by process 7 on elsewhere; waiting up to 1"
    assert waiting in err
    assert f"run directory: {bucket.url()}" in out
    assert steps_in(bucket.get("run/metrics.jsonl")) == [1, 2, 3]
    assert "Unclosed" not in err
    assert "run/LEASE.json" not in bucket.objects()


@pytest.mark.slow
def test_killed_under_torchrun_and_resumed_elsewhere(proxy: Proxy, bucket: Bucket, tmp_path: Path, here: None) -> None:
    variables = environment(proxy.endpoint)
    line = ["-m", "fsdp2.train", *SMALL, f"--run-dir={bucket.url()}", "--checkpoint-every=2"]
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
