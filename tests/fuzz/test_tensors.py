"""full-model.pt and shards: damaged, packed in other ways, or of other tensors; with and without a right marker."""

from __future__ import annotations

import io
import zipfile
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp2.checkpoint.archive import parse_archive
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.store import MARKER
from tests.fuzz.common import trials
from tests.fuzz.damage import PICKLES, WORDS, damaged
from tests.fuzz.runs import Stage
from tests.hostile.common import vouch

pytestmark = pytest.mark.filterwarnings("ignore:Duplicate name")

OF_THE_MODEL = ["show the model", "export the model", "infer", "init from", "verify", "diff"]
OF_SHARDS = ["verify", "verify one", "show", "diff", "export", "import", "infer sharded", "resume", "resume elsewhere"]

DTYPES = st.sampled_from([torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@st.composite
def repacked(draw: st.DrawFn, content: bytes) -> bytes:
    """An archive whose entries are compressed, doubled, renamed, missing, cut, or overlap."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new:
        names = old.namelist()
        chosen = draw(st.sampled_from(names))
        how = draw(st.sampled_from(["deflate", "double", "rename", "leave out", "cut", "overlap", "pickle", "nothing"]))
        for name in names:
            raw = old.read(name)
            if how == "pickle" and name.endswith("/data.pkl"):
                raw = draw(PICKLES)
            if name != chosen:
                new.writestr(name, raw)
            elif how == "cut":
                new.writestr(name, raw[: draw(st.integers(0, len(raw)))])
            elif how == "rename":
                new.writestr(draw(st.sampled_from(["a/data.pkl", "data.pkl", "../x", *names])), raw)
            elif how != "leave out":
                new.writestr(name, raw, zipfile.ZIP_DEFLATED if how == "deflate" else zipfile.ZIP_STORED)
            if name == chosen and how == "double":
                new.writestr(name, raw)
        if how == "overlap":
            for info in new.filelist:
                info.header_offset = new.filelist[0].header_offset
    return file.getvalue()


def _changed_tensor(draw: st.DrawFn, tensor: torch.Tensor) -> Any:
    how = draw(st.sampled_from(["nan", "dtype", "shape", "stride", "expanded", "sparse", "parameter", "none", "list"]))
    if how == "nan":
        changed = tensor.clone()
        changed.reshape(-1)[: draw(st.integers(1, 9))] = draw(st.sampled_from([float("nan"), float("inf"), -1e30]))
        return changed
    return {
        "dtype": lambda: tensor.to(draw(DTYPES)),
        "shape": lambda: tensor.reshape(-1)[: draw(st.integers(0, tensor.numel()))].clone(),
        "stride": lambda: tensor.reshape(-1).repeat_interleave(2)[::2].reshape(tensor.shape),
        "expanded": lambda: torch.zeros(1).expand(draw(st.sampled_from([5, 1 << 20, 1 << 40]))),
        "sparse": lambda: tensor.reshape(1, -1).to_sparse(),
        "parameter": lambda: torch.nn.Parameter(tensor, requires_grad=False),
        "none": lambda: None,
        "list": lambda: [tensor, {"a": tensor}],
    }[how]()


@st.composite
def changed_state(draw: st.DrawFn, state: dict[str, Any]) -> Any:
    """A full model's file with other tensors, names, or around it."""
    state = dict(state)
    for name in draw(st.lists(st.sampled_from(sorted(state)), min_size=1, max_size=2, unique=True)):
        tensor = state.pop(name)
        if draw(st.integers(0, 3)):
            state[name] = _changed_tensor(draw, tensor)
        else:
            state[draw(st.sampled_from(["x", "module." + name, *WORDS]))] = tensor
    return draw(st.sampled_from([state, state, {"model": state}, {"app": {"model": state}, "epoch": 1}, [state]]))


def _changed(data: st.DataObject, content: bytes) -> bytes:
    how = data.draw(st.sampled_from(["bytes", "packed", "state", "state"]))
    if how == "state":
        return saved(data.draw(changed_state(torch.load(io.BytesIO(content), weights_only=True))))
    return data.draw((damaged if how == "bytes" else repacked)(content))


@given(st.data())
@trials(300)
def test_reading(stage: Stage, data: st.DataObject) -> None:
    changed = _changed(data, saved({"a": torch.ones(3, 2), "b": torch.zeros(4)}))
    with suppress(Refused):
        parse_archive(memoryview(bytearray(changed)))


@given(st.data())
@trials(50)
def test_the_full_model(stage: Stage, data: st.DataObject) -> None:
    run = stage.set()
    file = run / "full_model" / "full-model.pt"
    stage.write(file, _changed(data, file.read_bytes()))
    marker = data.draw(st.sampled_from(["right", "right", "none", "another's"]))
    if marker == "right":
        vouch(LocalFiles(file.parent))
    elif marker == "none":
        (file.parent / MARKER).unlink()
    stage.look(*data.draw(st.lists(st.sampled_from(OF_THE_MODEL), min_size=1, max_size=2, unique=True)))


@given(st.data())
@trials(40)
def test_shards(stage: Stage, data: st.DataObject) -> None:
    stage.set()
    file = stage.step / data.draw(st.sampled_from(["__0_0.distcp", "__1_0.distcp"]))
    stage.write(file, data.draw(damaged(file.read_bytes())))
    vouch(LocalFiles(stage.step))
    stage.look(*data.draw(st.lists(st.sampled_from(OF_SHARDS), min_size=1, max_size=2, unique=True)))
