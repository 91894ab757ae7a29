"""A run's folder that somebody else made: nothing is written through a link, waited for, or taken for a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.refusal import LONGEST_REFUSAL
from fsdp2.checkpoint.store import Store
from fsdp2.config import Config
from fsdp2.options.errors import ConfigError
from fsdp2.report import PLAN, planned
from fsdp2.run.preflight import preflight
from fsdp2.run.process.runtime import World
from fsdp2.train import main as train
from fsdp2_extra.allocations.timeline import dump
from fsdp2_tools import results
from fsdp2_tools.checkpoint.__main__ import main
from fsdp2_tools.memory.__main__ import main as memory
from tests.fuzz.runs import limits
from tests.hostile.common import checkpoint_of, vouch
from tests.memory.test_timeline import LINE

pytestmark = pytest.mark.usefixtures("soon")

NAMES = ["rank0_memory_timeline.json.gz", "rank1_trace.json.gz", "hang.txt", "plan.json", "memory.json"]
NAMES += ["model/config.json", "model/adapter_config.json", "tokenizer/tokenizer.json", "full_model/model.safetensors"]
NAMES += ["config.json", "config.json.tmp", "metrics.jsonl", "metrics.jsonl.tmp", "full_model/COMMIT.json", ".lock"]
NAMES += ["full_model/full-model.pt", "full_model/full-model.pt.tmp", "full_model/full-optimizer.pt"]
KINDS: dict[str, Callable[[Path], Any]] = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link": lambda path: path.symlink_to(path.parents[path.parent.name != "run"].parent / "theirs"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_of_the_run_is_neither_written_nor_waited_for(run: Path, name: str, kind: str) -> None:
    theirs = run.parent / "theirs"
    theirs.write_text("theirs")
    (run / name).unlink(missing_ok=True)
    (run / name).parent.mkdir(exist_ok=True)
    KINDS[kind](run / name)
    with pytest.raises(ConfigError, match=r"isn't a plain file|can't be written") as caught:
        preflight(Config(run_dir=str(run), model_size="tiny", max_steps=2), World(0, 2, 0, 2))
    assert str(run) in str(caught.value)
    assert theirs.read_text() == "theirs"


@pytest.mark.parametrize("name", ["model", "tokenizer", "full_model"])
def test_a_folder_of_the_run_that_is_a_link_is_not_followed(run: Path, name: str) -> None:
    theirs = run.parent / "theirs"
    theirs.mkdir()
    shutil.rmtree(run / name, ignore_errors=True)
    (run / name).symlink_to(theirs)
    with pytest.raises(ConfigError, match=rf"{name} isn't a folder of its own, but a link; move it away"):
        preflight(Config(run_dir=str(run), model_size="tiny", max_steps=2), World(0, 2, 0, 2))


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "model/config.json", "tokenizer/x", "full_model/x"])
def test_what_no_run_has_written_is_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"model_type": "llama"}')
    ours = f"{name.split('/')[0]}/" if "/" in name else name
    with pytest.raises(ConfigError, match=f"{ours} there is no run's, or damaged, and a run would replace it"):
        train(Config(run_dir=str(tmp_path), model_size="tiny", max_steps=1))
    assert (tmp_path / name).read_text() == '{"model_type": "llama"}'


def test_a_folder_that_a_user_has_beside_a_run_is_left_alone(run: Path) -> None:
    (run / "tokenizer").mkdir()
    (run / "tokenizer" / "tokenizer.json").write_text("theirs")
    train(Config(run_dir=str(run), model_size="tiny", max_steps=4))
    assert (run / "tokenizer" / "tokenizer.json").read_text() == "theirs"


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_file_is_written_into_a_file_alone(tmp_path: Path, kind: str) -> None:
    theirs, place = tmp_path / "theirs", tmp_path / "run" / "name"
    theirs.write_text("theirs")
    place.parent.mkdir()
    KINDS[kind](place)
    with pytest.raises(OSError, match=r"name'"):
        LocalFiles(place.parent).write("name", b"ours")
    assert theirs.read_text() == "theirs"


@pytest.mark.parametrize("name", ["step-000000001", "step-٠٠٠٠٠٠٠١", "superseded-١-step-00000001", "step-0000000¹"])
def test_a_name_that_no_save_gives_is_no_checkpoint(run: Path, name: str) -> None:
    store = Store(LocalFiles(run / "checkpoints"))
    checkpoint_of(run).root.rename(run / "checkpoints" / name)
    assert store.committed() == []
    assert store.remove_dead() == []
    assert store.set_aside(-1) == []
    assert main(["list", str(run)]) == 2
    assert [path.name for path in (run / "checkpoints").iterdir()] == [name]


def test_a_timeline_that_is_none_is_refused(run: Path) -> None:
    os.mkfifo(run / "rank0_memory_timeline.json.gz")
    with pytest.raises(ConfigError, match="is a pipe and no file"):
        memory([str(run)])


PLANS: dict[str, dict[str, Any]] = {
    "nothing": {"tensors": 0},
    "less": {"tensors": -1},
    "text": {"tensors": "7"},
    "more than there is": {"tensors": 1 << 70},
    "no time": {"time": {"low": 0, "milliseconds": 0, "high": 0}},
    "a time that is text": {"time": {"low": 1.0, "milliseconds": "nan", "high": "inf"}},
}


@pytest.mark.parametrize("kind", PLANS)
def test_a_plan_that_is_none_stops_no_run(tmp_path: Path, kind: str) -> None:
    """What it says is divided by at the run's end, and printed."""
    whole = {"ranks": 2, "tensors": 7, "time": None, "peak": {"phase": "\x1b[31m" + "x" * 1000}}
    config = Config(run_dir=str(tmp_path), model_size="tiny")
    for plan in (whole, {**whole, **PLANS[kind]}, {**whole, "ranks": "\x1b[31m" + "3" * 1000}):
        (tmp_path / PLAN).write_text(json.dumps({"flags": {}, "plans": [plan]}))
        found = planned.read(config, 2)
        lines = [found] if isinstance(found, str) else [found.line, *found.beside(7, [1.0])] if found else []
        assert lines
        assert isinstance(found, str) == (plan is not whole)
        assert all(line.isprintable() and len(line.partition(" (planned with")[0]) < 200 for line in lines)


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_replaces_a_link_and_not_what_it_leads_to(kind: str, tmp_path: Path) -> None:
    """Results go into folders that a stranger may have prepared, and are found unwritable before anything is done."""
    (tmp_path / "theirs").write_text("theirs")
    place = tmp_path / "run" / "page.html"
    place.parent.mkdir()
    KINDS[kind](place)
    if kind == "a folder":
        with pytest.raises(
            ConfigError, match=r"--out .*page\.html: can't be written \(Is a directory\); choose a folder"
        ):
            results.write(place, "ours")
    else:
        results.write(place, "ours")
        assert place.read_text() == "ours"
    assert (tmp_path / "theirs").read_text() == "theirs"
    with pytest.raises(ConfigError, match=r"--out .*theirs: can't be written \(File exists\); choose a folder"):
        results.folder(tmp_path / "theirs")


