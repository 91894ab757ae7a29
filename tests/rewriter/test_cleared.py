"""zero_grad() of a sharded model: groups are sharded again before it where one may be gathered, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewriter.check import load
from rewriter.rewrite import rewrite

HEAD = """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(model, other, optimizer, batches):
    model = FSDP(model, device_id=torch.device("cuda"))
    for batch in batches:
"""
FIRST = "model.zero_grad()\nloss = model(batch).sum()\nloss.backward()\noptimizer.step()\n"
BETWEEN = "loss = model(batch).sum()\nmodel.zero_grad(set_to_none=True)\nloss.backward()\noptimizer.step()\n"
LAST = "loss = model(batch).sum()\nloss.backward()\noptimizer.step()\nmodel.zero_grad()\n"
EVALUATED = FIRST + "with torch.inference_mode():\n    model(batch)\n"
OTHERS = "loss = model(batch).sum()\nother.zero_grad()\noptimizer.zero_grad()\nloss.backward()\n"


@pytest.mark.parametrize(
    ("body", "needed"), [(FIRST, 0), (BETWEEN, 1), (LAST, 0), (EVALUATED, 1), (OTHERS, 0), (BETWEEN + LAST, 1)]
)
def test_groups_are_sharded_again_where_one_may_be_gathered(tmp_path: Path, body: str, needed: int) -> None:
    path = tmp_path / "train.py"
    path.write_text(HEAD + "".join(f"        {line}\n" for line in body.splitlines()))
    result = rewrite(load([str(path)])[0])
    assert result.undecided == []
    made = result.files[0].data.decode()
    assert made.count("module.reshard()") == needed
    assert made.count("zero_grad(") == body.count("zero_grad(") + needed  # the comment names it
