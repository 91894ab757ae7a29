"""`.metadata`: damaged, forged, or any pickle at all, with a marker that vouches for it."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
from contextlib import suppress
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.metadata import load_metadata
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.safe_reader import SafeReader
from tests.fuzz.common import trials
from tests.fuzz.damage import LARGE, PICKLES, WORDS, damaged
from tests.fuzz.runs import Stage
from tests.hostile.common import vouch

LOOKS = ["verify", "verify one", "show", "diff", "export", "import", "infer sharded", "resume", "resume elsewhere"]
CLASSES = [Path, PosixPath, torch.Tensor, torch.Size, _StorageInfo, dcp.Metadata, dcp.MetadataIndex, dict]
CLASSES += [dcp.TensorStorageMetadata, dcp.ChunkStorageMetadata, dcp.TensorProperties, dcp.StorageMeta]

NUMBERS = st.one_of(st.integers(-1, 200), st.sampled_from(LARGE))
SIZES = st.one_of(
    st.lists(NUMBERS, max_size=4).map(tuple),
    st.lists(st.integers(0, 40), max_size=4).map(torch.Size),
    st.sampled_from([None, 5, (True,), ("4",), (1.5,), (1,) * 70, ((1,), (2,))]),
)
DTYPES = st.sampled_from([torch.float16, torch.int64, torch.bool, torch.complex128, torch.qint8, torch.uint16, "f", 5])
ANYTHING: st.SearchStrategy[Any] = st.one_of(NUMBERS, st.sampled_from([None, "", b"", [], {}, (), 1.5, *WORDS]))


@st.composite
def changed_metadata(draw: st.DrawFn, sound: dcp.Metadata) -> Any:
    """A checkpoint's metadata with one to three of its entries, chunks, places or paths changed."""
    metadata: Any = copy.deepcopy(sound)
    for _ in range(draw(st.integers(1, 3))):
        entries, places = metadata.state_dict_metadata, metadata.storage_data
        names = sorted(entries, key=lambda name: (isinstance(entries[name], dcp.BytesStorageMetadata), name))
        name = draw(st.sampled_from(names or [""]))
        entry, index = entries.get(name), draw(st.sampled_from(list(places) or [None]))
        how = draw(st.sampled_from([*_OF_TENSORS, "place", "place", "index", "entry", "path", "whole"]))
        if how in _OF_TENSORS and isinstance(entry, dcp.TensorStorageMetadata) and isinstance(entry.chunks, list):
            _OF_TENSORS[how](draw, entry)
        elif how == "place" and index is not None:
            field, values = draw(st.sampled_from(_PLACE))
            places[index] = dataclasses.replace(places[index], **{field: draw(values)})
        elif how == "index" and index is not None:
            info = places.pop(index)
            field, values = draw(st.sampled_from([("fqn", st.sampled_from(names)), *_INDEX]))
            places[dataclasses.replace(index, **{field: draw(values)})] = info
        elif how == "entry":
            others = st.sampled_from([dcp.BytesStorageMetadata(), *entries.values()])
            entries[draw(st.sampled_from([name, *WORDS]))] = draw(st.one_of(others, ANYTHING))
        elif how == "path" and isinstance(metadata.planner_data, dict):
            parts = st.one_of(st.sampled_from([*names, "app", "model", *WORDS, 10**9]), st.integers(-1, 5))
            metadata.planner_data[name] = draw(st.one_of(st.lists(parts, max_size=4).map(tuple), ANYTHING))
        elif how == "whole":
            setattr(metadata, draw(st.sampled_from([f.name for f in dataclasses.fields(metadata)])), draw(ANYTHING))
            break
    return metadata


def _chunk(draw: st.DrawFn, entry: Any) -> None:
    if entry.chunks:
        at = draw(st.integers(0, len(entry.chunks) - 1))
        field = draw(st.sampled_from(["offsets", "sizes"]))
        entry.chunks[at] = dataclasses.replace(entry.chunks[at], **{field: draw(SIZES)})


_OF_TENSORS: dict[str, Any] = {
    "size": lambda draw, entry: setattr(entry, "size", draw(SIZES)),
    "dtype": lambda draw, entry: setattr(entry.properties, "dtype", draw(DTYPES)),
    "chunk": _chunk,
    "doubled": lambda draw, entry: entry.chunks.extend(entry.chunks),
    "missing": lambda draw, entry: entry.chunks and entry.chunks.pop(),
}
_INDEX: list[tuple[str, st.SearchStrategy[Any]]] = [
    ("offset", st.lists(st.integers(-1, 40), max_size=4).map(torch.Size)),
    ("index", NUMBERS),
]
_PLACE: list[tuple[str, st.SearchStrategy[Any]]] = [
    ("relative_path", st.sampled_from([".metadata", "COMMIT.json", "missing", None, 5, *WORDS])),
    ("offset", NUMBERS),
    ("length", NUMBERS),
    ("offset", st.integers(0, 10_000)),
    ("length", st.integers(0, 10_000)),
]


def _functions(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if callable(value) or name == "__slots__"}


@pytest.fixture
def untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The classes that pickles name stay as they are, and no function that they name is called."""
    monkeypatch.chdir(tmp_path)
    before = [_functions(kind) for kind in CLASSES]
    yield
    assert [_functions(kind) for kind in CLASSES] == before
    assert os.listdir(tmp_path) == []


@given(PICKLES)
@trials(250)
def test_any_pickle(untouched: None, content: bytes) -> None:
    with suppress(Refused):
        load_metadata(content)


@given(st.data())
@trials(200)
def test_reading(stage: Stage, untouched: None, data: st.DataObject) -> None:
    content = data.draw(damaged((stage.finished / "checkpoints" / "step-00000003" / ".metadata").read_bytes()))
    with suppress(Refused):
        load_metadata(content)


@given(st.data())
@trials(40)
def test_commands(stage: Stage, untouched: None, data: st.DataObject) -> None:
    stage.set()
    checkpoint = LocalFiles(stage.step)
    how = data.draw(st.sampled_from(["objects"] * 4 + ["bytes", "pickle"]))
    if how == "objects":
        content = pickle.dumps(data.draw(changed_metadata(SafeReader(checkpoint).read_metadata())))
    else:
        content = data.draw(PICKLES if how == "pickle" else damaged(checkpoint.read(".metadata")))
    stage.write(stage.step / ".metadata", content)
    vouch(checkpoint)
    stage.look(*data.draw(st.lists(st.sampled_from(LOOKS), min_size=1, max_size=3, unique=True)))
