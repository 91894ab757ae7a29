"""Through Ray, what takes longer: more configurations, rank 0 killed, failures beyond the limit, S3, a search."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp2.checkpoint.places import open_files
from fsdp2.checkpoint.store import verify
from fsdp2.options.errors import ConfigError
from fsdp2.run.directory.rundir import RunDir
from fsdp2_tools.tune.launch import KILLED
from fsdp2_tools.tune.rounds import LAST_STEPS
from launchers import ray_doctor, ray_fastest, ray_train, ray_tune
from tests.harness import SMALL, full_files, losses, of_kind, same
from tests.launchers.test_ray_train import goes_on_after_a_kill
from tests.launchers.through_ray import kill_at, losses_in, through_ray
from tests.remote.s3 import Bucket

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

Train = Callable[..., list[tuple[str, dict[str, Any]]]]


@pytest.mark.parametrize(
    "flags",
    [
        # Every model, and every flag that could make a difference, in as few runs as hold them: each takes a minute.
        pytest.param(
            "--config=configs/all-savers.toml --model-size=tiny",  # fp16 with a scaler, offload, reshard of the root
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "--model=transformer --model-size=debug --seq-len=16 --grad-accumulation=2 --mixed-precision=bf16",
            marks=pytest.mark.slow,
        ),
        "--model=cnn --clip-grad-norm --explicit-prefetching --dcp-api --async-checkpoint --checkpoint-every=2",
    ],
)
def test_losses_are_those_of_torchrun(train: Train, tmp_path: Path, flags: str) -> None:
    expected = losses(train(*flags.split(), run="torchrun"))
    result = through_ray(tmp_path / "ray", *flags.split())
    assert losses_in(tmp_path / "ray") == expected
    assert same(full_files(tmp_path / "ray"), full_files(tmp_path / "torchrun"))
    assert result.metrics["step"] == 6


@pytest.mark.parametrize(
    "flags",
    ["--replicas=2", "--model=llama --model-size=debug --dataset=random-tokens --seq-len=16 --batch-size=4 --tp=2"],
)
def test_a_mesh_of_two_dimensions_with_four_workers(train: Train, tmp_path: Path, flags: str) -> None:
    expected = losses(train(*flags.split(), n=4, run="torchrun"))
    through_ray(tmp_path / "ray", *flags.split(), workers=4)
    assert losses_in(tmp_path / "ray") == expected


@pytest.mark.slow  # test_ray_train.py kills the other rank
def test_a_killed_rank_0_is_started_again_too(train: Train, tmp_path: Path) -> None:
    goes_on_after_a_kill(train, tmp_path, which=0)


def test_each_launcher_resumes_the_others_runs_until_they_are_finished(train: Train, tmp_path: Path) -> None:
    flags = ["--global-batch-size=24"]
    whole = losses(train(*flags, run="whole", steps=6))
    train(*flags, steps=2)
    through_ray(tmp_path / "run", *flags, steps=4)
    assert losses_in(tmp_path / "run") == whole[:4]
    events = train(*flags, steps=6)
    assert of_kind(events, "resume")[0]["step"] == 4
    assert losses(events) == whole[4:]
    result = through_ray(tmp_path / "run", *flags, steps=6)
    assert result.return_value["reason"] == "already finished"
    assert result.checkpoint.path.endswith("step-00000006")
    assert losses_in(tmp_path / "run") == whole


def test_beyond_the_limit_the_first_cause_is_told(tmp_path: Path) -> None:
    killer = kill_at(tmp_path / "run", 3, 1)
    with pytest.raises(ray_train.TrainingFailed) as caught:
        through_ray(tmp_path / "run", "--max-failures=0", "--checkpoint-every=2", steps=1000)
    killer.join(timeout=10)
    # Which rank the second process has is Ray's to choose. The other one has only lost its peer, and isn't named.
    told = str(caught.value)
    assert told.startswith(("rank 0:\nA worker health check failed", "rank 1:\nA worker health check failed"))
    assert told.count("rank ") == 1
    # It is resumable all the same.
    assert RunDir(tmp_path / "run").store.committed()


def test_a_run_on_s3(train: Train, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = losses(train(run="torchrun"))
    url = Bucket(s3).url()
    storage, _, name = url.rpartition("/")
    placed = [*SMALL, f"--storage-path={storage}", f"--name={name}", "--checkpoint-every=2"]
    first = ray_train.main([*placed, "--max-steps=4"])
    assert first.checkpoint.path == f"{url}/checkpoints/step-00000004".removeprefix("s3://")
    result = ray_train.main([*placed, "--max-steps=6"])
    assert result.metrics["step"] == 6
    files = open_files(url)
    verify(files.at("checkpoints/step-00000006"))
    records = [json.loads(line) for line in files.read("metrics.jsonl").splitlines()]
    assert [record["loss"] for record in records if record["kind"] == "train"] == expected


def all_cpus_are_free() -> bool:
    """Whether the cluster has them all again within 10 s; processes end, and then Ray counts."""
    import ray

    deadline = time.monotonic() + 10
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def test_a_search_over_flags(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = [*SMALL, "--epochs=2", "--max-steps=50", f"--storage-path={tmp_path}", "--name=search", "--trials=1"]
    flags += ["--metric=test_loss", "--eval-every=20", "--checkpoint-every=15"]
    results = ray_tune.main([*flags, "--search=lr=grid(2e-3, 1e-6)"])
    assert len(results) == 2
    assert results.num_errors == 0
    printed = capfd.readouterr().out
    best = results.get_best_result("test_loss", "min")
    assert best.config["lr"] == 2e-3
    told = re.findall(r"^\S+  (epoch \d+  step \d+)  test_loss \S+  --lr (\S+)$", printed, re.MULTILINE)
    assert [at for at, lr in told if lr == "0.002"] == [f"epoch {1 + n // 46}  step {n}" for n in (20, 40, 45, 50)]
    assert len(set(told)) == len(told)
    runs = {json.loads((run / "config.json").read_text())["flags"]["lr"]: run for run in tmp_path.glob("search/run-*")}
    assert set(runs) == {2e-3, 1e-6}
    assert len(losses_in(runs[2e-3])) == 50
    assert len(losses_in(runs[1e-6])) >= 45, "it was stopped within its first epoch"
    assert (runs[2e-3] / "full_model" / "full-model.pt").is_file()
    assert all_cpus_are_free(), "a trial that was stopped has kept its workers' CPUs"
    assert f"best: {runs[2e-3]}" in printed
    assert "repeat it: python -m launchers.ray_train --num-workers 2" in printed
    assert "--lr 0.002" in printed

    before = losses_in(runs[2e-3])
    again = ray_tune.main([*flags, "--search=lr=grid(2e-3, 1e-6)"])
    assert len(again) == 2
    assert "going on with the search" in capfd.readouterr().out
    assert losses_in(runs[2e-3]) == before
    with pytest.raises(ConfigError, match=r"--search .* has .*; use that to go on with it, or another --name"):
        ray_tune.main([*flags, "--search=lr=grid(2e-3, 1e-5)"])


@pytest.mark.slow
def test_the_fastest_flags_are_found_through_ray(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One launch of the two settings: that they train the same is seen by their losses, bit for bit."""
    flags = ["--model=llama", "--model-size=debug", "--seq-len=32", "--batch-size=4", "--threads=1", "--device=cpu"]
    flags += ["--trials=2", "--plans=2", "--steps=1", "--dataset=random-tokens", f"--out={tmp_path / 'out'}"]
    default, other = ray_fastest.main(flags)
    printed = capfd.readouterr().out
    assert (default.failed, other.failed) == (None, None)
    assert default.losses == other.losses
    assert len(other.last) == LAST_STEPS
    assert default.peak_bytes < other.peak_bytes  # of replicas
    assert "train with it: python -m fsdp2.train --config" in printed
    (first, _) = json.loads((tmp_path / "out" / "trials.json").read_text())["trials"]
    assert first["losses"] == default.losses
    assert [one.name for one in (tmp_path / "out").iterdir() if one.is_dir()] == []
    assert all_cpus_are_free()


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--num-workers=1:2", "--num-workers 1:2: is measured on one number of workers; give 2"),
        ("--name=mine", "--name mine: it leaves no run of that name; drop it"),
        ("--max-failures=3", "--max-failures 3: what dies is a result"),
        ("--nproc=2", "--nproc=2: no such flag"),
        ("--strategy=ddp", "--strategy ddp: the settings that are tried are FSDP2's"),
    ],
)
def test_flags_without_a_meaning_are_refused_before_ray_starts(flags: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ray_fastest.main([*SMALL, flags])
    assert part in str(caught.value)


def test_a_worker_that_was_killed_is_told_apart() -> None:
    assert ray_fastest.reason_of("rank 1:\nThe actor died unexpectedly before finishing this task.\n…") == KILLED
    assert ray_fastest.reason_of("rank 0:\nTraceback:\n x\nValueError: no\n") == "ValueError: no"


def test_what_is_bad_ends_the_doctor_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="the cluster can't train"):
        ray_doctor.main(["--quick", "--threads=1", f"--run-dir={tmp_path / 'file' / 'run'}"])
