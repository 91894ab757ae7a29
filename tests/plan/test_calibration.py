"""Rates fitted to what was measured, and files that say nothing of it."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.options.parser import to_flags
from fsdp2_tools.plan import calibration
from fsdp2_tools.plan.__main__ import main
from fsdp2_tools.plan.calibration import FITTED, Trial, calibrate, changed
from fsdp2_tools.plan.device import gpu
from fsdp2_tools.plan.execute import Runs, run

SMALL = ["--model=llama", "--model-size=debug", "--batch-size=4", "--seq-len=96", "--no-save-model"]
SETTINGS = ("", "--shard-granularity=root", "--fused-optimizer", "--replicas=2", "--batch-size=8", "--seq-len=24")
CPU = gpu("cpu")


@functools.cache
def _runs(flags: str) -> Runs:
    return run(parse([*SMALL, *flags.split()]), 2, 0, gloo=True)


def _trials(speed: Any, *settings: str, noise: float = 1.0) -> list[Trial]:
    """Trials on a machine that has these rates."""
    found = []
    for number, flags in enumerate(settings):
        trial = Trial(parse([*SMALL, *flags.split()]), 2, 0.0, _runs(flags))
        found.append(dataclasses.replace(trial, milliseconds=trial.planned(speed) * noise ** (-1) ** number))
    return found


def test_the_rates_of_another_machine_are_found_and_carry_over() -> None:
    """From plans that are off by more than a factor of two, of settings that the fit hasn't seen too."""
    assert CPU.speed is not None
    machine = changed(CPU.speed, (math.log(0.3), math.log(0.25), math.log(0.5), math.log(0.4), math.log(0.2)))
    fitted = calibrate(CPU, _trials(machine, *SETTINGS))
    assert fitted.before > 0.5
    assert fitted.after < 0.02
    (unseen,) = _trials(machine, "--shard-granularity=root --fused-optimizer --replicas=2")
    assert fitted.gpu.speed is not None
    assert unseen.planned(fitted.gpu.speed) == pytest.approx(unseen.milliseconds, rel=0.05)
    assert unseen.planned(CPU.speed) < 0.5 * unseen.milliseconds


def test_what_no_trial_tells_stays_where_the_table_has_it() -> None:
    assert CPU.speed is not None
    fitted = calibrate(CPU, _trials(CPU.speed, *SETTINGS[:3])).gpu.speed
    assert fitted == dataclasses.replace(CPU.speed, spread=fitted.spread if fitted else 0)
    alone = _trials(CPU.speed, *[f"--strategy=none --threads={n}" for n in ("1", "1", "1")])
    slow = [dataclasses.replace(one, milliseconds=3 * one.milliseconds) for one in alone]
    found = calibrate(CPU, slow).gpu.speed
    assert found is not None
    assert found.exchange == pytest.approx(CPU.speed.exchange, rel=1e-3)  # no parameter was exchanged
    assert found.efficiency["link"] == pytest.approx(CPU.speed.efficiency["link"], rel=1e-3)
    assert found.efficiency["matrix"] < 0.7 * CPU.speed.efficiency["matrix"]


def test_the_range_of_a_plan_is_as_wide_as_its_trials_were_off() -> None:
    assert CPU.speed is not None
    spread = [calibrate(CPU, _trials(CPU.speed, *SETTINGS, noise=n)).gpu.speed.spread for n in (1.0, 1.3)]  # type: ignore[union-attr]
    assert spread[0] == 0.05
    assert 0.1 < spread[1] < 0.4


def test_factors_never_pass_a_data_sheet() -> None:
    assert CPU.speed is not None
    fast = changed(CPU.speed, (9.0,) * len(FITTED))
    assert set(fast.efficiency.values()) == {1.0}


def _file(folder: Path, change: Any = None) -> Path:
    assert CPU.speed is not None
    trials: list[Any] = [
        {"flags": to_flags(one.config), "measured": {"step_ms": 2 * one.milliseconds}}
        for one in _trials(CPU.speed, *SETTINGS[:3])
    ]
    content: dict[str, Any] = {"facts": {"world_size": 2, "device": "cpu"}, "trials": trials}
    if change is not None:
        change(content)
    file = folder / "trials.json"
    file.write_text(json.dumps(content))
    return file


