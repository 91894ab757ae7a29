"""Points of benchmarks/published.toml: what a point may say, how its source ran, and what the page makes of both."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp2.models import llama
from fsdp2.options.errors import ConfigError
from fsdp2_tools.plan import execute

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GIB = 2**30
POINT = {"source": "here", "gpu": "h100", "ranks": 2, "shape": "debug", "flags": "--batch-size=4", "tokens": 100}
PLAN = {
    "tokens": 110.0,
    "milliseconds": 10.0,
    "low": 9.0,
    "high": 12.0,
    "exposed_ms": 0.0,
    "idle_ms": 0.0,
    "allocated": 60 * GIB,
    "reserved": 75 * GIB,
    "beside": 1 * GIB,
    "kinds": {"activations": 50 * GIB, "gradients": 10 * GIB},
}
CARD = 80_000_000_000
FLAGS = (
    "--mixed-precision=bf16 --optimizer=adamw --seq-len=64 --batch-size=4 --dataset=random-tokens "
    "--activation-checkpointing=op"
)


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module


def row(benchmarks: Any, **point: Any) -> Any:
    rows = benchmarks("published_rows")
    return rows.Row({**POINT, **point}, rows.Planned(**PLAN), CARD)


def written(folder: Path, **changes: Any) -> Path:
    """A file of one point, in which a change to None leaves a key out."""
    point = {key: value for key, value in {**POINT, **changes}.items() if value is not None}
    file = folder / "points.toml"
    file.write_text("[[point]]\n" + "".join(f"{key} = {value!r}\n" for key, value in point.items()))
    return file


def test_the_files_own_points_are_read(benchmarks: Any) -> None:
    rows = benchmarks("published_rows")
    content = rows.read(BENCHMARKS / "published.toml")
    gpus = rows.tables(content["gpus"])
    assert all(point["gpu"] in gpus for point in content["point"])
    assert len([point for point in content["point"] if "gib" in point]) == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "sets no tokens"),
        ({"gigabytes": 3}, "gigabytes isn't one of"),
        ({"ways": ["magic"]}, "ways magic: choose from"),
        ({"gib": 3.0}, "give gib together with gib_is"),
        ({"gib_is": "reserved"}, "give gib together with gib_is"),
        ({"gib": 3.0, "gib_is": "guessed"}, "which is reserved or allocated"),
    ],
)
def test_a_wrong_point_is_refused(benchmarks: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"points.toml, point 1: .*{message}"):
        benchmarks("published_rows").read(written(tmp_path, **changes))


def test_memory_is_compared_with_what_the_source_measured(benchmarks: Any) -> None:
    reserved = row(benchmarks, gib=50.0, gib_is="reserved")
    allocated = row(benchmarks, gib=50.0, gib_is="allocated")
    assert (reserved.memory_error, allocated.memory_error) == (0.5, pytest.approx(0.2, abs=1e-12))  # 60 / 50 - 1
    assert row(benchmarks).memory_error is None
    page = benchmarks("published_page")
    assert page.memory(allocated) == "allocated 60.0 of 50.0 (+20.0%)"
    assert page.memory_errors([reserved, allocated]) == "2 points, median error 35.0%, mean +35.0%, worst +50.0%"


def test_points_above_their_card_are_listed_with_why(benchmarks: Any) -> None:
    page = benchmarks("published_page")
    some = [row(benchmarks)]
    found = page.above(some)
    assert "2.0% or more too high, since it ran: tensors activations 50.0, gradients 10.0" in found
    some[0].card = 2 * CARD
    assert page.above(some) == "None."


def test_points_that_are_missing_are_named(benchmarks: Any) -> None:
    page = benchmarks("published_page")
    assert page.left([row(benchmarks)], []) == []
    assert "**2 of 3 points weren't planned**" in page.left([row(benchmarks)], [POINT, POINT])[0]
    assert "debug (2)" in page.left([row(benchmarks)], [POINT, POINT])[0]


def test_kept_plans_are_not_executed_again(benchmarks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = benchmarks("published_rows")
    executed: list[str] = []

    def counted(point: Any, *_: Any) -> tuple[Any, Any]:
        executed.append(point["flags"])
        return None, None

    monkeypatch.setattr(rows, "executed", counted)
    monkeypatch.setattr(rows, "planned", lambda *_: rows.Planned(**PLAN))
    gpus, file = rows.tables({}), tmp_path / "rows" / "kept.jsonl"
    points = [POINT, {**POINT, "gpu": "h200"}, {**POINT, "flags": "--batch-size=5"}]
    assert list(rows.rows(points, {}, gpus, file, more=False)) == []
    assert len(list(rows.rows(points, {}, gpus, file))) == 3
    assert executed == ["--batch-size=4", "--batch-size=5"]  # once for two GPUs
    again = list(rows.rows([*points, {**POINT, "ways": ["fused loss"]}], {}, gpus, file))
    assert executed == ["--batch-size=4", "--batch-size=5", "--batch-size=4"]
    assert all(one.planned == rows.Planned(**PLAN) for one in again)


def test_the_command_with_nothing_kept_writes_no_page(tmp_path: Path) -> None:
    page, rows = tmp_path / "page.md", tmp_path / "rows.jsonl"
    command = [sys.executable, "benchmarks/plan_published.py", "--kept", f"--page={page}", f"--rows={rows}"]
    done = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True)
    assert (done.returncode, done.stdout, page.exists()) == (0, "", False), done.stderr


def test_each_way_changes_what_is_planned(benchmarks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A way replaces a function by its name: where that has moved, it would change nothing."""
    rows = benchmarks("published_rows")
    gpu = rows.tables({})["h100"]
    monkeypatch.setattr(
        execute, "execute", inspect.unwrap(execute.execute)
    )  # not the executions that this package's tests share
    wide = {"vocab_size": 2048, "dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 176}
    monkeypatch.setitem(llama.SIZES, "wide", wide)  # whose embedding is larger than a block

    def plan(*ways: str) -> Any:
        point = {**POINT, "shape": "wide", "flags": FLAGS, "ways": list(ways)}
        return rows.planned(point, *rows.executed(point, {}, tmp_path), gpu)

    usual = plan()
    ours = {way: plan(way) for way in rows.WAYS}
    assert [way for way, found in ours.items() if found == usual] == []
    assert ours["bf16 state"].kinds["optimizer"] * 2 == pytest.approx(usual.kinds["optimizer"], rel=0.01)  # and steps
    assert ours["fused loss"].allocated < ours["bf16 loss"].allocated < usual.allocated
    assert ours["keeps every second product"].milliseconds > usual.milliseconds
