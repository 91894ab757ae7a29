"""Flat parameters become parameters again where the model's code says what they are, and sizes prove it."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp2.checkpoint.refusal import Refused
from migration.checkpoints.flat import Unit, layout, units_of
from tests.harness import Ranks, same
from tests.migrate.checkpoints.conftest import Cli, Saved
from tests.migrate.checkpoints.fsdp1 import full
from tests.migrate.checkpoints.test_layouts import content

HERE = __name__


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.inner = nn.Linear(5, 5), nn.LayerNorm(5), Inner()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(self.layer(x)))


class Inner(nn.Module):
    """Wrapped on its own within a block."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(3)), nn.Linear(5, 3)
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.scale + self.table).sum(-1, keepdim=True)


class Tied(nn.Module):
    """Sizes that nothing divides, units within units, and a weight with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def without_inner() -> nn.Module:
    model = Tied()
    model.blocks[1] = nn.Linear(5, 5)
    return model


def _save(folder: Path, orig: bool, replicas: int = 1) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {}
    if replicas > 1:
        shape = (replicas, dist.get_world_size() // replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        options = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = ModuleWrapPolicy({Block, Inner})
        model = FullyShardedDataParallel(
            Tied(), auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=orig, **options
        )
        adam = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(3):
            model(torch.arange(7) % (2 + dist.get_rank())).square().mean().backward()
            adam.step()
            adam.zero_grad()
        rank = dist.get_rank()
        with full(model):
            state = {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, adam)}
        if rank == 0:
            torch.save(state, folder / "full.pt")
            (folder / "ranks").mkdir()
        dist.barrier()
        if replicas > 1:  # which have no LOCAL_STATE_DICT
            torch.save({"optimizer": adam.state_dict()}, folder / "ranks" / f"ckpt-rank-{rank}.pt")
            return
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            local = {"state_dict": model.state_dict(), "optimizer": adam.state_dict()}
            torch.save(local, folder / "ranks" / f"ckpt-rank-{rank}.pt")


WRAP = ("--wrap", "Block,Inner")
CODE = ("--model", f"{HERE}:Tied", *WRAP)


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_recovered_is_what_fsdp1_would_have_saved(
    ranks: Ranks, cli: Cli, tmp_path: Path, orig: bool, world_size: int
) -> None:
    ranks.run(_save, tmp_path, orig, ranks=world_size)
    assert "is a LOCAL_STATE_DICT" in cli(tmp_path / "ranks", tmp_path / "out")[1]
    status, printed = cli(tmp_path / "ranks", tmp_path / "out", *CODE)
    assert status == 0, printed
    assert "LOCAL_STATE_DICT of plain torch (ckpt-rank-*.pt)" in printed
    assert "the optimizer's numbers were taken in the order of model.parameters()" in printed
    assert cli(tmp_path / "full.pt", tmp_path / "expected")[0] == 0
    assert same(content(tmp_path / "out"), content(tmp_path / "expected"))
    # One rank's file stands for all that lie beside it.
    assert cli(tmp_path / "ranks" / "ckpt-rank-0.pt", tmp_path / "again", *CODE)[0] == 0


@pytest.mark.parametrize("orig", [False, True])
def test_replicas_repeat_one_another(ranks: Ranks, cli: Cli, tmp_path: Path, orig: bool) -> None:
    """HYBRID_SHARD on a mesh of 2 x 2: each rank's optimizer, beside the whole model."""
    ranks.run(_save, tmp_path, orig, 2, ranks=4)
    whole = torch.load(tmp_path / "full.pt", weights_only=True)
    torch.save(whole["model"], tmp_path / "ranks" / "model.pt")
    status, printed = cli(tmp_path / "ranks", tmp_path / "out", *CODE)
    assert status == 0, printed
    assert cli(tmp_path / "full.pt", tmp_path / "expected")[0] == 0
    assert same(content(tmp_path / "out"), content(tmp_path / "expected"))
    other = torch.load(last := tmp_path / "ranks" / "ckpt-rank-3.pt", weights_only=True)
    next(one for one in other["optimizer"]["state"].values() if one["exp_avg"].numel())["exp_avg"] += 1
    torch.save(other, last)
    assert (
        "replicas differ; give the files of one replica's ranks"
        in cli(tmp_path / "ranks", tmp_path / "again", *CODE)[1]
    )


