"""Programs with one fault each, all named; the same ones without it, in which nothing is named; and what is refused."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from examples import tp_fsdp2
from migration.prove.cli import against_one
from migration.prove.launch import Failed
from tests.harness import Ranks
from tests.migrate.prove.in_pool import InPool
from tests.migrate.prove.programs import FAULTS, SOUND, faulty


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("kind", ["faulty", "sound"])
def test_the_fault_is_named_and_none_without_it(ranks: Ranks, tmp_path: Path, kind: str, name: str) -> None:
    script = SOUND / f"{name}.py"
    if kind == "faulty":
        script = tmp_path / "faulty.py"
        script.write_text(faulty(name))
    alone, several = (InPool(script, [], count, 60, pool=ranks) for count in (1, 2))
    found = against_one(alone, several, 8, tmp_path)
    print(found.text())
    named = [FAULTS[name][0]] if kind == "faulty" else []
    noted = [one for one in named if one == "decayed-norms"]  # as on one rank, so that nothing differs
    assert [fault.kind for fault in found.faults] == [one for one in named if one not in noted]
    assert [note.kind for note in found.notes if note.kind != "same-dropout"] == noted


IN_BF16 = {
    "import fully_shard": "import MixedPrecisionPolicy, fully_shard",
    "fully_shard(model)": "fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))",
    "model(torch.randn(8, 6).chunk(world)[rank])": "model(torch.randn(8, 6).chunk(world)[rank]).float()",
}
ADAM = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(3)))
for one in (*model, model):
    fully_shard(one, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(4):
    batch = torch.randn(64, 16).chunk(world)[rank]
    (model(batch).float() - batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_adam_makes_much_of_roundings_in_bf16_and_a_norm_of_shards_is_found_there(ranks: Ranks, tmp_path: Path) -> None:
    wrong = faulty("optimizer_of_shards")
    for old, new in IN_BF16.items():
        wrong = wrong.replace(old, new)
    for name, text, kinds in (("right", ADAM, []), ("wrong", wrong, ["updates"])):
        script = tmp_path / f"{name}.py"
        script.write_text(text)
        alone, several = (InPool(script, [], count, 60, pool=ranks) for count in (1, 2))
        (tmp_path / name).mkdir()
        found = against_one(alone, several, 4, tmp_path / name)
        assert [fault.kind for fault in found.faults] == kinds, found.text()
        assert "equal gradients" not in found.text()


def test_every_program_is_tried() -> None:
    assert {path.stem for path in SOUND.glob("*.py")} == set(FAULTS)


PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = torch.randn(64, 6)
model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data)
torch.manual_seed(rank)
for batch in BATCHES:
    (model(batch) LOSS).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
SAMPLED = "DataLoader(data, batch_size=4, sampler=sampler)"


@pytest.mark.parametrize(("seed", "kinds"), [("0", ["same-dropout"]), ("rank", [])])
def test_equal_masks_are_said_and_are_no_fault(ranks: Ranks, tmp_path: Path, seed: str, kinds: list[str]) -> None:
    script = tmp_path / "program.py"
    text = PROGRAM.replace("nn.Linear(6, 3)", "nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))").replace("LOSS", "")
    text = text.replace("seed(rank)", f"seed({seed})").replace("BATCHES", "data.split(8)").replace("(batch ", "(batch")
    script.write_text(text.replace("model(batch)", "model(batch.chunk(world)[rank])"))
    alone, several = (InPool(script, [], count, 60, pool=ranks) for count in (1, 2))
    found = against_one(alone, several, 4, tmp_path)
    assert (found.status, [note.kind for note in found.notes]) == (0, kinds), found.text()
    assert ("note: same-dropout: all ranks draw the same masks" in found.text()) == bool(kinds)


@pytest.mark.parametrize(
    ("batches", "loss", "why"),
    [
        ("DataLoader(data.chunk(world)[rank], batch_size=4)", "", "each rank takes samples of its own"),
        ("[data[torch.randint(64, (4,))] for _ in range(4)]", "", "such as --batch-size"),
        ("[data[torch.randint(64, (8 // world,))] for _ in range(4)]", "", "each rank takes samples of its own"),
        (f"(one + 0.1 * torch.randn_like(one) for one in {SAMPLED})", "", "draws random numbers"),
        (SAMPLED, "+ torch.randn(3)", "draws random numbers"),
        (SAMPLED.replace("data,", "[one + 0.1 * torch.randn(6) for one in data],"), "", "the values of samples differ"),
    ],
)
def test_what_may_be_meant_is_no_fault(ranks: Ranks, tmp_path: Path, batches: str, loss: str, why: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.replace("BATCHES", batches).replace("LOSS", loss))
    alone, several = (InPool(script, [], count, 60, pool=ranks) for count in (1, 2))
    with pytest.raises(Failed, match=why):
        against_one(alone, several, 4, tmp_path)


@pytest.mark.parametrize(
    ("wrapped", "computed", "reduced"),
    [
        ("fully_shard(plain, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))", "bfloat16", "float32"),
        ("fully_shard(plain, mp_policy=MixedPrecisionPolicy(torch.bfloat16))", "bfloat16", "bfloat16"),
        (
            "FSDP(plain, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32), use_orig_params=True, **ON)",
            "bfloat16",
            "float32",
        ),
        ("FSDP(plain, mixed_precision=MixedPrecision(torch.bfloat16), **ON)", "bfloat16", "bfloat16"),
        ("DistributedDataParallel(plain)", "float32", "float32"),
    ],
)
def test_each_parameters_scale_and_dtypes_are_told(
    ranks: Ranks, tmp_path: Path, wrapped: str, computed: str, reduced: str
) -> None:
    """Whatever wraps the model."""
    script = tmp_path / "program.py"
    imports = """
