"""The command line of the Ray launcher, without Ray."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp2.config import Config
from fsdp2.options import ConfigError
from launchers.ray_options import parse, place


def placed(*flags: str) -> tuple[str, str, str | None]:
    storage, name, config = place(*parse(list(flags), "launchers.ray_train"))
    return storage, name, config.run_dir


def test_flags_are_those_of_train_and_rays_own() -> None:
    options, config = parse(["--model=cnn", "--num-workers=3", "--max-failures", "0", "--mixed-precision"], "x")
    assert config == Config(model="cnn", mixed_precision="bf16")
    assert options.num_workers == 3
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


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--num-workers 0", "--num-workers 0: must be 1 or more"),
        ("--num-workers 1:2", "--num-workers 1:2: must be a whole number"),
        ("--storage-path s3://bucket/a", "--storage-path s3://bucket/a: runs at a URL go through torchrun alone"),
        ("--use-gpu perhaps", "--use-gpu perhaps: must be one of auto, yes, no"),
        ("--max-failures -1", "--max-failures -1: must be 0 or more"),
        ("--run-dir r --name x", "--name x: --run-dir says it already, as r; give one of them"),
        ("--run-dir r --storage-path s", "--storage-path s: --run-dir says it already"),
        ("--modle vit", "--modle: no such flag; did you mean --model?"),
    ],
)
def test_bad_input_is_one_line(flags: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        placed(*flags.split())
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