def test_a_plan_reads_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*SMALL, "--ranks=2", "--gpu=cpu"]
    (plain,), (fitted,) = main(flags), main([*flags, f"--calibration={_file(tmp_path)}"])
    told = capsys.readouterr().err
    assert re.search(
        r"rates of cpu fitted on 3 trials: planned times were off by 50% \(median\), and are by [0-2]%", told
    )
    assert plain.time is not None
    assert fitted.time is not None
    assert fitted.time.milliseconds == pytest.approx(2 * plain.time.milliseconds, rel=0.05)
    assert fitted.memory == plain.memory  # which no rate changes


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda c: c.pop("facts"), "holds no trials, or no world_size"),
        (lambda c: c.update(trials="many"), "holds no trials, or no world_size"),
        (lambda c: c["facts"].update(world_size=True), "holds no trials, or no world_size"),
        (lambda c: c["facts"].update(device="cuda"), "was measured on cuda, and --gpu cpu is cpu"),
        (lambda c: c["trials"].pop(), "has 2 trials with a time; give 3 to 1000"),
        (lambda c: c["trials"][1]["measured"].update(step_ms=None), "has 2 trials with a time"),
        (lambda c: c["trials"][1]["measured"].update(step_ms=-1), "step_ms -1 of trial 1: must be milliseconds"),
        (lambda c: c["trials"][2].pop("flags"), "trial 2 has no flags, or no measured"),
        (lambda c: c["trials"][0]["flags"].update(no_such=1), "no_such is not a flag"),
        (lambda c: c["trials"][0]["flags"].update(lr=-1), "trials.json: --lr -1"),
        (lambda c: c["trials"][0]["measured"].update(step_ms=1e-300), "step_ms 1e-300 of trial 0: must be millise"),
        (lambda c: c["trials"][0]["flags"].update(model="hf:a/b"), "trials.json: its model is on a hub, hf:a/b"),
        (lambda c: c.update(trials=400 * c["trials"]), "has 1200 trials with a time"),
        (
            lambda c: c["trials"][0]["flags"].update(model="strangers_module:build"),
            "its model is code, strangers_module",
        ),
        (
            lambda c: c["trials"][0]["flags"].update({"trust-remote-code": True}),
            "its trust-remote-code runs its model's Python files",
        ),
        (lambda c: c["trials"][0]["flags"].update(dataset="text:https://a.invalid/b"), "its dataset is at a URL"),
        (
            lambda c: c["trials"][0]["flags"].update(replicas=7),
            "trials.json: --replicas 7: doesn't divide the world size 2",
        ),
        (
            lambda c: c["facts"].update(world_size=3) or c["trials"][0]["flags"].update(tp=2),
            "trials.json: --tp 2: doesn't divide",
        ),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line(tmp_path: Path, change: Any, part: str) -> None:
    with pytest.raises(ConfigError) as refused:
        main([*SMALL, "--ranks=2", "--gpu=cpu", f"--calibration={_file(tmp_path, change)}"])
    assert part in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "strangers_module" not in sys.modules


def test_a_plan_waits_so_long_for_trials_and_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "LONGEST", 2)

    def one_of_a_million_chunks(values: Any) -> None:
        values["trials"][0]["flags"] |= {
            "chunked-loss": 1,
            "seq-len": 1_000_000,
            "model": "llama",
            "model-size": "debug",
        }
        values["trials"][0]["flags"] |= {"dataset": "random-tokens"}

    made_up = _file(tmp_path, one_of_a_million_chunks)
    with pytest.raises(ConfigError, match=r"json, its 3 trials: takes more than 2 seconds .*; leave fewer, or smaller"):
        main([*SMALL, "--ranks=2", "--gpu=cpu", f"--calibration={made_up}"])


def test_a_calibration_needs_rates_and_a_json_file(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--calibration .*: needs a --gpu with rates to fit; of ranks on CPUs --gpu cpu"
    ):
        main([*SMALL, f"--calibration={_file(tmp_path)}"])
    (tmp_path / "mine.toml").write_text("x = 1")
    with pytest.raises(ConfigError, match=r"is no \.json file; give the trials.json that fsdp2.tune has written"):
        main([*SMALL, "--gpu=cpu", f"--calibration={tmp_path / 'mine.toml'}"])
