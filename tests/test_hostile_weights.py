"""Weights of strangers: each file that isn't what it should be ends in one line, and no code in it is run."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp

from fsdp2 import models
from fsdp2.checkpoint.sources.safetensors_files import INDEX, layout
from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.run.preflight import preflight
from fsdp2.run.process.runtime import World
from tests.fuzz.common import one_line
from tests.harness import Payload, small
from tests.test_weights import tiny

State = dict[str, Tensor]
Header = dict[str, Any]


@pytest.fixture(scope="module")
def state() -> State:
    return tiny()


def refused(place: Path, *more: str, run: Path) -> str:
    """What preflight says to weights: it comes before any process group and any run directory."""
    with pytest.raises(ConfigError) as caught:
        preflight(parse(small(run, f"--init-from={place}", *more)), World(0, 1, 0, 1))
    said = str(caught.value)
    one_line(said)
    assert said.startswith(f"--init-from {place}: ")
    assert not run.exists()
    return said.removeprefix(f"--init-from {place}: ").replace(f"{place}", "")


def file_of(state: State, change: Callable[[Header, str, str], Any] = lambda *_: None) -> bytes:
    """A safetensors file whose header was changed; the change gets the names of two tensors."""
    start, places = layout(state)
    header = json.loads(start[8:])
    changed = change(header, *list(places)[:2])
    text = json.dumps(header).encode() if changed is None else changed
    return struct.pack("<Q", len(text)) + text + b"".join(state[name].numpy().tobytes() for name in places)


def _set(header: Header, name: str, **fields: Any) -> None:
    header[name].update(fields)


def _beyond(header: Header, name: str, other: str) -> None:
    last = max(header, key=lambda one: header[one].get("data_offsets", [0])[0])
    header[last]["data_offsets"] = [offset + 4096 for offset in header[last]["data_offsets"]]


def _twice(header: Header, name: str, other: str) -> bytes:
    return json.dumps(header)[:-1].encode() + f', "{name}": {json.dumps(header[name])}}}'.encode()


HEADERS: dict[str, tuple[Callable[[Header, str, str], Any], str]] = {
    "offsets beyond the file": (_beyond, "invalid offset for tensor"),
    "two in one place": (lambda h, a, b: _set(h, b, **h[a]), "invalid offset for tensor"),
    "offsets that go back": (lambda h, a, b: h[a]["data_offsets"].reverse(), "invalid offset for tensor"),
    "a negative offset": (lambda h, a, b: _set(h, a, data_offsets=[-8, 8]), "expected usize"),
    "a dtype of another size": (lambda h, a, b: _set(h, a, dtype="F64"), "invalid shape, data type, or offset"),
    "a dtype that isn't one": (lambda h, a, b: _set(h, a, dtype="Q99"), "unknown variant"),
    "a shape without end": (lambda h, a, b: _set(h, a, shape=[2**62, 2**62]), "not a complete safetensors file"),
    "a negative shape": (lambda h, a, b: _set(h, a, shape=[-1]), "expected usize"),
    "thousands of dimensions": (lambda h, a, b: h[a]["shape"].extend([1] * 3000), "has a shape that isn't valid"),
    "nothing, of strides without end": (
        lambda h, a, b: h.__setitem__("e", {"dtype": "F32", "shape": [0, 2**62, 8], "data_offsets": [0, 0]}),
        "e has a shape beyond what any tensor has",
    ),
    "an entry that is a list": (lambda h, a, b: h.__setitem__(a, [1]), "not a complete safetensors file"),
    "no JSON": (lambda h, a, b: b"{" * 1000, "invalid JSON in header"),
    "no UTF-8": (lambda h, a, b: b'{"\xff": 1}', "invalid UTF-8 in header"),
    "a name twice": (_twice, "its header has the same name twice"),
    "integers for weights": (lambda h, a, b: _set(h, a, dtype="I32"), "torch.int32 in the file, torch.float32 in the"),
    "another shape": (lambda h, a, b: h[a]["shape"].append(1), "in the file"),
    "another name": (lambda h, a, b: h.__setitem__("../\x1b[31m\n", h.pop(a)), "only in the model"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies(state: State, tmp_path: Path, name: str) -> None:
    change, part = HEADERS[name]
    file = tmp_path / "one.safetensors"
    file.write_bytes(file_of(state, change))
    assert part in refused(file, run=tmp_path / "run")


def test_a_file_made_in_this_way_is_good(state: State, tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    file.write_bytes(file_of(state))
    job = preflight(parse(small(tmp_path / "run", f"--init-from={file}")), World(0, 1, 0, 1))
    with job.hold:
        assert job.note == f"--init-from {file}: unverified: no COMMIT.json"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (lambda whole: b"", "header too small"),
        (lambda whole: whole[:7], "header too small"),
        (lambda whole: whole[:-100], "incomplete metadata"),
        (lambda whole: whole + b"more", "incomplete metadata"),
        (lambda whole: struct.pack("<Q", 1 << 60) + b"{}", "header too large"),
        (lambda whole: struct.pack("<Q", 99_000_000) + b"{}", "invalid header length"),
    ],
)
def test_a_file_that_is_cut(state: State, tmp_path: Path, content: Callable[[bytes], bytes], part: str) -> None:
    file = tmp_path / "one.safetensors"
    file.write_bytes(content(file_of(state)))
    assert part in refused(file, run=tmp_path / "run")
    assert part in refused(file, "--init-partial", run=tmp_path / "run"), "what is damaged is no other model"


def in_two(folder: Path, state: State, index: Callable[[dict[str, Any]], bytes]) -> Path:
    """A folder with two files, of which an index says whatever it says."""
    folder.mkdir()
    files = {f"{part}.safetensors": list(state)[part::2] for part in range(2)}
    for file, names in files.items():
        save_file({name: state[name] for name in names}, folder / file)
    (folder / INDEX).write_bytes(index({name: file for file, names in files.items() for name in names}))
    return folder


def weight_map(change: dict[str, Any], names: dict[str, Any]) -> bytes:
    changed = {name or next(iter(names)): file for name, file in change.items()}
    return json.dumps({"weight_map": {**names, **changed}}).encode()


INDEXES: dict[str, tuple[Callable[[dict[str, Any]], bytes], str]] = {
    "out of the folder": (partial(weight_map, {"": "../outside.safetensors"}), "leads out of the checkpoint"),
    "from the root": (partial(weight_map, {"": "/etc/passwd"}), "leads out of the checkpoint"),
    "by a detour": (partial(weight_map, {"": "a/../../outside.safetensors"}), "leads out of the checkpoint"),
    "the folder": (partial(weight_map, {"": "."}), "'.' can't be the name of a file"),
    "a number": (partial(weight_map, {"": 5}), "can't be used"),
    "what isn't there": (partial(weight_map, {"": "2.safetensors"}), f"2.safetensors is missing, which {INDEX} names"),
    "a tensor too many": (partial(weight_map, {"ghost": "0.safetensors"}), "disagree about ghost"),
    "a tensor elsewhere": (partial(weight_map, {"": "1.safetensors"}), "disagree about"),
    "nothing": (lambda names: b"", "can't be used"),
    "a list": (lambda names: b"[]", "can't be used"),
    "no map": (lambda names: b'{"metadata": {}}', "can't be used"),
    "a map of nothing": (lambda names: b'{"weight_map": {}}', "holds no weights of a model"),
    "lists without end": (lambda names: b"[" * 100_000, "can't be used"),
    "a number without end": (lambda names: b'{"weight_map": ' + b"9" * 5000 + b"}", "can't be used"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_lies(state: State, tmp_path: Path, name: str) -> None:
    index, part = INDEXES[name]
    save_file(state, tmp_path / "outside.safetensors")
    folder = in_two(tmp_path / "model", state, index)
    assert part in refused(folder, run=tmp_path / "run")


def test_what_is_no_file_hangs_nothing(state: State, tmp_path: Path) -> None:
    for name, put in (("a device", lambda path: path.symlink_to("/dev/zero")), ("a pipe", os.mkfifo)):
        folder = in_two(tmp_path / name, state, partial(weight_map, {}))
        (folder / "1.safetensors").unlink()
        put(folder / "1.safetensors")
        assert f"is {name} and no file" in refused(folder, run=tmp_path / "run")


def test_code_in_a_pickle_is_not_run(state: State, tmp_path: Path) -> None:
    mark, folder = tmp_path / "ran", tmp_path / "model"
    folder.mkdir()
    torch.save({**state, "more": Payload(mark)}, folder / "pytorch_model.bin")
    assert "only plain tensors with data and plain values are read" in refused(folder, run=tmp_path / "run")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({**state, "more": Payload(mark)}))
    assert "is not a complete archive of torch.save" in refused(folder, run=tmp_path / "run")
    index = {"weight_map": dict.fromkeys(state, "../pytorch_model.bin")}
    (folder / "pytorch_model.bin").rename(tmp_path / "pytorch_model.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert "leads out of the checkpoint" in refused(folder, run=tmp_path / "run")
    assert not mark.exists()


def _archive_with(shape: tuple[int, int, int], place: Path) -> None:
    """A file of torch.save with an empty tensor, of which the pickle says another shape."""
    torch.save({"e": torch.empty(0, 5, 7)}, place)
    with zipfile.ZipFile(place) as archive:
        content = {info.filename: archive.read(info) for info in archive.infolist()}
    numbers = (pickle.LONG1 + b"\x08" + one.to_bytes(8, "little") for one in shape)
    said = b"K\x00K\x05K\x07" + pickle.TUPLE3
    with zipfile.ZipFile(place, "w") as archive:
        for name, data in content.items():
            assert (said in data) is name.endswith("/data.pkl")
            archive.writestr(name, data.replace(said, b"".join(numbers) + pickle.TUPLE3))


def _metadata_with(shape: Sequence[int], folder: Path) -> None:
    folder.mkdir()
    entry: Any = dcp.TensorStorageMetadata(dcp.TensorProperties(torch.float32), torch.Size(shape), [])
    entry.size = tuple(shape)
    (folder / ".metadata").write_bytes(pickle.dumps(dcp.Metadata({"e": entry}, None, {}), protocol=4))


def test_an_empty_tensor_of_strides_without_end(tmp_path: Path) -> None:
    _archive_with((0, 2**61, 8), tmp_path / "e.pt")
    said = refused(tmp_path / "e.pt", run=tmp_path / "run")
    assert "can't be loaded: it has a tensor's shape beyond what any tensor has" in said
    for shape, part in (((0, 2**61, 8), "beyond what any tensor has"), ([1] * 99, "that isn't valid")):
        folder = tmp_path / f"of {len(shape)}"
        _metadata_with(shape, folder)
        said = refused(folder, run=tmp_path / "run")
        assert f".metadata can't be used: it has a size {part}, for 'e'" in said


def test_weights_of_another_architecture(tmp_path: Path) -> None:
    save_file(models.get("cnn").build("tiny").state_dict(), tmp_path / "cnn.safetensors")
    said = refused(tmp_path / "cnn.safetensors", run=tmp_path / "run")
    assert "only in the file" in said
    assert said.endswith("give weights of this model, or --init-from scratch for none")
