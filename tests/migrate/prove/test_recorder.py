"""What is recorded of a program, and that recording it changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Ranks
from tests.migrate.prove.in_pool import InPool

PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, *, inputs, mask):
        return checkpoint(self.last, self.first(inputs) * mask, use_reentrant=False)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
batches = iter(DataLoader(TensorDataset(torch.arange(24.0).reshape(4, 6)), batch_size=2))
drawn = torch.rand(1).item()
for (inputs,) in batches:
    model(inputs=inputs, mask=torch.ones(2, 1)).square().mean().backward()
    nn.utils.clip_grad_norm_(parameters=(parameter for parameter in model.parameters()), max_norm=0.1)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(inputs=inputs, mask=torch.ones(2, 1))
open(FILE, "a").write(repr([drawn, model.last.weight.tolist()]) + "\\n")
"""


def without(script: str) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(script.replace("dist.init_process_group", "str"), namespace)


def test_a_program_runs_as_without_it(ranks: Ranks, tmp_path: Path) -> None:
    script, written = tmp_path / "program.py", tmp_path / "written"
    text = PROGRAM.replace("FILE", repr(str(written)))
    script.write_text(text)
    record = InPool(script, [], 1, 60, pool=ranks).record(tmp_path / "record", steps=10)
    ranks.run(without, text, ranks=1)
    first, second = written.read_text().splitlines()
    assert first == second

    assert record.steps == 2
    assert record.sources == ["model", "loader", "index"]
    for step in (1, 2):  # by name, and neither in recomputation nor in evaluation
        assert len(record.samples("model", step)) == len(record.samples("loader", step)) == 2
        assert record.samples("index", step) == [2 * step - 2, 2 * step - 1]
        assert len(record.losses(0, step)) == len(record.norms(step)) == 1
        assert len(record.whole(step, "unclipped")) == len(record.whole(step, "after")) == 4


FROM_META = """
import torch
from torch import nn

with torch.device("meta"):
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
for module in reversed(list(model.modules())):  # a module after those in it
    module.to_empty(device="cpu", recurse=False)
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
model(torch.eye(3)).square().sum().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
"""


def test_to_empty_of_a_module_alone_leaves_those_in_it(ranks: Ranks, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(FROM_META)
    record = InPool(script, [], 1, 60, pool=ranks).record(tmp_path / "record", steps=1)
    assert record.facts()["unset"] == []


IDLE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
model, idle = nn.Linear(3, 2), nn.Linear(3, 2, bias=False)
for one in (model, idle):
    fully_shard(one, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
optimizer = torch.optim.SGD([*model.parameters(), *idle.parameters()], lr=0.1)
CLOSURE
model(torch.eye(3)).square().sum().backward()
optimizer.step()
"""
CLOSURE = "optimizer.step(lambda: model(torch.eye(3)).square().sum().backward())"


@pytest.mark.parametrize("closure", ["", CLOSURE])
def test_a_group_that_has_never_run_and_a_step_that_computes(ranks: Ranks, tmp_path: Path, closure: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(IDLE.replace("CLOSURE", closure))
    record = InPool(script, [], 2, 60, pool=ranks).record(tmp_path / "record", steps=5)
    assert record.steps == 1 + bool(closure)
    assert {row["reduced"] for row in record.dtypes().values()} == {"bfloat16"}
