"""The search for fast flags as a user types it, and its trials on real ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2.config import Config, parse
from fsdp2.options.errors import ConfigError
from fsdp2.run.dataset import load_data
from fsdp2.run.process import runtime
from fsdp2.run.process.group import RunStopped
from fsdp2.run.process.settings import process_settings
from fsdp2_tools.compare import measure
from fsdp2_tools.tune import __main__ as tune
from fsdp2_tools.tune import launch, report, trial
from fsdp2_tools.tune.rounds import Candidate
from fsdp2_tools.tune.trial import WARM_UP, Trial
from tests.harness import SMALL, Launches, Ranks
from tests.test_text import documents

SETTINGS = ("", "--shard-granularity=root", "--reshard-after-forward=false", "--replicas=2", "--fused-optimizer")


def _tried(*settings: str) -> list[dict[str, Any]]:
    """Trials in turn, in this process group. In `Ranks`."""
    configs = [parse([*SMALL, *flags.split()]) for flags in settings]
    world, device = runtime.world(), torch.device("cpu")
    with process_settings(configs[0]):
        dataset = load_data(configs[0], world)
        trials = [Trial(config, dataset, world, device, peak=True) for config in configs]
        for _ in range(3):
            for trial in trials:
                trial.timed_step()
        return [trial.found() for trial in trials]


def test_settings_that_are_tried_in_turn_train_the_same(ranks: Any) -> None:
    found, others = ranks.run(_tried, *SETTINGS)
    assert found == others  # the slowest and the fullest of all ranks, so the same everywhere
    default, *rest = found
    assert len(default["losses"]) == WARM_UP
    assert len(default["step_ms"]) == 3
    for flags, one in zip(SETTINGS[1:], rest, strict=True):
        if flags == "--fused-optimizer":  # it rounds differently
            assert one["losses"] == pytest.approx(default["losses"], rel=1e-5)
        else:
            assert one["losses"] == default["losses"], flags
    root, no_reshard, replicas, _ = rest
    assert default["peak_bytes"] < min(root["peak_bytes"], replicas["peak_bytes"])
    assert default["peak_bytes"] <= no_reshard["peak_bytes"]


@pytest.mark.parametrize("mesh", ["--tp=2", "--sp=2"])
def test_ranks_that_share_samples_are_given_the_same_to_evaluate(
    ranks: Ranks, tmp_path: Path, mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    corpus = tmp_path / "some.jsonl"
    corpus.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents(60)))
    flags = [
        "--model=llama",
        "--model-size=debug",
        "--seq-len=8",
        "--batch-size=2",
        "--test-batch-size=64",
        f"--dataset=text:{corpus}",
        mesh,
    ]
    found, other = ranks.run(_tried, " ".join(flags))
    assert found == other
    assert len(found[0]["losses"]) == WARM_UP


def launches(script: Sequence[Callable[[Path], str | None]]) -> launch.Launch:
    """In place of torchrun: each call writes what a launch would have left, and returns what it printed."""
    calls = iter(script)

    def fake(job: Path) -> str | None:
        return next(calls)(Path(json.loads(job.read_text())["out"]))

    return fake


@pytest.mark.parametrize(
    ("status", "printed", "why"),
    [
        (0, "", None),
        (1, "exitcode  : -9 (pid: 7)", launch.KILLED),
        (1, "x\nfsdp2: error: --x: no\n", "--x: no"),
        (
            1,
            "W1 noise\na.b.ChildFailedError:\nFailures:\n  traceback : Signal 15\nRoot Cause (first):\n"
            "  exitcode  : -6 (pid: 7)\n  traceback : Signal 6 (SIGABRT) received by PID 7\n====",
            "Signal 6 (SIGABRT) received by PID 7",
        ),
    ],
)
def test_torchrun_says_why_a_launch_has_failed(
    monkeypatch: pytest.MonkeyPatch, status: int, printed: str, why: str | None
) -> None:
    def run(command: list[str], **settings: Any) -> Any:
        assert command[1:3] == ["-c", measure.TORCHRUN]
        assert command[-2:] == ["fsdp2_tools.tune.trial", "job.json"]
        return subprocess.CompletedProcess(command, status, "", printed)

    monkeypatch.setattr(measure, "run", run)
    assert launch.by_torchrun(2)(Path("job.json")) == why


def test_ranks_end_with_a_tool_that_is_killed(tmp_path: Path) -> None:
    rank, told = tmp_path / "rank.py", tmp_path / "pid"
    rank.write_text(
        f"import os, time\nopen({str(told)!r} + '-', 'w').write(str(os.getpid()))\n"
        f"os.rename({str(told)!r} + '-', {str(told)!r})\ntime.sleep(300)\n"
    )
    started = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    words = [measure.TORCHRUN, "--standalone", "--nproc_per_node=1", str(rank)]
    tool = subprocess.Popen([sys.executable, "-c", started, *words])
    until = time.monotonic() + 100
    while not told.exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    tool.kill()
    tool.wait()
    while Path(f"/proc/{told.read_text()}").exists():
        assert time.monotonic() < until, "the rank outlives the tool"
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_tool_that_is_stopped_leaves_no_folder_and_no_rank(tmp_path: Path, number: signal.Signals) -> None:
    (below := tmp_path / "below").mkdir()
    tool = tmp_path / "tool.py"
    tool.write_text(
        "import os, sys, time\nfrom fsdp2_tools import results\nfrom fsdp2_tools.compare.measure import torchrun\n"
        "if 'RANK' in os.environ:\n    open(sys.argv[1], 'x').write(str(os.getpid()))\n    time.sleep(300)\n"
        f"elif __name__ == '__main__':\n    from pathlib import Path\n"
        f"    with results.temporary(Path({str(below)!r})) as folder:\n        torchrun(1, 'tool', f'{{folder}}/pid')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    stopped = subprocess.Popen([sys.executable, str(tool)], env=environment, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 100
    while not (told := [one.read_text() for one in below.glob("*/pid")]) or not told[0]:
        assert time.monotonic() < until
        time.sleep(0.1)
    stopped.send_signal(number)
    assert stopped.wait(until - time.monotonic()) == (143 if number == signal.SIGTERM else -signal.SIGINT)
    assert not any(below.iterdir())
    assert not Path(f"/proc/{told[0]}").exists(), "the rank outlives the tool"


def _leave(*records: dict[str, Any], why: str | None = None) -> Callable[[Path], str | None]:
    def leave(out: Path) -> str | None:
        out.write_text("".join(json.dumps(record) + "\n" for record in records))
        return why

    return leave


MEASURED = {"losses": [1.0], "step_ms": [1.0], "samples": 1, "peak_bytes": 1}


@pytest.mark.parametrize(
    ("ended", "records", "why"),
    [
        ("--x: no", [], "--x: no"),
        ("torch.OutOfMemoryError", [{"trial": 1, "failed": "out of memory: 3", "ended": True}], "out of memory: 3"),
    ],
)
def test_a_trial_that_ends_its_launch_is_out_and_the_others_go_on(
    tmp_path: Path, ended: str, records: list[dict[str, Any]], why: str
) -> None:
    script = [
        _leave({"begun": 0}, {"begun": 1}, *records, why=ended),
        _leave({"begun": 0}, {"begun": 1}, {"trial": 0, **MEASURED}, {"trial": 1, **MEASURED}),
    ]
    three = [Candidate(name, Config()) for name in ("default", "large", "small")]
    found = launch.on_ranks(launches(script), tmp_path, together=True, say=lambda text: None)(three, 1)
    assert [record is not None for record in found] == [True, False, True]
    assert [one.failed for one in three] == [None, why, None]


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--nproc 0", "--nproc 0: must be 1 or more"),
        ("--trials 1", "--trials 1: must be 2 or more"),
        ("--steps none", "--steps none: must be a whole number"),
        ("--budget lots", "--budget lots: must be a number of bytes"),
        ("--budget 1kB", "--budget: no setting is planned to fit"),
        ("--gpu h1000", "--gpu h1000: must be one of"),
        ("--strategy ddp", "--strategy ddp: the settings that are tried are FSDP2's"),
        ("--replicas 3", "--replicas 3: doesn't divide the world size 2"),
        ("--model=llama --model-size=debug --sp=2", "--plans: of those that were planned none is left but the default"),
        ("--no-such", "--no-such: no such flag"),
    ],
)
def test_bad_input_is_refused_before_anything_is_started(
    tmp_path: Path, flags: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **settings: Any) -> None:
        raise AssertionError("a trial was started")

    monkeypatch.setattr(measure, "run", never)
    with pytest.raises(ConfigError) as caught:
        tune.main([*SMALL, "--plans=2", f"--out={tmp_path / 'out'}", *flags.split()])
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        # From weights, these are other than what a run has that says nothing.
        "--model=llama --model-size=debug --init-from=a.pt --epochs=12 --optimizer=adam --lr=1e-3 --schedule=step "
        "--warmup-steps=0 --clip-grad-norm=off --seq-len=128 --batch-size=64",
    ],
)
def test_the_settings_that_are_left_are_those_that_were_tried(tmp_path: Path, flags: str) -> None:
    config = parse(flags.split())
    tried = Candidate("default", config, losses=[1.0], step_ms=[1.0], samples=1)
    report.write([tried], tried, {}, tmp_path)
    assert parse([f"--config={tmp_path / report.SETTINGS}"]) == config


def test_a_search_in_which_nothing_ran_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        measure, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", "ValueError: no\n")
    )
    with pytest.raises(RunStopped, match=r"no setting ran, as .*tuned\.md says of each"):
        tune.main([*SMALL, "--plans=2", "--trials=2", f"--out={tmp_path}"])
    said = capsys.readouterr().out
    assert "Nothing ran: the default is out (ValueError: no)" in said
    assert "train with it" not in said


def test_a_search_on_two_ranks(
    ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(ranks, trial.cli)
    monkeypatch.setattr(measure, "run", launches.run)
    flags = [*SMALL, "--trials=3", "--plans=4", "--steps=2", "--test-batch-size=32", f"--out={tmp_path / 'out'}"]
    tried = tune.main(flags)
    printed = capfd.readouterr().out
    assert len(launches.commands) > 1
    assert [one.failed for one in tried] == [None] * 3
    assert tried[0].name == "default"
    for one in tried:  # gloo holds the largest exchange for a moment, and the plan's tensors don't have it
        assert abs(one.peak_bytes - (one.planned_bytes or 0)) < 0.06 * one.peak_bytes
    content = json.loads((tmp_path / "out" / "trials.json").read_text())
    assert [one["measured"]["tensors"] for one in content["trials"]] == [one.peak_bytes for one in tried]
    assert (tmp_path / "out" / "tuned.png").read_bytes().startswith(b"\x89PNG")
    (told,) = [line for line in printed.splitlines() if line.startswith("train with it: ")]
    config = parse([f"--config={tmp_path / 'out' / 'tuned.json'}", "--device=cpu"])
    wanted = next((one for one in tried if f"Use {one.name}:" in printed), tried[0])
    assert vars(config) == vars(wanted.config)
    shutil.rmtree(tmp_path / "out")
    assert str(tmp_path) in told


def test_samples_a_second_are_as_of_one_time() -> None:
    """A setting that is measured while the machine is slow isn't slower than the default beside it."""
    default = Candidate("default", Config(), step_ms=[100.0, 100.0], ratios=[1.0, 1.0], samples=10)
    faster = Candidate("faster", Config(), step_ms=[180.0, 180.0], ratios=[0.8, 0.8], samples=10)
    rows = {row[0]: row for row in report.cells([default, faster])}
    assert [rows[name][3] for name in ("default", "faster")] == ["100", "125"]
