"""export: other formats hold the same tensors, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from fsdp2 import models
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.store import MARKER, DamagedCheckpoint
from fsdp2_tools.checkpoint import export as module
from fsdp2_tools.checkpoint import options
from fsdp2_tools.checkpoint.__main__ import main as command
from fsdp2_tools.checkpoint.export import DTYPES, export
from fsdp2_tools.checkpoint.import_ import import_
from tests.commands.common import FORMATS, State, checkpoint, flip, read_all, write
from tests.harness import same
from tests.peaks import peaks_of


def vit() -> nn.Module:
    return models.get("vit").build("tiny")


def test_a_dtype_of_the_flag_is_one_that_export_casts_to() -> None:
    assert tuple(DTYPES) == options.DTYPES


def load(path: Path, form: str, dtype: torch.dtype | None = None) -> State:
    """What another program reads, with nothing of this package."""
    if form == "pt":
        state: State = torch.load(path, weights_only=True)
        return state
    if form == "safetensors":
        return load_file(path / "model.safetensors")
    if form == "sharded":
        weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        shards = {file: load_file(path / file) for file in set(weight_map.values())}
        return {name: shards[file][name] for name, file in weight_map.items()}
    target = vit().to(dtype).state_dict()
    dcp.load(target, checkpoint_id=path)
    return target


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [None, "bf16", "fp16"])
def test_every_format_holds_the_full_model(
    finished: Path, full: State, tmp_path: Path, form: str, dtype: str | None
) -> None:
    types = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    out = write(finished, tmp_path / "out", form, *(["--dtype", dtype] if dtype else []))
    state = load(out, form, types[dtype])
    assert same(state, {name: tensor.to(types[dtype]) for name, tensor in full.items()})
    assert os.listdir(tmp_path) == ["out"]
    vit().load_state_dict(state)


def test_shards_are_as_hugging_face_has_them(finished: Path, full: State, tmp_path: Path) -> None:
    out = write(finished, tmp_path / "out", "sharded")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in full.values())}
    assert index["weight_map"].keys() == full.keys()
    for file in files:
        with safe_open(out / file, framework="pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            names = set(shard.keys())
        assert names == {name for name, where in index["weight_map"].items() if where == file}
        assert sum(full[name].nbytes for name in names) <= 30_000
    # No shard has room for the first tensor of the next.
    firsts = [next(name for name in full if index["weight_map"][name] == file) for file in files]
    for file, first in zip(files, firsts[1:], strict=False):
        used = sum(full[name].nbytes for name in full if index["weight_map"][name] == file)
        assert used + full[first].nbytes > 30_000


def test_a_tensor_larger_than_a_shard_has_one_for_itself(tmp_path: Path) -> None:
    state = {"a": torch.zeros(10), "b": torch.zeros(1000), "c": torch.zeros(10)}
    torch.save(state, tmp_path / "m.pt")
    export(str(tmp_path / "m.pt"), str(tmp_path / "out"), "safetensors", max_shard_size=100)
    assert same(load(tmp_path / "out", "sharded"), state)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3


# What the package writes, less its own order of the header.
def test_safetensors_are_laid_out_as_the_package_does(full: State, finished: Path, tmp_path: Path) -> None:
    out = write(finished, tmp_path / "out", "safetensors") / "model.safetensors"
    save_file(full, tmp_path / "theirs", metadata={"format": "pt"})
    ours, theirs = out.read_bytes(), (tmp_path / "theirs").read_bytes()
    size, other = (int.from_bytes(content[:8], "little") for content in (ours, theirs))
    assert json.loads(ours[8 : 8 + size]) == json.loads(theirs[8 : 8 + other])
    assert ours[8 + size :] == theirs[8 + other :]


def every_type() -> State:
    """Every type that safetensors has, no and one element, and memory that isn't contiguous."""
    types = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16]
    types += [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16]
    state = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in types}
    state |= {"scalar": torch.tensor(2.5), "none": torch.empty(0, 4), "turned": torch.arange(12.0).view(3, 4).t()}
    return state | {"part": torch.arange(100.0)[10:20], "step 2": torch.arange(100.0)[::7]}


