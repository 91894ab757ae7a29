"""Weights to start from, in each of their forms: each rank reads its part, and what isn't the model's is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp2 import models
from fsdp2.checkpoint import full_dtensor, full_together, weights
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.saver import SaveFailed
from fsdp2.checkpoint.sources.opening import opened
from fsdp2.checkpoint.sources.source import Source
from fsdp2.checkpoint.state import AppState, plain_names
from fsdp2.checkpoint.store import MARKER
from fsdp2.checkpoint.weights import load_weights
from fsdp2.config import parse
from fsdp2.models.initial import slices_of
from fsdp2.options.errors import ConfigError
from fsdp2.parallel.meta import shared_names
from fsdp2.parallel.shards import local
from fsdp2.run.preflight import preflight
from fsdp2.run.process.runtime import World
from fsdp2_tools.checkpoint.export import export
from tests.harness import Ranks, make_engine, of_kind, same, small
from tests.test_full_state import Tied

Train = Callable[..., list[tuple[str, dict[str, Any]]]]
State = dict[str, Tensor]


def tiny(seed: int = 0) -> State:
    """A state dict of the smallest model that no table of initial values would give it."""
    generator = torch.Generator().manual_seed(seed)
    state = models.get("vit").build("tiny").state_dict()
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}


def write_bin(folder: Path, state: State) -> None:
    """As transformers wrote models before safetensors: pickled, in two files with an index."""
    folder.mkdir()
    names = sorted(state)
    files = {f"pytorch_model-{i + 1:05d}-of-00002.bin": names[i::2] for i in range(2)}
    for file, part in files.items():
        torch.save({name: state[name] for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> tuple[State, list[str]]:
    """A state dict, and the places that hold it, one in each form."""
    state, root = tiny(), tmp_path_factory.mktemp("forms")
    full, one, folder, many = root / "full-model.pt", root / "one.safetensors", root / "folder", root / "many"
    torch.save(state, full)
    save_file(state, one)
    for place, size in ((folder, 1 << 30), (many, 9_000)):
        export(str(full), str(place), "safetensors", max_shard_size=size)
    assert len(list(many.glob("*.safetensors"))) > 3
    write_bin(root / "bins", state)
    (root / "bin").mkdir()
    torch.save(state, root / "bin" / "pytorch_model.bin")
    export(str(full), str(root / "dcp"), "dcp")
    names = ("full-model.pt", "one.safetensors", "folder", "many", "bins", "bin", "dcp")
    return state, [str(root / name) for name in names]


def _started(places: Sequence[str], flags: str) -> list[tuple[bool, State]]:
    """For each place, whether the model is sharded, and the whole of it on rank 0."""
    found = []
    for place in places:
        engine = make_engine(f"--init-from={place} {flags}")
        state = engine.state["model"].state_dict().values()
        found.append((any(isinstance(one, DTensor) for one in state), full_dtensor.full_model_state(engine.model)))
    return found


@pytest.mark.parametrize(
    ("count", "flags"),
    [(3, ""), (4, "--replicas=2"), (2, "--cpu-offload"), (2, "--strategy=ddp"), (2, "--strategy=fsdp1")],
)
def test_every_form_loads_bit_for_bit(ranks: Ranks, forms: tuple[State, list[str]], count: int, flags: str) -> None:
    state, places = forms[0], forms[1] if count == 3 else forms[1][2:4]
    # Three ranks have uneven rows of the head's ten, and of the class token two of them have nothing.
    results, *_ = ranks.run(_started, places, flags, ranks=count)
    for place, (sharded, found) in zip(places, results, strict=True):
        assert sharded == ("ddp" not in flags), place
        assert same(found, state), place


def _read(place: str) -> tuple[int, int]:
    """Elements that this rank reads of a place, and those of its shards."""
    read = 0

    @contextmanager
    def counting(place: str) -> Iterator[Source]:
        with opened(place) as source:
            part = source.part
            assert part is not None

            def counted(name: str, ranges: tuple[slice, ...]) -> Tensor:
                nonlocal read
                tensor = part(name, ranges)
                read += tensor.numel()
                return tensor

            yield replace(source, part=counted, read=_whole)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "opened", counting)
        engine = make_engine(f"--init-from={place}")
    return read, sum(local(tensor).numel() for tensor in plain_names(engine.model).values())


def _whole(name: str) -> Tensor:
    raise AssertionError(f"{name} is read whole")


def test_a_rank_reads_what_it_keeps(ranks: Ranks, forms: tuple[State, list[str]]) -> None:
    state, places = forms
    for place in places:
        results = ranks.run(_read, place, ranks=3)
        assert [read for read, _ in results] == [kept for _, kept in results], place
        assert sum(kept for _, kept in results) == sum(tensor.numel() for tensor in state.values())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux how much memory there is")
def test_what_was_read_is_memory_of_the_process_no_longer(tmp_path: Path) -> None:
    """As mapped pages of a file would be, until it is closed."""
    state = {f"{number}": torch.full((1 << 20,), number, dtype=torch.float32) for number in range(32)}
    full, one = tmp_path / "full.pt", tmp_path / "one.safetensors"
    torch.save(state, full)
    save_file(state, one)
    del state
    export(str(full), str(tmp_path / "dcp"), "dcp")
    half = (slice(1 << 19, 1 << 20),)
    for place in (full, one, tmp_path / "dcp"):
        with opened(str(place)) as source:
            for name in sorted(source.tensors)[:2]:
                source.read_part(name, half)
            before = _resident()
            for name in source.tensors:
                part = source.read_part(name, half)
                assert torch.equal(part, torch.full((1 << 19,), float(name)))
            grown = _resident() - before
        assert grown < 32 << 20, f"{place.name}: {grown} bytes, of 64 MiB that were read"


def _resident() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def _tied(folder: Path) -> list[Any]:
    """What a model with a tied weight makes of files that have it once, twice, and as two weights."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results: list[Any] = []
    for name in ("first", "second", "both", "two"):
        model = Tied()
        fully_shard(model.block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with torch.no_grad():
            for tensor in plain_names(model).values():
                local(tensor).fill_(-1)
        try:
            file = str(folder / f"{name}.safetensors")
            load_weights(file, plain_names(model), slices_of, shared_names(model), partial=False)
            assert model.head.weight is model.embedding.weight
            results.append(full_dtensor.full_model_state(model))
        except Refused as error:
            results.append(str(error))
    return results


def test_a_tied_weight_may_be_there_once_but_not_be_two(ranks: Ranks, tmp_path: Path) -> None:
    state = {name: torch.randn(tensor.shape) for name, tensor in Tied().state_dict().items()}
    state["head.weight"] = state["embedding.weight"].clone()
    save_file(state, tmp_path / "both.safetensors")
    for left_out, file in (("head.weight", "first"), ("embedding.weight", "second")):
        save_file({k: v for k, v in state.items() if k != left_out}, tmp_path / f"{file}.safetensors")
    other = state["head.weight"].clone()
    other[0, 0] += 1  # in the first rank's rows: the others read the same
    save_file({**state, "head.weight": other}, tmp_path / "two.safetensors")
    first, *others = ranks.run(_tied, tmp_path, ranks=3)
    assert all(same(loaded, state) for loaded in first[:3])
    for results in (first, *others):
        said = "embedding.weight, head.weight are one weight in the model and differ in the file; untie them in"
        assert said in results[3]


@pytest.mark.parametrize("flags", ["", "--strategy=fsdp1"])
def test_a_new_head_keeps_its_initial_values(
    ranks: Ranks, forms: tuple[State, list[str]], tmp_path: Path, flags: str
) -> None:
    file, state = _of_another_head(tmp_path, forms[0])
    ((_, found),), *_ = ranks.run(_started, [str(file)], f"--init-partial {flags}")
    ((_, fresh),), *_ = ranks.run(_started, ["scratch"], flags)
    assert same(found, {name: fresh[name] if name.startswith("heads.") else state[name] for name in fresh})


def test_what_is_left_out_is_named(train: Train, forms: tuple[State, list[str]], tmp_path: Path) -> None:
    file, state = _of_another_head(tmp_path, forms[0])
    (start,) = of_kind(train(f"--init-from={file}", "--init-partial", "--no-save-model", steps=1), "start")
    assert start["loaded"] == len(state) - 2
    assert start["left_out"] == [
        "heads.head.bias: (5,) in the file, (10,) in the model",
        "heads.head.weight: (5, 32) in the file, (10, 32) in the model",
        "more: only in the file",
    ]


def _of_another_head(folder: Path, state: State) -> tuple[Path, State]:
    of_five = {name: tensor[:5].contiguous() for name, tensor in state.items() if name.startswith("heads.")}
    save_file({**state, **of_five, "more": torch.ones(2)}, folder / "other.safetensors")
    return folder / "other.safetensors", state


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def _a_shard_is_missing(folder: Path, state: State) -> Path:
    export(str(folder / "full.pt"), str(folder / "many"), "safetensors", max_shard_size=9_000)
    sorted((folder / "many").glob("*.safetensors"))[1].unlink()
    return folder / "many"


def _one_of_several(folder: Path, state: State) -> Path:
    (folder / "part").mkdir()
    save_file(state, folder / "part" / "model-00001-of-00004.safetensors")
    return folder / "part"


def _truncated(folder: Path, state: State) -> Path:
    save_file(state, folder / "short.safetensors")
    content = (folder / "short.safetensors").read_bytes()
    (folder / "short.safetensors").write_bytes(content[:-8])
    return folder / "short.safetensors"


def _a_long_header(folder: Path, state: State) -> Path:
    (folder / "long.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    return folder / "long.safetensors"


def _overlapping(folder: Path, state: State) -> Path:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    (folder / "over.safetensors").write_bytes(header(a=entry, b=entry) + bytes(8))
    return folder / "over.safetensors"


def _a_bin_is_missing(folder: Path, state: State) -> Path:
    write_bin(folder / "bins", state)
    (folder / "bins" / "pytorch_model-00002-of-00002.bin").unlink()
    return folder / "bins"


def _nothing_there(folder: Path, state: State) -> Path:
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text("{}")
    return folder / "config"


def _quantized(folder: Path, state: State) -> Path:
    save_file({**state, "class_token": state["class_token"].to(torch.float8_e4m3fn)}, folder / "8.safetensors")
    return folder / "8.safetensors"


def _another_model(folder: Path, state: State) -> Path:
    save_file(models.get("cnn").build("tiny").state_dict(), folder / "cnn.safetensors")
    return folder / "cnn.safetensors"


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (_a_shard_is_missing, "safetensors is missing, which model.safetensors.index.json names"),
        (_one_of_several, "has 1 of several safetensors files and no model.safetensors.index.json"),
        (_truncated, "is not a complete safetensors file"),
        (_a_long_header, "is not a complete safetensors file"),
        (_overlapping, "is not a complete safetensors file"),
        (_a_bin_is_missing, "pytorch_model-00002-of-00002.bin is missing"),
        (_nothing_there, "no .safetensors and no pytorch_model.bin"),
        (_quantized, "class_token: torch.float8_e4m3fn in the file, torch.float32 in the model"),
        (_another_model, "is of another model"),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_process_group(
    tmp_path: Path, make: Callable[[Path, State], Path], part: str
) -> None:
    state = tiny()
    torch.save(state, tmp_path / "full.pt")
    place = make(tmp_path, state)
    partly = ["--init-partial"] if make is _another_model else []  # of another model, nothing fits
    with pytest.raises(ConfigError) as caught:
        preflight(parse(small(tmp_path / "run", f"--init-from={place}", *partly)), World(0, 1, 0, 1))
    assert part in str(caught.value)
    assert str(caught.value).startswith(f"--init-from {place}: ")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def _read_error(place: str) -> str:
    """One rank can't read its part; how all end."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Source, "read_part", _no_disk)
        try:
            make_engine(f"--init-from={place}")
        except ConfigError as error:
            return str(error)
    return "loaded"


def _no_disk(*arguments: Any) -> Tensor:
    raise OSError("Input/output error")


def test_a_rank_that_cannot_read_ends_every_rank(ranks: Ranks, forms: tuple[State, list[str]]) -> None:
    place = forms[1][3]
    assert ranks.run(_read_error, place) == [f"--init-from {place}: Input/output error"] * 2


def _killed_between_renames(folder: Path) -> None:
    """A full model of two steps, the second save killed after one of its files has got its name."""
    engine = make_engine()
    app = AppState(engine.model, engine.optimizer, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full_together, "SHARD_BYTES", 20_000)
        full_together.save_together(app, folder, 1, slices_of)
        if dist.get_rank() == 0:
            with opened(str(folder)) as source:  # whole until then
                assert source.folder is not None
        dist.barrier()
        real = full_together.LocalFiles.rename

        def rename(files: Any, source: str, target: str) -> None:
            if target.startswith("model-00002"):
                raise InterruptedError("killed")
            real(files, source, target)

        patch.setattr(full_together.LocalFiles, "rename", rename)
        with pytest.raises(SaveFailed, match="killed"):
            full_together.save_together(app, folder, 2, slices_of)


def test_a_full_model_of_two_steps_is_not_one(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_killed_between_renames, tmp_path / "model")
    assert not (tmp_path / "model" / MARKER).exists()
    with pytest.raises(Refused, match="several safetensors files and no"), opened(str(tmp_path / "model")):
        pass


def _tied_together(folder: Path) -> None:
    """Under a wrapper that gives names a prefix."""
    model = torch.nn.parallel.DistributedDataParallel(Tied())
    app = AppState(model, torch.optim.SGD(model.parameters()), {})
    full_together.save_together(app, folder, 1, slices_of, shared_names(model.module))


def test_a_tied_weight_is_written_once(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_tied_together, tmp_path)
    names = {"embedding.weight", "block.weight", "block.bias", "scale"}
    assert set(load_file(tmp_path / "model.safetensors")) == names
