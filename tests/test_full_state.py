"""Full state dicts by both APIs, and sharded ones that need no communication."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2 import models
from fsdp2.checkpoint import full_dcp, full_dtensor
from fsdp2.checkpoint.state import AppState
from fsdp2.config import Config
from fsdp2.parallelize import parallelize
from tests.harness import Ranks, full_files, losses, make_engine, of_kind, same

Events = list[tuple[str, dict[str, Any]]]
Train = Callable[..., Events]


@pytest.mark.parametrize("flags", ["", "--strategy=ddp", "--freeze=conv_proj.*"])
def test_both_apis_write_equal_files(train: Train, tmp_path: Path, flags: str) -> None:
    train(*flags.split(), run="dtensor", steps=3)
    train(*flags.split(), "--dcp-api", run="dcp", steps=3)
    dtensor, dcp = full_files(tmp_path / "dtensor"), full_files(tmp_path / "dcp")
    assert same(dtensor, dcp)
    plain = models.get("vit").build("tiny")
    plain.load_state_dict(dtensor[0])  # as the tutorials load it
    frozen = {name for name in dtensor[0] if flags.startswith("--freeze") and name.startswith("conv_proj")}
    assert dtensor[1]["state"].keys() == dtensor[0].keys() - frozen
    assert float(dtensor[1]["state"]["class_token"]["step"]) == 3


class Tricky(nn.Module):
    """A buffer of each kind beside a sharded parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("positions", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _load_full(api_name: str, path: str, replicas: int) -> dict[str, Any]:
    api = {"dtensor": full_dtensor, "dcp": full_dcp}[api_name]

    def set_weights(model: nn.Module) -> None:
        model.get_buffer("positions").fill_(5)
        api.load_full_model_state(model, Path(path))

    engine = parallelize(
        Config(replicas=replicas),
        build=Tricky,
        blocks_of=lambda model: [model.get_submodule("layer")],
        set_weights=set_weights,
        device=torch.device("cpu"),
        world_size=dist.get_world_size(),
    )
    assert isinstance(engine.model.get_parameter("layer.weight"), DTensor)
    return api.full_model_state(engine.model)


@pytest.mark.parametrize("api", ["dtensor", "dcp"])
@pytest.mark.parametrize(("n", "replicas"), [(2, 1), (3, 1), (4, 2)])
def test_a_full_file_loads_into_a_sharded_model(ranks: Ranks, tmp_path: Path, api: str, n: int, replicas: int) -> None:
    plain = Tricky()
    plain.get_buffer("kept").fill_(3)
    torch.save(plain.state_dict(), tmp_path / "full.pt")
    results = ranks.run(_load_full, api, str(tmp_path / "full.pt"), replicas, ranks=n)
    assert same(results[0], dict(plain.state_dict()))
    assert all(result == {} for result in results[1:]), "only rank 0 may hold the full model"


def _largest_allocation(api_name: str, path: str) -> int:
    """Bytes of the largest tensor that this rank allocates while it loads a full file."""

    class Largest(TorchDispatchMode):
        total = 0
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (list, tuple)) else [out]:
                if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                    self.most = max(self.most, tensor.untyped_storage().nbytes())
            return out

    api = {"dtensor": full_dtensor, "dcp": full_dcp}[api_name]
    engine = make_engine("--model-size=seed")
    with Largest() as largest:
        api.load_full_model_state(engine.model, Path(path))
    return largest.most


@pytest.mark.parametrize("api", ["dtensor", "dcp"])
def test_loading_a_full_file_holds_one_parameter_at_a_time(ranks: Ranks, tmp_path: Path, api: str) -> None:
    spec = models.get("vit")
    model = spec.build("seed")
    torch.save(model.state_dict(), tmp_path / "full.pt")
    largest_parameter = max(p.numel() * p.element_size() for p in model.parameters())
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    other = ranks.run(_largest_allocation, api, str(tmp_path / "full.pt"))[1]
    assert other <= 2 * largest_parameter < whole / 5


@pytest.mark.parametrize("api", ["", "--dcp-api"])
def test_init_from_starts_with_another_runs_weights(train: Train, tmp_path: Path, api: str) -> None:
    first = train(run="first", steps=4)
    file = tmp_path / "first" / "full_model" / "full-model.pt"
    second = train(f"--init-from={file}", *api.split(), run="second", steps=1)
    fresh = train(run="fresh", steps=1)
    assert losses(second)[0] != losses(fresh)[0]
    assert losses(second)[0] < losses(first)[0]
    assert of_kind(second, "train")[0]["step"] == 1


def _communication_free() -> int:
    engine = make_engine()

    with CommDebugMode() as mode:
        AppState(engine.model, engine.optimizer, {}).state_dict()
    return mode.get_total_counts()


def test_the_sharded_application_state_issues_no_collective(ranks: Ranks) -> None:
    assert ranks.run(_communication_free) == [0, 0]
