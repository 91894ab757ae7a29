"""Full state dicts by both APIs, and sharded ones that need no communication."""

from __future__ import annotations

import errno
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp2 import infer, models
from fsdp2.checkpoint import full_dcp, full_dtensor, full_model, full_together
from fsdp2.checkpoint.full_model import save_full
from fsdp2.checkpoint.saver import SaveFailed
from fsdp2.checkpoint.state import AppState
from fsdp2.checkpoint.store import MARKER
from fsdp2.config import Config
from fsdp2.models.initial import slices_of
from fsdp2.parallelize import parallelize
from fsdp2.run.directory import rundir
from fsdp2_tools.checkpoint.__main__ import main as checkpoint_command
from tests.harness import Ranks, full_files, losses, main_in_ranks, make_engine, of_kind, same, small

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


class Allocated(TorchDispatchMode):
    """Bytes of the tensors that this rank allocates inside, at their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {self._storage(tensor)._cdata for tensor in tree_leaves((args, kwargs)) if self._is_plain(tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if self._is_plain(tensor) and self._storage(tensor)._cdata not in known | self._seen:
                storage = self._storage(tensor)
                self._seen.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.now -= nbytes

    @staticmethod
    def _is_plain(tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and not tensor.is_meta

    @staticmethod
    def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
        return tensor.untyped_storage()


def _peak(api_name: str, path: str, direction: str) -> int:
    """Bytes that this rank allocates at most while it loads, or gathers, a full state dict."""
    api = {"dtensor": full_dtensor, "dcp": full_dcp}[api_name]
    engine = make_engine("--model-size=seed")
    with Allocated() as allocated:
        if direction == "load":
            api.load_full_model_state(engine.model, Path(path))
        elif direction == "save to a file":
            save_full(
                api, AppState(engine.model, engine.optimizer, {}), Path(path).parent / "model" / "full-model.pt", 1
            )
        else:
            kept = [api.full_model_state(engine.model), api.full_optimizer_state(engine.model, engine.optimizer)]
            assert bool(kept[0]) == (dist.get_rank() == 0)
    return allocated.peak


@pytest.mark.parametrize("api", ["dtensor", "dcp"])
@pytest.mark.parametrize("direction", ["load", "save", "save to a file"])
def test_other_ranks_hold_one_full_parameter_at_a_time(ranks: Ranks, tmp_path: Path, api: str, direction: str) -> None:
    model = models.get("vit").build("seed")
    torch.save(model.state_dict(), tmp_path / "full.pt")
    largest_parameter = max(p.numel() * p.element_size() for p in model.parameters())
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    first, other = ranks.run(_peak, api, str(tmp_path / "full.pt"), direction)
    assert other <= 4 * largest_parameter < whole / 5
    if direction == "save to a file" and api == "dtensor":
        assert first <= 4 * largest_parameter, "rank 0 holds more than a parameter at a time"
    if direction == "save":
        assert first > 2 * whole, "rank 0 was not measured: it gathers the model and its optimizer's state"


@pytest.mark.parametrize("api", ["", "--dcp-api"])
def test_init_from_starts_with_another_runs_weights(train: Train, tmp_path: Path, api: str) -> None:
    first = train(run="first", steps=4)
    file = tmp_path / "first" / "full_model" / "full-model.pt"
    second = train(f"--init-from={file}", *api.split(), run="second", steps=1)
    fresh = train(run="fresh", steps=1)
    assert losses(second)[0] != losses(fresh)[0]
    assert losses(second)[0] < losses(first)[0]
    assert of_kind(second, "train")[0]["step"] == 1


class Tied(nn.Module):
    """Input and output embedding are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.block = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(2))
        self.block.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(x)))


def _tied(folder: str) -> None:
    """Save the full state of a model with tied weights by both APIs, and load each other's."""
    model = Tied()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) + 100.0 * number)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # the root's group has both names of the tied weight
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    model(torch.arange(6)).sum().backward()
    optimizer.step()
    for name, api in {"dtensor": full_dtensor, "dcp": full_dcp}.items():
        save_full(api, AppState(model, optimizer, {}), Path(folder) / name / "full-model.pt", 1)
    for name, api in {"dtensor": full_dcp, "dcp": full_dtensor}.items():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        api.load_full_model_state(model, Path(folder) / name / "full-model.pt")
        save_full(full_dtensor, AppState(model, optimizer, {}), Path(folder) / f"{name}-again" / "full-model.pt", 1)
    assert model.head.weight is model.embedding.weight


def test_tied_weights_buffers_and_frozen_parameters_by_both_apis(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_tied, str(tmp_path))
    files = {
        name: [torch.load(tmp_path / name / file, weights_only=True) for file in ("full-model.pt", "full-optimizer.pt")]
        for name in ("dtensor", "dcp", "dtensor-again", "dcp-again")
    }
    assert all(same(content, files["dtensor"]) for content in files.values())
    plain = Tied()
    plain.load_state_dict(files["dtensor"][0])
    assert torch.equal(plain.head.weight, plain.embedding.weight)
    assert set(files["dtensor"][0]) == {"embedding.weight", "block.weight", "block.bias", "head.weight", "scale"}
    assert "block.bias" not in files["dtensor"][1]["state"]


def _communication_free() -> int:
    engine = make_engine()

    with CommDebugMode() as mode:
        AppState(engine.model, engine.optimizer, {}).state_dict()
    return mode.get_total_counts()


