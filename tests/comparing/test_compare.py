"""The comparison: what it measures on real ranks, what it makes of the numbers, and what it refuses."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path

import pytest

from fsdp2.options.errors import ConfigError
from fsdp2.report import records
from fsdp2_tools.compare import __main__ as compare
from fsdp2_tools.compare import measure, report
from fsdp2_tools.compare.advice import advice, efficient
from fsdp2_tools.compare.measure import Measured, reason
from fsdp2_tools.compare.picture import page, write_image, write_memory_image
from fsdp2_tools.compare.variants import VARIANTS, rows
from fsdp2_tools.memory.series import Series
from tests.harness import SMALL, Launches, Ranks, main_in_ranks
from tests.memory.test_runs import CHROMIUM, in_browser


def measured(name: str, ms: float, peak: int, losses: tuple[float, ...] = (2.0, 1.0)) -> Measured:
    return Measured(
        name,
        2,
        losses=list(losses),
        step_ms=[ms - 1, ms, ms + 1],
        samples=64,
        peak_bytes=peak,
        by_kind={"parameters": peak // 2, "activations": peak - peak // 2},
        exchanges={"all-gather": (3, 100)},
        checkpoint_bytes=1000,
        save_seconds=[0.1, 0.2],
        load_seconds=0.3,
    )


SLOW_SMALL, FAST_LARGE, BEATEN = measured("a", 100, 1000), measured("b", 50, 4000), measured("c", 120, 2000)
FAILED = Measured("d", 2, failed="--cpu-offload with --strategy ddp: no")
FOUND = [SLOW_SMALL, FAST_LARGE, BEATEN, FAILED]


def test_a_row_is_efficient_if_no_other_is_both_as_fast_and_as_small() -> None:
    assert efficient(FOUND) == [SLOW_SMALL, FAST_LARGE]
    assert efficient([SLOW_SMALL, measured("twin", 100, 1000)]) != []


def test_advice_changes_with_the_numbers() -> None:
    assert advice(FOUND, 5000) == [
        "Fits in 1.0 kB a rank with a, the least of 3.",
        "Fastest that fits in 5.0 kB is b: 50 ms a step, 2.00 times as fast as a with 4.00 times its memory.",
    ]
    assert advice(FOUND, 3000)[1] == ("Fastest that fits in 3.0 kB is a: 100 ms a step.")
    assert advice(FOUND, 500)[0] == "Nothing fits in 500 B a rank: a takes the least, 1.0 kB."
    assert advice([FAILED], 500) == ["No row could be measured; the reasons are in the table."]
    close = advice([SLOW_SMALL, measured("e", 101, 900)], 5000)[1]
    assert close.endswith("Within the noise of this machine: e.")


def test_losses_are_compared_step_by_step() -> None:
    other = measured("x", 1, 1, (2.0, 1.0 + 2**-52))
    assert report.equality(SLOW_SMALL, SLOW_SMALL) == "reference"
    assert report.equality(FAST_LARGE, SLOW_SMALL) == "equal"
    assert report.equality(other, SLOW_SMALL) == "from step 2, 2.2e-16"
    diverged, worse = (measured("x", 1, 1, (2.0, last, math.nan)) for last in (1.0, 1.5))
    assert report.equality(diverged, measured("y", 1, 1, (2.0, 1.0, math.nan))) == "equal"
    assert report.equality(worse, diverged) == "from step 2, 5.0e-01"


def test_all_forms_of_the_result(tmp_path: Path) -> None:
    compare.write(FOUND, {"machine": "a|b"}, ["advice"], tmp_path)
    table = (tmp_path / "compare.md").read_text()
    assert "| a * | 2 | 1.000000 | reference | 100.0 (99.0–101.0) | 640 | 1.0 kB | 1.0 kB | 0.15 | 0.30 |" in table
    assert "| d | failed: --cpu-offload with --strategy ddp: no |" in table
    with open(tmp_path / "compare.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["variant"] for line in lines] == ["a", "b", "c", "d"]
    assert lines[0]["step_ms_median"] == "100"
    assert lines[0]["activations bytes"] == "500"
    assert lines[3]["failed"] == FAILED.failed
    content = json.loads((tmp_path / "compare.json").read_text())
    assert content["efficient"] == ["a", "b"]
    assert content["rows"][0]["step_ms"] == [99, 100, 101]
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert report.terminal(report.HEADINGS, report.cells(FOUND)).splitlines()[0].startswith("variant")


def test_losses_that_are_no_numbers_cost_no_result(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        "".join(json.dumps({"kind": "train", "step": n, "loss": loss}) + "\n" for n, loss in ((1, 2.0), (2, None)))
    )
    diverged = measured("a", 1, 1, tuple(record["loss"] for record in records.read(file)))
    compare.write([diverged, SLOW_SMALL], {}, [], tmp_path)
    assert "| a * | 2 | nan | reference |" in (tmp_path / "compare.md").read_text()
    text = (tmp_path / "compare.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["rows"][0]["losses"] == [2.0, None]


def test_a_page_of_failures_alone_can_be_made(tmp_path: Path) -> None:
    compare.write([FAILED], {}, advice([FAILED], 1), tmp_path)
    assert "failed: --cpu-offload" in (tmp_path / "compare.html").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, to open the page in")
def test_the_page_opens_in_a_browser_without_a_network(tmp_path: Path) -> None:
    opened = in_browser(page(FOUND, {}, ["advice"]), tmp_path)
    assert opened.count('class="main-svg"') >= 2
    assert "parameters" in opened


def test_the_names_of_the_outermost_points_go_inwards() -> None:
    sides = re.findall(r'"textposition":(\[.*?\])', page(FOUND, {}, []))
    wide = [side for one in sides for side in json.loads(one)]
    assert sorted(set(wide)) == ["top left", "top right"]


def test_the_image_holds_any_number_of_rows(tmp_path: Path) -> None:
    found = [measured(str(i), 10 + i, 100 * i + 1) for i in range(30)]
    for row in found:
        row.over_time = Series([0.0, 1.0, 2.0], {"activations": [0, 10, 0], "parameters": [5, 5, 5]})
    for write in (write_image, write_memory_image):
        write(found, tmp_path / "a.png")
        assert (tmp_path / "a.png").stat().st_size > 10_000


def test_meshes_have_the_same_global_batch() -> None:
    llama = {"model": "llama", "model_size": "debug", "dataset": "random-tokens", "seq_len": 16}
    for more in (
        {"batch_size": 8},
        {"batch_size": 2, "grad_accumulation": 4},
        {"batch_size": 8, "global_batch_size": 32},
    ):
        table = rows(["fsdp2", "ddp"], ["default", "hsdp", "tp", "sp"], {**llama, **more}, 4)
        assert [row.name for row in table if row.refused] == ["ddp hsdp", "ddp tp", "ddp sp"]
        assert {row.config.global_batch(4) for row in table if row.config} == {32}
        assert len({row.config.accumulation(4) for row in table if row.config}) == 1
    (alone,) = rows(["none"], ["default"], {"batch_size": 8, "global_batch_size": 24}, 2)
    assert alone.config is not None
    assert alone.config.accumulation(1) == 4  # microbatches of six, as two ranks have two each


def test_rows_are_each_strategy_with_each_variant() -> None:
    table = rows(["ddp", "fsdp2", "none"], ["default", "offload"], {"batch_size": 8}, 2)
    assert [(row.name, row.ranks) for row in table] == [
        ("ddp", 2),
        ("ddp offload", 2),
        ("fsdp2", 2),
        ("fsdp2 offload", 2),
        ("none", 1),
        ("none offload", 1),
    ]
    assert table[1].config is None
    assert (table[1].refused or "").startswith("--cpu-offload with --strategy ddp")
    assert table[4].config is not None
    assert table[4].config.grad_accumulation == 2
    assert set(VARIANTS) >= {"default", "no-reshard", "reshard", "offload", "fp16", "bf16", "all"}


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--strategies zero9", "--strategies zero9: must be one of fsdp2"),
        ("--variants fast", "--variants fast: must be one of default"),
        ("--strategy ddp", "--strategy: a comparison decides this itself; drop it, or use --strategies"),
        ("--max-steps 3", "--max-steps: a comparison decides this itself; drop it, or use --steps"),
        ("--nproc 0", "--nproc 0: must be 1 or more"),
        ("--steps 1", "--steps 1: must be 2 or more"),
        ("--budget lots", "--budget lots: must be a number of bytes"),
        ("--model-size huge", "--model-size huge"),
        ("--no-such", "--no-such: no such flag"),
    ],
)
def test_bad_input_is_refused_before_anything_is_started(tmp_path: Path, flags: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compare.main([f"--out={tmp_path / 'out'}", *flags.split()])
    assert part in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_reason_of_a_failure_is_its_first_error() -> None:
    assert reason("noise\nfsdp2: error: --x: no\nTraceback\n") == "--x: no"
    assert reason("W0101 warning\nTraceback\n  File\nValueError: bad\nmore: noise\n") == "ValueError: bad"
    assert reason("torch.OutOfMemoryError: CUDA\n") == "torch.OutOfMemoryError: CUDA"
    assert reason("") == "it ended without a word"


def test_a_comparison_on_two_ranks(
    ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(ranks, main_in_ranks)
    monkeypatch.setattr(measure, "run", launches.run)
    own = ["--strategies=ddp,fsdp2", "--variants=default,offload", "--steps=4", "--repeats=1", f"--out={tmp_path}"]
    ddp, refused, fsdp2, offload = compare.main([*SMALL, *own, "--memory-limit=1GB"])
    assert len(launches.commands) == 6  # three rows are timed, and recorded
    assert (refused.name, bool(refused.failed)) == ("ddp offload", True)
    assert ddp.losses == fsdp2.losses == offload.losses
    assert len(ddp.step_ms) == 2
    assert ddp.samples == 32
    assert set(ddp.exchanges) == {"all-reduce"}
    assert fsdp2.exchanges["all-gather"][0] == 4  # in forward the root and two blocks, in backward the first block
    assert fsdp2.by_kind["optimizer"] < 0.6 * ddp.by_kind["optimizer"]
    assert sum(fsdp2.by_kind.values()) == fsdp2.peak_bytes
    assert fsdp2.checkpoint_bytes > 200_000
    assert fsdp2.load_seconds
    printed = capfd.readouterr().out
    assert "repeat 1 of 1: ddp" in printed
    assert "Fastest that fits in" in printed
    assert (tmp_path / "compare.png").is_file()
    # Memory over two whole steps: activations come and go, and what is held stays.
    assert fsdp2.over_time is not None
    curves = fsdp2.over_time.bytes
    held = curves["optimizer"][0]
    assert curves["optimizer"].count(held) == len(fsdp2.over_time.times)
    rises = [a == 0 < b for a, b in zip(curves["activations"], curves["activations"][1:], strict=False)]
    assert sum(rises) >= 2
    assert (tmp_path / "memory.png").stat().st_size > 10_000