def test_results_of_two_that_begin_in_one_second_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp2_tools.results.time.strftime", lambda form: "20261129-060000")
    first, second = (results.folder(None, below=str(tmp_path / "tuned")) for _ in range(2))
    assert [first.name, second.name] == ["20261129-060000", "20261129-060000-2"]
    assert results.folder(first) == results.folder(str(first)) == first
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="can't be written"):
        results.folder(None, below=str(tmp_path / "nowhere"))


def test_a_page_of_memory_goes_behind_no_link(run: Path) -> None:
    theirs, page = run.parent / "theirs", run / "rank0_memory_timeline.html"
    theirs.write_text("theirs")
    page.symlink_to(theirs)
    (run / "rank0_memory_timeline.json.gz").write_bytes(dump(LINE))
    memory([str(run)])
    assert theirs.read_text() == "theirs"
    assert not page.is_symlink()


def test_a_file_larger_than_the_memory_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (checkpoint_of(run).root / ".metadata", run / "rank0_memory_timeline.json.gz"):
        path.touch()
        os.truncate(path, 1 << 32)
    with limits():
        assert main(["show", str(run)]) == 2
        with pytest.raises(ConfigError, match="is larger than the memory that is free"):
            memory([str(run)])
    assert ".metadata is larger than the memory that is free" in capsys.readouterr().err
    weights = run / "weights.pt"
    weights.touch()
    os.truncate(weights, 1 << 42)
    assert main(["show", str(weights)]) == 2
    assert f"{weights} can't be mapped into memory (" in capsys.readouterr().err


def test_what_verify_says_of_damage_has_a_bound(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = checkpoint_of(run).root / "__0_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    vouch(checkpoint_of(run))
    assert main(["verify", str(run)]) == 1
    assert len(capsys.readouterr().err) < LONGEST_REFUSAL + 50
