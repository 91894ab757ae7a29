"""What a search varies, as text, and the command that repeats a trial. Without Ray."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdp2.config import Config
from fsdp2.options.errors import ConfigError
from launchers.ray_options import RayOptions, parse
from launchers.ray_search import Choice, example_config, parse_search
from launchers.ray_train import TrainingFailed
from launchers.ray_tune import TuneOptions, command, table


def test_each_way_is_read_as_data() -> None:
    texts = [
        "lr=loguniform(1e-4, 1e-2)",
        "--batch-size=choice(32, 64)",
        "model=choice(vit, cnn)",
        "gamma=uniform(0.5,1)",
        "seed=randint(1, 9)",
        "optimizer=grid(adam, 'sgd')",
    ]
    assert parse_search(texts) == {
        "lr": Choice("loguniform", (1e-4, 1e-2)),
        "batch_size": Choice("choice", (32, 64)),
        "model": Choice("choice", ("vit", "cnn")),
        "gamma": Choice("uniform", (0.5, 1)),
        "seed": Choice("randint", (1, 9)),
        "optimizer": Choice("grid", ("adam", "sgd")),
    }


def test_a_file_says_the_same(tmp_path: Path) -> None:
    (tmp_path / "space.py").write_text('space = {"lr": f"loguniform(1e-4, {10 ** -2})"}')
    assert parse_search([str(tmp_path / "space.py")]) == {"lr": Choice("loguniform", (1e-4, 0.01))}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("lr", "must be flag=way(…)"),
        ("lr=1e-3", "must be one of uniform(…)"),
        ("lr=normal(0, 1)", "must be one of uniform(…)"),
        ("lr=uniform(__import__('os').getcwd(), 1)", "takes numbers, words and quoted text"),
        ("lr=uniform(1)", "uniform takes 2 values"),
        ("lr=uniform(low=1, high=2)", "uniform takes 2 values"),
        ("lr=uniform(2, 1)", "the lower before the higher"),
        ("lr=loguniform(0, 1)", "the lower before the higher"),
        ("lr=uniform(small, large)", "takes numbers"),
        ("lr=choice()", "choice takes one or more values"),
        ("learning-rate=uniform(1, 2)", "learning-rate is not a flag that trials can differ in; here it is --lr"),
        ("optimiser=choice(adam)", "did you mean --optimizer?"),
        ("run-dir=choice(a)", "run-dir is not a flag that trials can differ in"),
        ("nowhere.py", "there is no such file"),
    ],
)
def test_what_makes_no_space_is_one_line(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_search([text])
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_to_vary_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to vary"):
        parse_search([])


def test_a_flag_is_varied_once() -> None:
    with pytest.raises(ConfigError, match="varied already"):
        parse_search(["lr=uniform(1, 2)", "lr=uniform(1, 3)"])


def test_values_are_checked_with_the_other_flags_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="--optimizer adamm"):
        example_config(Config(), parse_search(["optimizer=choice(adamm)"]))


def test_the_command_that_repeats_a_trial_makes_its_config() -> None:
    options, config = parse(
        [
            "--num-workers=3",
            "--model=cnn",
            "--lr=0.01",
            "--no-save-model",
            "--cpu-offload",
            "--freeze=a.*",
            "--freeze=b",
            "--reshard-after-forward=false",
            "--no-fused-optimizer",
            "--betas=0.9,0.95",
        ],
        "launchers.ray_train",
    )
    words = shlex.split(command(options, config))
    assert words[:3] == ["python", "-m", "launchers.ray_train"]
    again, same = parse(words[3:], "launchers.ray_train")
    assert same == config
    assert again == options == RayOptions(num_workers=3)  # type: ignore[arg-type]


class _Trials(list[SimpleNamespace]):
    """As Ray's ResultGrid."""

    num_errors, errors = 0, ()


def _trial(name: str, lr: float, value: float) -> SimpleNamespace:
    metrics = {"test_loss": value, "accuracy": value, "epochs": 1, "step": 45, "trial_id": name}
    return SimpleNamespace(metrics=metrics, config={"lr": lr})


@pytest.mark.parametrize(("metric", "best"), [("test_loss", "low"), ("accuracy", "high")])
def test_a_trial_that_diverged_is_the_last(metric: str, best: str) -> None:
    nan = _trial("diverged", 9.0, math.nan)
    older = _trial("high", 0.2, 1.5)
    older.metrics["epoch"] = older.metrics.pop("epochs") - 1  # as an earlier version reported it
    found = _Trials([older, nan, _trial("low", 0.1, 0.5)])
    tune, config = TuneOptions(search=("lr=uniform(1, 2)",), metric=metric), Config()
    lines = table(found, tune, RayOptions(), config, "there", "a")
    assert [line.split()[0] for line in lines[1:4]] == [
        *sorted(("low", "high"), key=lambda name: name != best),
        "diverged",
    ]
    assert {line.split()[2] for line in lines[1:4]} == {"1"}
    assert f"a/run-{best}" in lines[-2]
    with pytest.raises(TrainingFailed, match="no trial has a result"):
        table(_Trials([nan]), tune, RayOptions(), config, "there", "a")