@pytest.fixture(scope="module")
def recoverable(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recoverable")
    ranks.run(_save, folder, True)
    return folder / "ranks"


@pytest.mark.parametrize(
    ("what", "arguments", "part"),
    [
        ("too little wrapped", ["--model", f"{HERE}:Tied", "--wrap", "Block"], "blocks.0.inner. is one side's alone"),
        ("another model", ["--model", f"{HERE}:without_inner", *WRAP], "give all classes that were wrapped"),
        ("a rank is missing", CODE, "its chunks have 12 of 24 elements; a rank's file is missing"),
        ("no model", [], "_flat_param is flat, and its parameters have no names"),
    ],
)
def test_what_cannot_be_proven_is_refused(
    recoverable: Path, cli: Cli, tmp_path: Path, what: str, arguments: list[str], part: str
) -> None:
    source = Path(shutil.copytree(recoverable, tmp_path / "source"))
    if what == "a rank is missing":
        (source / "ckpt-rank-1.pt").unlink()
    status, line = cli(source, tmp_path / "out", *arguments)
    assert (status, part in line) == (2, True), line
    assert not (tmp_path / "out").exists()


def test_the_vit_of_two_groups_gives_its_weights(orig: Saved, flat: Saved, cli: Cli, tmp_path: Path) -> None:
    vit = ["--model", "vit", "--model-size", "tiny"]
    line = cli(orig.folder / "local", tmp_path / "out", *vit)[1]
    assert "numbers 32 parameters in 2 groups" in line
    assert cli(orig.folder / "local", tmp_path / "weights", *vit, "--no-optimizer")[0] == 0
    assert cli(orig.folder / "full.pt", tmp_path / "expected", "--no-optimizer")[0] == 0
    models = [{k: v for k, v in content(tmp_path / p).items() if ".model." in k} for p in ("weights", "expected")]
    assert same(*models)
    assert cli(flat.folder / "local", tmp_path / "all", *vit)[0] == 0
    assert cli(flat.folder / "full.pt", tmp_path / "whole")[0] == 0
    assert same(content(tmp_path / "all"), content(tmp_path / "whole"))


def test_a_layout_fits_exactly_or_not_at_all() -> None:
    unit = Unit("a.", [("a.x", torch.Size([3, 5])), ("a.y", torch.Size([5])), ("a.z", torch.Size([]))])
    assert layout(unit, 21, 4, ranks=2) == [0, 15, 20]
    assert layout(unit, 22, 4, ranks=2) == [0, 15, 20], "filled up for two ranks"
    assert layout(unit, 25, 4, ranks=2) == [0, 16, 24], "each from a multiple of 16 bytes"
    assert layout(unit, 26, 4, ranks=2) == [0, 16, 24]
    assert layout(unit, 25, 2, ranks=1) == [0, 16, 24]
    for size in (20, 23, 24, 27):
        with pytest.raises(
            Refused, match=f"a._flat_param has {size} values, and the parameters below a. in the code 21"
        ):
            layout(unit, size, 4, ranks=2)


def test_units_are_those_of_fsdp1() -> None:
    model = Tied()
    wrapped = [module for module in model.modules() if isinstance(module, (Block, Inner))]
    assert [(unit.prefix, len(unit.parameters)) for unit in units_of(model, wrapped)] == [
        ("", 2),
        ("blocks.0.", 4),
        ("blocks.0.inner.", 3),
        ("blocks.1.", 4),
        ("blocks.1.inner.", 3),
    ]
    assert [name for name, _ in units_of(model, wrapped)[0].parameters] == ["embedding.weight", "head.bias"]
