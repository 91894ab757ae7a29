"""Runs on a real S3 server: the same as local ones, found again elsewhere, and whole whatever the network does."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp2 import infer
from fsdp2.checkpoint.store import MARKER, DamagedCheckpoint, Store, verify
from fsdp2.config import Config, parse
from fsdp2.options.errors import ConfigError
from fsdp2.report.console import Console
from fsdp2.run.preflight import preflight
from fsdp2.run.process.runtime import World
from fsdp2.units import install
from fsdp2_extra.remote.files import RemoteFiles
from fsdp2_tools.memory import __main__ as memory
from tests.harness import Ranks, full_files, losses, of_kind, same, small
from tests.remote.runs import Events, Run, folder_of, good, main_at, refusal, steps_in
from tests.remote.s3 import EVER, Bucket, Proxy, environment, surroundings
from tests.test_resume import metrics_of

Train = Callable[..., Events]

TWO = World(0, 2, 0, 2)


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


def _next_commands(environment: dict[str, str], folder: Path, ends: list[dict[str, Any]]) -> list[Any]:
    """What the `next:` lines do that are printed after these `end` events, on a machine that has nothing yet."""
    folder.mkdir()
    done: list[Any] = []
    with surroundings(environment, folder):
        for end in ends:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                Console(0, 1, 1)("end", end)
            words = shlex.split(printed.getvalue().splitlines()[-1])
            if "fsdp2.infer" in words:
                arguments = infer.parse(words[words.index("fsdp2.infer") + 1 :])
                done += [infer.main(arguments.run), infer.main(arguments.run, sharded=True)]
            else:
                done.append(parse(words[words.index("--config") : words.index("goes")]))
    return done


def test_the_next_commands_work_when_pasted(
    run_at: Run, ranks: Ranks, proxy: Proxy, bucket: Bucket, tmp_path: Path
) -> None:
    url = f"{bucket.url()} 2"  # a name that a shell takes apart
    events = good(run_at("--checkpoint-every=2", steps=4, url=url, n=1))
    (end,) = of_kind(events, "end")
    ends = [end, {**end, "reason": "SIGTERM"}]
    arguments = (environment(proxy.endpoint), tmp_path / "other", ends)
    full, sharded, config = ranks.run(_next_commands, *arguments, ranks=1)[0]
    # From another file of the same weights.
    assert {**full, "weights": None} == {**sharded, "weights": None}
    assert full["accuracy"] == of_kind(events, "eval")[-1]["accuracy"]
    assert (config.run_dir, config.max_steps, config.checkpoint_every) == (url, 4, 2)


def test_infer_at_a_url_trusts_the_marker_there(run_at: Run, bucket: Bucket, here: None) -> None:
    url = bucket.url()
    good(run_at(steps=2, n=1, machine="trained"))
    name = "run/full_model/full-model.pt"
    content = bytearray(bucket.get(name))
    content[-1] ^= 1
    bucket.put(name, bytes(content))
    with pytest.raises(ConfigError, match=r"full-model\.pt differs from what was committed.*; use --sharded"):
        infer.main(url)
    bucket.delete(f"run/full_model/{MARKER}")
    with pytest.raises(ConfigError, match=r"its full model can't be used \(.*COMMIT.json can't be read"):
        infer.main(url)
    for wrong, why in [
        (f"{url}/none", "holds no config.json, so it is not a run of fsdp2.train; give one's folder or URL"),
        ("s3://", "RUN s3://: names no bucket; give s3://bucket/run"),
        ("gopher://x/y", "RUN gopher://x/y: gopher:// is not a protocol"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(why)):
            infer.main(wrong)
    for wrong, why in [
        (f"{url}/none.json", f"--config {url}/none.json: cannot be read (there is none); give an existing file"),
        ("s3://config.json", "--config s3://config.json: names no bucket; give s3://bucket/run"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(why)):
            parse(["--config", wrong])
    with pytest.raises(ConfigError, match="RUN gopher://x: gopher:// is not a protocol"):
        memory.main(["gopher://x"])


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
    flags = small(url)
    whole, rest = ranks.run(_twice_in_memory, tmp_path, flags, ranks=1)[0]
    assert losses(good([rest])) == losses(good([whole]))[2:]
    with pytest.raises(ConfigError, match=f"--run-dir {url} with 2 ranks: memory:// lives inside one process"):
        preflight(Config(run_dir=url), TWO)


def _twice_in_memory(folder: Path, flags: list[str]) -> list[tuple[Events, str | None]]:
    first = main_at({}, folder, [*flags, "--max-steps=4", "--checkpoint-every=2"])
    return [first, main_at({}, folder, [*flags, "--max-steps=4", "--resume=2"])]


# --- what is refused -------------------------------------------------------------------------------------


def test_damage_is_named(run_at: Run, bucket: Bucket, here: None) -> None:
    good(run_at("--checkpoint-every=2", steps=4))
    shard = "run/checkpoints/step-00000004/__1_0.distcp"
    content = bytearray(bucket.get(shard))
    content[len(content) // 2] ^= 1
    bucket.put(shard, bytes(content))
    checkpoint = RemoteFiles(f"{bucket.url()}/checkpoints/step-00000004")
    with pytest.raises(DamagedCheckpoint, match=r"__1_0\.distcp differs from what was committed"):
        verify(checkpoint)
    for events, error in run_at(steps=5):
        assert events == []
        assert "__1_0.distcp differs from what was committed; choose an older one" in str(error)
    bucket.put(shard, bytes(content[:-1]))
    assert f"__1_0.distcp has {len(content) - 1} bytes and not {len(content)}" in refusal(bucket.url())
    bucket.delete(shard)
    assert "step-00000004: __1_0.distcp is missing; choose an older one with --resume STEP" in refusal(bucket.url())
    bucket.put(f"run/checkpoints/step-00000004/{MARKER}", b"{")
    assert "COMMIT.json can't be read (ValueError: it is not JSON, 1 bytes)" in refusal(bucket.url())


def test_a_place_that_cannot_be_used_is_one_line(
    proxy: Proxy, bucket: Bucket, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = bucket.url()
    missing = f"{bucket.url()}x".replace(bucket.name, "no-such-bucket")
    assert f"--run-dir {missing}: can't be used (The specified bucket does not exist); check the URL" in refusal(
        missing
    )
    assert "names no bucket; give s3://bucket/run" in refusal("s3://")
    assert "S3:// is not a protocol that fsspec knows" in refusal("S3://bucket/run")
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
    program = "import sys; sys.modules['s3fs'] = None; from fsdp2_extra.remote.files import RemoteFiles; "
    result = subprocess.run(
        [sys.executable, "-c", program + "RemoteFiles('s3://bucket/run')"], capture_output=True, text=True
    )
    line = f"ImportError: s3:// needs a package that isn't installed; {install('s3')}"
    assert result.stderr.splitlines()[-1] == line


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="needs gcsfs to be absent")
def test_a_missing_package_is_a_refusal(tmp_path: Path) -> None:
    line = f"gs:// needs a package that isn't installed; {install('gcs')}"
    assert f"--run-dir gs://bucket/run: {line}" in refusal("gs://bucket/run")
    assert f"--resume gs://bucket/run: {line}" in refusal(str(tmp_path / "run"), resume="gs://bucket/run")