def bits(state: State) -> dict[str, Any]:
    """What there is to compare, also of types for which torch has no comparison."""
    return {
        name: (tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        for name, tensor in state.items()
    }


def test_every_type_survives_every_format(tmp_path: Path) -> None:
    state = every_type()
    torch.save(state, tmp_path / "first")
    place = tmp_path / "first"
    for number, form in enumerate(["safetensors", "dcp", "pt", "sharded", "pt"]):
        place = write(place, tmp_path / f"{number}-{form}", form)
        assert bits(read_all(place)) == bits(state), form
    import_(str(place), str(tmp_path / "checkpoint"))
    assert bits(read_all(tmp_path / "checkpoint", "app.model.")) == bits(state)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_unfinished_output(number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"x": torch.zeros(4)}, tmp_path / "m.pt")

    def write(*_: Any, **__: Any) -> None:
        signal.raise_signal(number)

    for words, target in (
        (["export", "--format=dcp"], "fsdp2_tools.checkpoint.export.write_dcp"),
        (["import"], "fsdp2_tools.checkpoint.import_.write_dcp"),
    ):
        with mock.patch(target, write):
            try:
                status: Any = command([words[0], str(tmp_path / "m.pt"), str(tmp_path / "out"), *words[1:]])
            except SystemExit as ended:
                status = ended.code
        assert (status, os.listdir(tmp_path)) == (128 + number, ["m.pt"])
    err = capsys.readouterr().err
    assert err == ("fsdp2.checkpoint: stopped by Ctrl-C\n" * 2 if number == signal.SIGINT else "")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_dtype_casts_floating_point_alone_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    torch.save({"x": torch.tensor([1.5, float("inf")]), "n": torch.tensor([7])}, tmp_path / "m.pt")
    write(tmp_path / "m.pt", tmp_path / "half.pt", "pt", "--dtype", "fp16")
    expected = {"x": torch.tensor([1.5, float("inf")], dtype=torch.float16), "n": torch.tensor([7])}
    assert same(torch.load(tmp_path / "half.pt"), expected)
    torch.save({"x": torch.tensor([1e6])}, tmp_path / "large.pt")
    for form in ("pt", "safetensors", "dcp"):
        with pytest.raises(Refused, match=r"--dtype fp16: x has values up to 1e\+06, too large for it"):
            export(str(tmp_path / "large.pt"), str(tmp_path / "out"), form, dtype="fp16")
    assert sorted(os.listdir(tmp_path)) == ["half.pt", "large.pt", "m.pt"]


def test_what_safetensors_does_not_have_is_refused(tmp_path: Path) -> None:
    for state, part in (
        ({"z": torch.zeros(1, dtype=torch.complex128)}, "z is torch.complex128"),
        (
            {"__metadata__": torch.zeros(1)},
            "a tensor has the name __metadata__",
        ),
    ):
        torch.save(state, tmp_path / "m.pt")
        with pytest.raises(Refused, match=part):
            export(str(tmp_path / "m.pt"), str(tmp_path / "out"), "safetensors")
        assert os.listdir(tmp_path) == ["m.pt"]


def test_a_damaged_or_dead_checkpoint_is_not_exported(finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    newest = checkpoint(run)
    for path in (newest / "__1_0.distcp", run / "full_model" / "full-model.pt"):
        flip(path)
    for source in (newest, run / "full_model" / "full-model.pt"):
        with pytest.raises(DamagedCheckpoint, match="differs from what was committed"):
            export(str(source), str(tmp_path / "out"), "pt")
    (newest / MARKER).unlink()
    with pytest.raises(Refused, match="is a save that was never committed"):
        export(str(newest), str(tmp_path / "out"), "pt")
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("form", ["pt", "safetensors", "dcp", "import"])
def test_an_end_in_the_middle_leaves_nothing(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, error: Any
) -> None:
    real, count = LocalFiles.fsync, 0

    def fails_at_the_second(self: LocalFiles, name: str) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise error
        real(self, name)

    out = str(tmp_path / "out")
    act = (lambda: import_(str(finished), out)) if form == "import" else (lambda: export(str(finished), out, form))
    monkeypatch.setattr(LocalFiles, "fsync", fails_at_the_second)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else OSError) as caught:
        act()
    assert os.listdir(tmp_path) == []
    assert count == 2
    if error is not KeyboardInterrupt:
        assert "was not written: [Errno 28] No space left on device" in str(caught.value)


