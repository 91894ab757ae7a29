"""A state dict that some ranks make alone is marked, whatever the program calls its rank."""

from __future__ import annotations

from pathlib import Path

import libcst as cst
import pytest

from rewriter.check import account, load
from rewriter.program import Program

PROGRAM = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType
from elsewhere import is_main_process


def work(number, steps):
    model = FSDP(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    chief = dist.get_rank() == 0
    one = int(os.environ["RANK"])
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        if CONDITION:
            torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    mp.spawn(work, nprocs=2, args=(3,))
"""


@pytest.mark.parametrize(
    ("condition", "marked"),
    [
        ("dist.get_rank() == 0", True),
        ("chief", True),
        ("not one", True),
        ("steps > 2 and os.environ.get('LOCAL_RANK') == '0'", True),
        ("number == 0", True),  # the first parameter of what is spawned
        ("is_main_process()", True),  # of a file that wasn't given
        ("steps > 2", False),
        ("torch.cuda.is_available()", False),
        ("os.path.exists('there')", False),
    ],
)
def test_a_state_dict_under_a_condition(tmp_path: Path, condition: str, marked: bool) -> None:
    file = tmp_path / "train.py"
    file.write_text(PROGRAM.replace("CONDITION", condition))
    findings = account(load([str(file)])[0])
    assert [finding.line for finding in findings if finding.code == "FC12"] == ([16] if marked else [])


def test_an_answer_that_lacked_another_is_not_kept(tmp_path: Path) -> None:
    """Two questions that ask each other: who is asked in between has only half of the answer."""
    program = Program([])
    one, two = cst.Name("one"), cst.Name("two")

    def of_one() -> set[str]:
        return {"one"} | program.answer("?", two, of_two, set())

    def of_two() -> set[str]:
        return {"two"} | program.answer("?", one, of_one, set())

    assert program.answer("?", one, of_one, set()) == {"one", "two"}
    assert program.answer("?", two, of_two, set()) == {"one", "two"}
