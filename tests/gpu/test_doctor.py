"""The doctor on GPUs: its rows about them, and a collective of nccl that hangs and yet keeps no rank from reporting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.doctor.launch import start
from tests.gpu.harness import DEVICE, ON_GPU, launched, needs, small


def test_one_gpu_is_examined(tmp_path: Path) -> None:
    program = launched("fsdp2.doctor", "--quick", "--json", f"--device={DEVICE}", f"--run-dir={tmp_path}")
    output, _ = program.communicate(timeout=200)
    report = json.loads(output[output.index("{\n") : output.rindex("}") + 1])
    names = {row["name"] for row in report["rows"]}
    assert {"matrix product", "copy"} <= names, output
    assert not [name for name in names if name.startswith("answer: ")], output
    if ON_GPU:
        assert {"GPU memory in use", "GPU throttled", "GPU memory errors", "GPU PCIe lanes", "GPU clock"} <= names


@pytest.mark.parametrize("flags", [["--quick"], ["--doctor"]], ids=["doctor", "training"])
@pytest.mark.parametrize(
    ("fault", "who"),
    [
        ("late", "rank 1 ("),  # the other one connects, and waits
        ("frozen all_gather_into_tensor", "ranks 0, 1 ("),  # its kernel waits, after an all-reduce that went well
    ],
)
def test_a_rank_that_stops_in_a_collective_is_a_row_and_every_process_ends(
    tmp_path: Path, fault: str, who: str, flags: list[str]
) -> None:
    needs(2)
    ranks = start([*small(tmp_path / "run"), *flags], ranks=2, cwd=tmp_path, fault=fault, at=1)
    try:
        text, _ = ranks[0].communicate(timeout=200)
        assert [one.wait(60) for one in ranks] == [2, 2], text
        lines = [line.removeprefix("doctor: ") for line in text.splitlines()]
        (at,) = (number for number, line in enumerate(lines) if line.startswith("bad"))
        assert lines[at].split()[1] == "collectives"
        assert ("tried on GPUs" in lines[at]) == (ON_GPU and fault != "late")
        assert who in lines[at + 1]
    finally:
        for one in ranks:
            one.kill()
