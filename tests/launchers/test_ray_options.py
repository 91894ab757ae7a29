"""The command line of the Ray launcher, without Ray."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from fsdp2.config import Config
from fsdp2.options.errors import ConfigError
from launchers import ray_train
from launchers.ray_options import Workers, parse, place, same_global_batch, without_a_run


def placed(*flags: str) -> tuple[str, str, str | None]:
    storage, name, config = place(*parse(list(flags), "launchers.ray_train"))
    return storage, name, config.run_dir


def test_flags_are_those_of_train_and_rays_own() -> None:
    options, config = parse(["--model=cnn", "--num-workers=3", "--max-failures", "0", "--mixed-precision"], "x")
    assert config == Config(model="cnn", mixed_precision="bf16")
    assert options.num_workers == Workers(3, 3)
    assert parse(["--num-workers=2:4"], "x")[0].num_workers == Workers(2, 4)
    assert options.max_failures == 0


def test_the_run_directory_is_storage_path_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert placed(f"--run-dir={tmp_path}/a/b") == (f"{tmp_path}/a", "b", f"{tmp_path}/a/b")
    assert placed("--run-dir=b") == (str(tmp_path), "b", f"{tmp_path}/b")
    assert placed("--storage-path=a", "--name=b") == (f"{tmp_path}/a", "b", f"{tmp_path}/a/b")
    storage, name, _ = placed("--dataset=fashion-mnist")
    assert storage == f"{tmp_path}/runs"
    assert re.fullmatch("fsdp_fashion_mnist_[0-9a-f]{8}", name)
    assert placed()[1] != placed()[1]


def test_a_url_is_storage_path_and_name() -> None:
    assert placed("--run-dir=s3://bucket/a/b/") == ("s3://bucket/a", "b", "s3://bucket/a/b")
    assert placed("--storage-path=s3://bucket/", "--name=b") == ("s3://bucket", "b", "s3://bucket/b")


def test_an_elastic_run_keeps_the_global_batch_of_its_most_workers() -> None:
    config = Config(batch_size=8, grad_accumulation=2)
    assert same_global_batch(Workers(1, 4), config).global_batch_size == 64
    assert same_global_batch(Workers(4, 4), config) == config
    assert same_global_batch(Workers(1, 4), Config(global_batch_size=10)).global_batch_size == 10


def test_ray_train_still_reads_the_settings_that_the_launcher_makes() -> None:
    """A name that Ray drops is set for nothing: after a loss a run waits a minute for a dead node's workers."""
    constants = pytest.importorskip("ray.train.v2._internal.constants")
    read = set(map(str, vars(constants).values()))
    # Ray itself reads this one, when it chooses which Train it is.
    names = {name for name in ray_train.ENVIRONMENT if name.startswith("RAY_TRAIN_")} - {"RAY_TRAIN_V2_ENABLED"}
    assert len(names) == 3
    assert names <= read


@pytest.mark.parametrize("address", [None, "auto"])
def test_a_cluster_that_is_there_has_chosen_its_authentication(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    """A program with a token and a cluster without one: Ray says that the controller died."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    ray_train.prepare(address)
    assert ("RAY_AUTH_MODE" in os.environ) == (address is None)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Ray isn't installed; .*pip install -e '\.\[ray\]'"):
        ray_train.prepare()


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--num-workers 0", "--num-workers 0: must be a whole number from 1 to 100000, or two as MIN:MAX"),
        ("--num-workers 2:", "--num-workers 2:: must be a whole number from 1 to 100000, or two as MIN:MAX"),
        ("--num-workers 3:2", "--num-workers 3:2: must be MIN:MAX with MIN no greater than MAX"),
        ("--resize-every 0", "--resize-every 0: must be above 0"),
        ("--resize-every 5", "--resize-every 5 with --num-workers 2: a fixed number is never resized"),
        ("--run-dir s3://bucket", "--run-dir s3://bucket: is a bucket; name a folder in it"),
        ("--name a/b", "--name a/b: is the name of one folder"),
        ("--use-gpu perhaps", "--use-gpu perhaps: must be one of auto, yes, no"),
        ("--max-failures -1", "--max-failures -1: must be 0 or more"),
        ("--run-dir r --name x", "--name x: --run-dir sets it already, as r; give one of them"),
        ("--run-dir r --storage-path s", "--storage-path s: --run-dir sets it already"),
        ("--modle vit", "--modle: no such flag; did you mean --model?"),
    ],
)
def test_bad_input_is_one_line(flags: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        placed(*flags.split())
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flags", ["--num-workers=1:2", "--name=a", "--storage-path=a", "--max-failures=3"])
def test_flags_of_a_run_are_refused_where_none_is_left(flags: str) -> None:
    with pytest.raises(ConfigError, match=flags.replace("=", " ")):
        without_a_run(parse([flags], "x")[0])
    assert without_a_run(parse(["--num-workers=3"], "x")[0]) == 3