@pytest.mark.parametrize("form", FORMATS)
def test_all_is_durable_before_it_has_its_name(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    events: list[tuple[str, ...]] = []

    def record(name: str) -> None:
        real: Any = getattr(LocalFiles, name)

        def recorded(self: LocalFiles, *names: str) -> Any:
            events.append((name, *(os.path.normpath(self.root / one) for one in names)))
            return real(self, *names)

        monkeypatch.setattr(LocalFiles, name, recorded)

    for name in ("fsync", "rename", "create"):
        record(name)
    link = os.link

    def linked(source: Path, target: Path) -> None:
        events.append(("rename", str(source), str(target)))
        link(source, target)

    monkeypatch.setattr(os, "link", linked)
    out = write(finished, tmp_path / "out", form)
    aside = f"{out}.tmp"
    renamed = events.index(("rename", aside, str(out)))
    before, after = events[:renamed], events[renamed + 1 :]
    created = [path for kind, path, *_ in before if kind == "create"]
    synced = {path for kind, path, *_ in before if kind == "fsync"}
    assert created or form == "pt"  # which `whole_or_absent` creates
    assert {*created, aside} <= synced
    assert after == [("fsync", str(tmp_path))]


def test_an_export_that_died_is_named(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "out.tmp").mkdir()
    with pytest.raises(Refused, match=r"out\.tmp: exists; another process is writing there, or has died"):
        export(str(finished), str(tmp_path / "out"), "dcp")
    assert os.listdir(tmp_path / "out.tmp") == []


@pytest.mark.parametrize("form", ["pt", "safetensors", "dcp"])
def test_of_two_exports_at_once_the_first_is_whole(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """The second looks at the place before the first has begun to write, and writes while the first does."""
    real, out = module.opened, tmp_path / "out"

    def meanwhile(place: str) -> Any:
        monkeypatch.undo()
        export(place, str(out), form)
        out.rename(f"{out}.tmp")  # the first isn't done yet
        return real(place)

    monkeypatch.setattr(module, "opened", meanwhile)
    with pytest.raises(Refused, match=r"out\.tmp: exists; another process is writing there"):
        export(str(finished), str(out), form)
    Path(f"{out}.tmp").rename(out)
    assert read_all(out).keys() == read_all(write(finished, tmp_path / "again", form)).keys()


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_what_comes_to_the_place_while_an_export_writes_stays(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    name = {"pt": "write_pt", "safetensors": "write_safetensors"}[form]
    real, out = getattr(module, name), tmp_path / "out"

    def beside(*arguments: Any) -> None:
        real(*arguments)
        out.write_text("mine")

    monkeypatch.setattr(module, name, beside)
    with pytest.raises(Refused, match="out: exists since a moment; nothing is overwritten; choose another path"):
        export(str(finished), str(out), form)
    assert out.read_text() == "mine"
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_a_link_that_a_server_answers_twice_is_this_exports(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def asked_again(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(17, "File exists", str(target))

    monkeypatch.setattr(os, "link", asked_again)
    export(str(finished), str(tmp_path / "out"), "pt")
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_a_file_system_without_hard_links_takes_an_export(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    export(str(finished), str(tmp_path / "out"), "pt")
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


# --- memory ----------------------------------------------------------------------------------------------

MEMORY = """
from fsdp2_tools.checkpoint.__main__ import main
from fsdp2_tools.checkpoint.dcp_write import write_dcp
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.store import write_marker

def command(*line):
    assert main(list(line)) == 0

os.mkdir("source")
files = LocalFiles("source")
tensors = {f"app.model.{i}": torch.empty(1_000_000, device="meta") for i in range(40)}
paths = {name: tuple(name.split(".")) for name in tensors}
make = lambda name: torch.full((1_000_000,), float(name.rsplit(".")[-1]))
mark = lambda written: write_marker(files, {"step": 0, "world_size": 1, "files": written})
write_dcp(files, tensors, {}, paths, make, mark)
for form in ("pt", "safetensors", "dcp"):
    peak_of("export", "source", form, "--format", form)
    peak_of("import", form, "in", "--from", form)
    peak_of("diff", form, "in")
    __import__("shutil").rmtree("in")
peak_of("export", "source", "bf16", "--format", "pt", "--dtype", "bf16")
peak_of("verify", "source")
peak_of("show", "source")
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="measures as Linux does")
def test_memory_is_bounded_by_a_tensor_and_not_by_the_model(tmp_path: Path) -> None:
    _, peaks = peaks_of(MEMORY, tmp_path)
    assert len(peaks) == 12
    # 160 MB in 40 tensors; a tensor is read, cast and written, and what torch loads late is counted too: 0 to 39 MB
    # from run to run, and once more than 40. Whoever held the model would need 160.
    assert [command for size, command in peaks if size > 80_000_000] == []
