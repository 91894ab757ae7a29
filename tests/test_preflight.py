"""What is refused before any process group: what this machine, its ranks or its files can't do."""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2.config import Config
from fsdp2.options.errors import ConfigError
from fsdp2.run.preflight import preflight
from fsdp2.run.process import ending, runtime
from fsdp2.run.process.compilers import check_compiler
from fsdp2.run.process.runtime import World

TWO = World(rank=0, world_size=2, local_rank=0, local_world_size=2)
FOUR = World(rank=0, world_size=4, local_rank=0, local_world_size=4)


def _refused(config: Config, world: World = TWO) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight(config, world)
    assert "\n" not in str(caught.value)
    return str(caught.value)


MACHINE: list[tuple[dict[str, Any], World, list[str]]] = [
    ({"replicas": 3}, FOUR, ["--replicas 3", "world size 4", "1, 2, 4"]),
    ({"reshard_after_forward": 3}, FOUR, ["--reshard-after-forward 3", "2 or true"]),
    ({"reshard_after_forward": 2}, TWO, ["--reshard-after-forward 2", "use true"]),
    ({"reshard_after_forward": 2, "replicas": 2}, FOUR, ["--reshard-after-forward 2", "the 2 ranks"]),
    ({"strategy": "none"}, TWO, ["--strategy none with 2 ranks", "--strategy ddp or fsdp2"]),
    ({"global_batch_size": 3, "grad_accumulation": 2}, TWO, ["--global-batch-size 3", "use 4 or more"]),
    ({"freeze": ("nothing.*",)}, TWO, ["--freeze nothing.*", "no parameter"]),
    ({"freeze": ("*",)}, TWO, ["--freeze *", "nothing to train"]),
    ({"dataset": "mnist", "data_root": "/nowhere"}, TWO, ["--data-root /nowhere", "train-images-idx3-ubyte"]),
    ({"run_dir": "memory://run"}, TWO, ["--run-dir memory://run with 2 ranks", "inside one process"]),
    ({"run_dir": "nowhere://run"}, TWO, ["--run-dir nowhere://run", "use a folder, s3:// or gs://"]),
]


@pytest.mark.parametrize(("flags", "world", "parts"), MACHINE, ids=[str(flags) for flags, _, _ in MACHINE])
def test_what_this_machine_cannot_do_is_refused(
    flags: dict[str, Any], world: World, parts: list[str], tmp_path: Path
) -> None:
    message = _refused(Config(**{"run_dir": str(tmp_path / "run"), **flags}), world)
    for part in parts:
        assert part in message
    assert not (tmp_path / "run").exists(), "a refused run leaves nothing behind"


def test_reshard_fits_where_it_divides(tmp_path: Path) -> None:
    with preflight(Config(run_dir=str(tmp_path / "run"), reshard_after_forward=2), FOUR).hold:
        pass


def test_a_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = _refused(Config(run_dir=str(tmp_path / "file" / "run")))
    assert "can't be written" in message
    assert "--run-dir" in message


def test_a_run_directory_in_use(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path / "run"))
    with preflight(config, TWO).hold:
        assert "in use by a run" in _refused(config)
    with preflight(config, TWO).hold:
        pass  # free again


def test_gpu_wanted_and_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"--device cuda: torch sees no GPU"):
        runtime.pick_device("cuda", TWO)
    assert runtime.pick_device("auto", TWO) == torch.device("cpu")


def test_fewer_gpus_than_ranks_is_not_silently_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 ranks and 1 GPU"):
        runtime.pick_device("auto", TWO)
    assert runtime.pick_device("auto", World(1, 2, 0, 1)) == torch.device("cuda", 0)


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    assert "torch 2.10.1+cpu is installed and 2.11 is the oldest" in _refused(Config(run_dir=str(tmp_path / "run")))
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    one_group = Config(run_dir=str(tmp_path / "run"), model="llama", tp=2, shard_granularity="root")
    assert "root: fails before torch 2.13; install that" in _refused(one_group)


def test_missing_tensorboard_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install -e '.[tensorboard]'" in _refused(Config(run_dir=str(tmp_path / "run"), tensorboard=True))


@pytest.mark.parametrize("gpu", [False, True])
def test_missing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: bool) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there")
    refused = {"auto": "--compile: torch needs a C++ compiler", "cpu": "--compile: torch needs a C++ compiler"}
    if gpu:
        refused["auto"] = "--compile: triton needs a C compiler on a GPU, too; install gcc or set CC"
    for device, message in refused.items():
        assert message in _refused(Config(run_dir=str(tmp_path / "run"), compile=True, device=device))


def test_a_compiler_for_gpus_needs_triton_and_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for program in ("gcc", "c++-of-mine"):
        (tmp_path / program).write_text("")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CXX", "c++-of-mine -O1")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="triton, which isn't installed; install it, or drop --compile"):
        check_compiler("cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there")
    with pytest.raises(ConfigError, match=r"has no Python\.h; install them .*, or drop --compile"):
        check_compiler("cuda")
    (tmp_path / "Python.h").write_text("")
    check_compiler("cuda")
    monkeypatch.setenv("CC", "absent")
    with pytest.raises(ConfigError, match="install gcc or set CC, or drop --compile"):
        check_compiler("cuda")
    check_compiler("cpu")
    monkeypatch.setenv("CXX", "absent")
    with pytest.raises(ConfigError, match=r"install g\+\+ or set CXX, or drop --compile"):
        check_compiler("cpu")


@pytest.mark.parametrize("value", ["missing.pt", "text.pt"])
def test_init_from_what_is_no_model(tmp_path: Path, value: str) -> None:
    (tmp_path / "text.pt").write_text("not a model")
    message = _refused(Config(run_dir=str(tmp_path / "run"), init_from=str(tmp_path / value)))
    assert "--init-from" in message
    assert "can't be loaded" in message


def test_init_from_another_model_names_what_differs(tmp_path: Path) -> None:
    torch.save({"conv1.weight": torch.zeros(1)}, tmp_path / "cnn.pt")
    message = _refused(Config(run_dir=str(tmp_path / "run"), init_from=str(tmp_path / "cnn.pt")))
    assert "is of another model" in message
    assert "class_token: only in the model" in message


@pytest.mark.parametrize("resume", ["7", "elsewhere"])
def test_resume_from_where_nothing_is_committed(tmp_path: Path, resume: str) -> None:
    target = resume if resume.isdigit() else str(tmp_path / resume)
    message = _refused(Config(run_dir=str(tmp_path / "run"), resume=target))
    assert "--resume" in message
    assert "committed checkpoint" in message
    assert not (tmp_path / "run").exists()


def test_exit_status_is_two_and_only_rank_zero_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        with ending.exit_status():
            raise ConfigError("--lr 0: must be above 0")

    check: Callable[[], str] = lambda: capsys.readouterr().err  # noqa: E731
    with pytest.raises(SystemExit) as caught:
        refuse()
    assert (caught.value.code, check()) == (2, "fsdp2: error: --lr 0: must be above 0\n")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(ending, "_ended_by_launcher", lambda: True)
    with pytest.raises(SystemExit) as caught:
        refuse()
    assert (caught.value.code, check()) == (2, "")
    # Rank 0 had no such error, for example because its node has the data: then this rank must speak.
    monkeypatch.setattr(ending, "_ended_by_launcher", lambda: False)
    with pytest.raises(SystemExit) as caught:
        refuse()
    assert (caught.value.code, check()) == (2, "fsdp2: error: --lr 0: must be above 0\n")
