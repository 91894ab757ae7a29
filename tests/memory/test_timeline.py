"""Timelines as files, and what is read from them."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdp2_extra.allocations import cuda_history
from fsdp2_extra.allocations.ledger import Allocation, Collective, Phase
from fsdp2_extra.allocations.profile import without_kernels
from fsdp2_extra.allocations.timeline import Timeline, dump, load
from fsdp2_tools.memory.__main__ import main as memory
from fsdp2_tools.memory.series import series

LINE = Timeline(
    {"rank": 0},
    [
        Allocation(100, 0.0, 0, "", "zeros.default", "parameters"),
        Allocation(50, 1.0, 1, "layers.0", "mm.default", "activations", died=3.0),
        Allocation(30, 2.0, 1, "layers.1", "mm.default", "activations", died=2.5),
        Allocation(20, 3.0, 2, "", "mm.default", "gradients", died=4.0),
    ],
    [Phase("start", 0, 0.0), Phase("forward", 1, 0.5), Phase("backward", 1, 2.75)],
    [Collective("all-gather", 100, 1)],
)


def test_a_file_gives_back_what_was_written() -> None:
    back = load(dump(LINE))
    assert (back.facts, back.allocations, back.phases, back.collectives) == (
        LINE.facts,
        LINE.allocations,
        LINE.phases,
        LINE.collectives,
    )
    assert dump(back) == dump(LINE)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no gzip",
        gzip.compress(b"no json"),
        gzip.compress(b"{}"),
        gzip.compress(b"[]"),
        dump(LINE)[:-9],
        dump(LINE)[:12] + b"\xff" + dump(LINE)[13:],
        dump(LINE) + b"more",
        gzip.compress(b"[" * 100_000),
        gzip.compress(bytes(1 << 24)),
        dump(replace(LINE, facts={"rank": "../../elsewhere"})),
        dump(replace(LINE, phases=[])),
        dump(replace(LINE, phases=[Phase("start", 0, float("nan"))])),
        dump(replace(LINE, collectives=[Collective("all-gather", "many", 1)])),  # type: ignore[arg-type]
        gzip.compress(json.dumps({"version": 99}).encode()),
    ],
)
def test_what_is_no_timeline_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"is not a timeline|is version 99"):
        load(data)


def test_the_peak_and_what_was_alive_at_it() -> None:
    assert LINE.peak() == (2.0, 180)
    assert LINE.by_kind(2.0) == {"parameters": 100, "activations": 80}
    assert [a.bytes for a in LINE.alive(2.0)] == [100, 50, 30]
    assert LINE.phase_at(2.0).name == "forward"
    assert LINE.by_kind(3.0) == {"parameters": 100, "gradients": 20}


def test_few_points_keep_the_peak() -> None:
    random.seed(1)
    allocations = []
    for _ in range(5000):
        born = random.random()
        allocations.append(
            Allocation(random.randrange(1, 1000), born, 0, "", "", "temporary", died=born + random.random() / 50)
        )
    line = Timeline({"rank": 0}, allocations, [Phase("start", 0, 0.0)], [])
    few = series(line, points=100)
    assert len(few.times) <= 100
    assert few.times == sorted(few.times)
    totals = [sum(values) for values in zip(*few.bytes.values(), strict=True)]
    assert max(totals) == line.peak()[1]
    assert totals[-1] == 0


def test_a_part_of_it_begins_with_what_was_there() -> None:
    whole, part = series(LINE), series(LINE, within=(1.5, 2.5))
    assert part.times
    assert all(1.5 <= when <= 2.5 for when in part.times)
    for when, parameters in zip(part.times, part.bytes["parameters"], strict=True):
        index = max(i for i, time in enumerate(whole.times) if time <= when)
        assert parameters == whole.bytes["parameters"][index] == 100
    assert dict(zip(part.times, part.bytes["activations"], strict=True))[2.0] == 80


def test_all_points_where_there_are_few() -> None:
    curves = series(LINE)
    assert dict(zip(curves.times, curves.bytes["activations"], strict=True))[2.0] == 80
    assert set(curves.bytes) == {"parameters", "activations", "gradients"}


def test_a_trace_of_a_gpu_without_kernels_is_reported() -> None:
    """CUPTI without rights leaves the CPU's events, and torch says nothing that a reader would take for the cause."""
    operator, kernel = ({"name": name, "cat": cat} for name, cat in (("aten::mm", "cpu_op"), ("gemm", "kernel")))
    gpu = torch.device("cuda", 0)
    assert "CUPTI" in str(without_kernels({"traceEvents": [operator]}, gpu))
    assert without_kernels({"traceEvents": [operator, kernel]}, gpu) is None
    assert without_kernels({"traceEvents": [operator]}, torch.device("cpu")) is None


def test_the_allocators_history_has_pythons_stacks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = {}
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: begun.update(options))
    cuda_history.start()
    assert begun["stacks"] == "python"


def test_a_page_shows_a_name_that_no_encoding_has(tmp_path: Path) -> None:
    line = replace(LINE, allocations=[replace(LINE.allocations[0], module="half \ud800 of a pair")])
    (tmp_path / "rank0_memory_timeline.json.gz").write_bytes(dump(line))
    (page,) = memory([str(tmp_path)])
    assert "half " in page.read_text()