ON = {"device_id": torch.device("cpu")}
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, MixedPrecision, FullyShardedDataParallel as FSDP
plain = nn.Sequential(nn.Linear(6, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 3))
"""
    text = PROGRAM.replace("model = DistributedDataParallel(nn.Linear(6, 3))", f"{imports}model = {wrapped}")
    text = text.replace("torch.optim.SGD(", "torch.optim.Adam(").replace(
        "sampler)\ntorch.manual_seed(rank)", "sampler)"
    )
    script.write_text(text.replace("BATCHES", SAMPLED).replace("LOSS", ".float()"))
    alone, several = (InPool(script, [], count, 60, pool=ranks) for count in (1, 2))
    found = against_one(alone, several, 2, tmp_path, parameters=True)
    rows = {row.pop("parameter"): row for row in found.parameters}
    print(found.text())
    assert set(rows) == {"0.weight", "1.weight", "1.bias", "2.weight", "2.bias"}
    low = 1e-6 if reduced == "float32" == computed else 0.02  # of bf16
    for name, row in rows.items():
        assert abs(row.pop("gradient_scale") - 1) < low, name
        assert row.pop("off") < low, name
        kept = "float32"
        assert row == {"stored": kept, "computed": computed, "reduced": reduced, "optimizer": kept}, name


def test_scales_without_a_comparison_are_left_out(ranks: Ranks, tmp_path: Path) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(faulty("weights_by_rank"))
    alone, several = (InPool(script, [], count, 60, pool=ranks) for count in (1, 2))
    rows = against_one(alone, several, 2, tmp_path, parameters=True).parameters
    assert rows
    assert all(row["gradient_scale"] is row["off"] is None and row["stored"] == "float32" for row in rows)


def test_layers_that_ranks_split_and_fsdp2_shards_are_those_of_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    script = Path(tp_fsdp2.__file__)
    ranks.close()  # torch keeps what it makes of a mesh, and an equal one of other groups would find it
    alone, several = (InPool(script, [], count, 60, pool=ranks) for count in (1, 4))
    found = against_one(alone, several, 2, tmp_path, parameters=True)
    ranks.close()
    assert (found.faults, found.enlarged, found.ranks) == ([], 1, 4)
    assert len(found.parameters) == 21
    for row in found.parameters:
        assert max(abs(row["gradient_scale"] - 1), row["off"]) < 1e-6, row


def _scales(halved: bool) -> list[float]:
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    model, rows = copy.deepcopy(alone), torch.randn(8, 6)
    fully_shard(model)
    alone(rows).square().mean().backward()
    loss = model(rows.chunk(2)[dist.get_rank()]).square().mean()
    (loss / 2 if halved else loss).backward()
    page = (Path(__file__).parents[3] / "docs" / "migration-prove.md").read_text()
    (block,) = re.findall(r"```python\n(def scales\(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"DTensor": DTensor}
    exec(block, names)
    found = list(names["scales"](model, alone))
    assert max(off for *_, off in found) < 1e-6
    return [factor for _, factor, _ in found]


def test_the_function_of_the_page_tells_the_scale_in_a_loop_of_ones_own(ranks: Ranks) -> None:
    for halved, expected in ((False, 1), (True, 0.5)):
        for found in ranks.run(_scales, halved):
            assert all(abs(factor - expected) < 1e-6 for factor in found)