def test_the_sharded_application_state_issues_no_collective(ranks: Ranks) -> None:
    assert ranks.run(_communication_free) == [0, 0]


def _large(folder: Path) -> list[Any]:
    """Runs of a model that is larger than what is written unasked; what they print about it at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full_model, "LARGEST_UNASKED", 1_000)
        ends = [
            of_kind(main_in_ranks(small(folder / name, "--max-steps=1", *flags)), "end")[0]
            for name, flags in (("unasked", []), ("asked", ["--save-model"]), ("refused", ["--no-save-model"]))
        ]
    return [end["full_model_left_out_bytes"] for end in ends]


def test_of_a_large_model_the_full_one_is_written_only_if_asked_for(ranks: Ranks, tmp_path: Path) -> None:
    weights = sum(tensor.nbytes for tensor in models.get("vit").build("tiny").state_dict().values())
    assert ranks.run(_large, tmp_path) == [[weights, None, None]] * 2
    written = [(tmp_path / name / "full_model" / MARKER).is_file() for name in ("unasked", "asked", "refused")]
    assert written == [False, True, False]
    # The command that the run's last line gives instead.
    out = tmp_path / "model.pt"
    assert checkpoint_command(["export", str(tmp_path / "unasked"), str(out), "--format", "pt"]) == 0
    assert same(torch.load(out, weights_only=True), load_file(tmp_path / "asked" / "full_model" / "model.safetensors"))


def _together(folder: Path, flags: list[str]) -> list[Any]:
    """A run whose full model all ranks write, in small files: its accuracy, and the note of one that starts from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full_model, "LARGEST_UNASKED", 1_000)
        patch.setattr(full_together, "SHARD_BYTES", 20_000)
        first = main_in_ranks(small(folder / "first", "--max-steps=2", "--save-model", *flags))
    again = small(folder / "again", "--max-steps=1", f"--init-from={folder / 'first' / 'full_model'}", *flags)
    return [of_kind(first, "eval")[-1]["accuracy"], of_kind(main_in_ranks(again), "start")[0]["note"]]


@pytest.mark.parametrize(("count", "flags"), [(3, []), (4, ["--replicas=2"]), (2, ["--strategy=ddp"])])
def test_all_ranks_write_a_large_model_together(ranks: Ranks, tmp_path: Path, count: int, flags: list[str]) -> None:
    (accuracy, note), *_ = ranks.run(_together, tmp_path, flags, ranks=count)
    folder, out = tmp_path / "first" / "full_model", tmp_path / "model.pt"
    files = sorted(folder.glob("model-*.safetensors"))
    assert len(files) > 3
    assert note.startswith(f"--init-from {folder}: verified")
    assert checkpoint_command(["verify", str(tmp_path / "first")]) == 0
    # What rank 0 alone reads out of the sharded checkpoint is the same, bit for bit.
    assert checkpoint_command(["export", str(tmp_path / "first"), str(out), "--format", "pt"]) == 0
    together = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert same(together, torch.load(out, weights_only=True))
    # And inference from it computes what the run did.
    assert ranks.run(_inferred, tmp_path / "first", ranks=1) == [accuracy]


def _inferred(run: Path) -> float:
    return float(infer.main(run)["accuracy"])


def _full_disk(folder: Path) -> str:
    """The rank that can't write makes all of them fail."""
    engine = make_engine()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(full_together.os, "pwrite", _no_space)
        try:
            full_together.save_together(AppState(engine.model, engine.optimizer, {}), folder, 1, slices_of)
        except SaveFailed as error:  # one line at the command, also on the rank whose disk isn't full
            return str(error)
    return "nothing"


def _no_space(*arguments: Any, **settings: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_model_that_one_rank_cannot_write_has_no_marker(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(_full_disk, tmp_path)
    assert first == second
    assert "No space left" in first or "full" in first
    assert not (tmp_path / MARKER).exists()
    assert not list(tmp_path.glob("*.safetensors"))


def _again(flags: list[str]) -> Events:
    """A finished run once more, in which rank 1 can't look at the full model, as where a URL can't be reached."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(rundir, "verify", _no_space)
        return main_in_ranks(flags)


def test_rank_0_alone_looks_whether_the_full_model_is_there(ranks: Ranks, tmp_path: Path) -> None:
    flags = small(tmp_path / "run", "--max-steps=1")
    ranks.run(main_in_ranks, flags)
    for events in ranks.run(_again, flags):
        assert of_kind(events, "end")[0]["reason"] == "already finished"


def _patient(seconds: float) -> tuple[str, str]:
    """Rank 0 works for longer than its group may wait, with signs of life and without."""
    group: Any = dist.new_group(timeout=timedelta(seconds=1))

    def work() -> str:
        time.sleep(seconds)
        return "it"

    answers = []
    for pause in (0.1, 60.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(full_model, "SECONDS_BETWEEN_SIGNS", pause)
            patch.setattr(dist, "broadcast_object_list", partial(dist.broadcast_object_list, group=group))
            try:
                answers.append(f"got {full_model.while_rank_0(work)}")
            except RuntimeError as error:
                answers.append(type(error).__name__)
    return answers[0], answers[1]


def test_rank_0_may_take_longer_than_a_collective_may_wait(ranks: Ranks) -> None:
    first, second = ranks.run(_patient, 2.5)
    assert (first[0], second[0]) == ("got it", "got None")
    assert second[1] != "got None"  # so the test above was one
