"""What the commands refuse, in a line: wrong arguments, and what a stranger made."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from fsdp2_tools.checkpoint.__main__ import main
from tests.commands.common import Cli, change_metadata, refusal
from tests.harness import Payload, python_environment


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("show nothing-here", "there is nothing; give a checkpoint"),
        ("show {empty}", "holds no .metadata, no committed checkpoint, no .safetensors and no pytorch_model.bin"),
        ("diff {run} {empty}", "holds no .metadata"),
        ("verify nowhere://x", "is not a protocol that fsspec knows"),
        ("show", "the following arguments are required: PATH"),
        ("export {run} {empty}/x", "required: --format"),
        ("export {run} {empty}/x --format onnx", "invalid choice: 'onnx'"),
        ("export {run} {empty}/x --format dcp --max-shard-size 1GB", "only safetensors has shards; drop it"),
        ("export {run} {empty}/x --format safetensors --max-shard-size 0", "0 must be a number of bytes such as 500MB"),
        ("export {run} {empty}/x --format safetensors --max-shard-size 4XB", "4XB must be a number of bytes"),
        ("export {run} {empty} --format safetensors", "exists; nothing is overwritten"),
        ("import {run} {empty}/x --from pt", "is no file, but a folder"),
        ("import {empty} {empty}/x --from safetensors", "holds no .safetensors"),
        ("import {full} {empty}/x --from dcp", "is a file; a DCP checkpoint is a directory"),
        ("import {full} {empty}/x --from safetensors", "is not a complete safetensors file"),
        ("import {full} {empty}/step-00000007", "an imported checkpoint is of step 0"),
        ("import {full}/../full-optimizer.pt {empty}/x", "it isn't clear which are the weights"),
        ("list {run} --quik", "--quik: no such flag; did you mean --quick?"),
    ],
)
def test_refusals_are_one_line(finished: Path, cli: Cli, tmp_path: Path, line: str, part: str) -> None:
    full = finished / "full_model" / "full-model.pt"
    arguments = [word.format(run=finished, full=full, empty=tmp_path) for word in line.split()]
    arguments = [argument.replace("full-model.pt/../", "") for argument in arguments]
    assert part in refusal(cli(*arguments))
    assert list(tmp_path.iterdir()) == []


def test_without_safetensors_the_extra_is_named(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "m.pt")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert cli("export", tmp_path / "m.pt", tmp_path / "out", "--format", "safetensors")[0] == 0
    assert "pip install -e '.[safetensors]'" in refusal(cli("show", tmp_path / "out"))


def test_as_a_program_into_a_pipe_that_closes(finished: Path) -> None:
    command = [sys.executable, "-m", "fsdp2.checkpoint", "show", str(finished)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=python_environment()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


# --- strangers -------------------------------------------------------------------------------------------


def _pt_with_code(place: Path, trace: Path) -> Path:
    torch.save({"a": torch.zeros(1), "b": Payload(trace)}, place / "m.pt")
    return place / "m.pt"


def _metadata_with_code(place: Path, trace: Path) -> Path:
    dcp.save({"a": torch.zeros(1)}, checkpoint_id=place)
    (place / ".metadata").write_bytes(pickle.dumps(Payload(trace)))
    return place


def _value_with_code(place: Path, trace: Path) -> Path:
    group = {"params": ["a"], "lr": Payload(trace)}
    state = {"model": {"a": torch.zeros(1)}, "optim": {"state": {"a": {}}, "param_groups": [group]}}
    dcp.save(state, checkpoint_id=place)
    return place


def _shard_with_code(place: Path, trace: Path) -> Path:
    dcp.save({"a": torch.zeros(1)}, checkpoint_id=place)
    content = pickle.dumps(Payload(trace))
    (place / "__0_0.distcp").write_bytes(content)

    def point(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(content)

    change_metadata(place, point)
    return place


def _dcp_that_leads_out(place: Path, trace: Path) -> Path:
    dcp.save({"a": torch.zeros(1)}, checkpoint_id=place)
    shutil.move(place / "__0_0.distcp", place.parent / "secret.distcp")

    def point(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "../secret.distcp"

    change_metadata(place, point)
    return place


def _index_that_leads_out(place: Path, trace: Path) -> Path:
    torch.save({"a": torch.zeros(1)}, place.parent / "secret.pt")
    assert main(["export", str(place.parent / "secret.pt"), str(place.parent / "s"), "--format=safetensors"]) == 0
    index = {"metadata": {}, "weight_map": {"a": "../s/model.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return place


def _index_of_another_file(place: Path, trace: Path) -> Path:
    torch.save({"a": torch.zeros(1)}, place.parent / "m.pt")
    place.rmdir()
    assert main(["export", str(place.parent / "m.pt"), str(place), "--format=safetensors"]) == 0
    (place / "model.safetensors").rename(place / "model-1.safetensors")
    index = {"metadata": {}, "weight_map": {"b": "model-1.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return place


def _a_tensor_larger_than_its_bytes(place: Path, trace: Path) -> Path:
    torch.save({"a": torch.zeros(1).expand(1 << 40)}, place / "m.pt")
    return place / "m.pt"


def _a_tree_within_itself(place: Path, trace: Path) -> Path:
    tree: dict[str, Any] = {"a": torch.zeros(1)}
    tree["b"] = tree
    torch.save(tree, place / "m.pt")
    return place / "m.pt"


def _a_sparse_tensor(place: Path, trace: Path) -> Path:
    torch.save({"a": torch.eye(3).to_sparse()}, place / "m.pt")
    return place / "m.pt"


def _no_archive(place: Path, trace: Path) -> Path:
    (place / "m.pt").write_bytes(b"not an archive")
    return place / "m.pt"


def _the_old_format(place: Path, trace: Path) -> Path:
    torch.save({"a": torch.zeros(1)}, place / "m.pt", _use_new_zipfile_serialization=False)
    return place / "m.pt"


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (_pt_with_code, "holds a pathlib.Path, and only plain tensors"),
        (_metadata_with_code, "which a checkpoint's metadata never holds"),
        (_value_with_code, "optim.param_groups.0.lr can't be read"),
        (_shard_with_code, "a can't be read"),
        (_dcp_that_leads_out, "leads out of the checkpoint"),
        (_index_that_leads_out, "leads out of the checkpoint"),
        (_index_of_another_file, "disagree about a, b"),
        (_a_tensor_larger_than_its_bytes, "save it contiguous"),
        (_a_tree_within_itself, "is nested deeper than 100, or holds itself"),
        (_a_sparse_tensor, "holds a torch._utils._rebuild_sparse_tensor, and only plain tensors with data"),
        (_no_archive, "m.pt: "),
        (_the_old_format, "has to be saved again"),
    ],
)
def test_a_hostile_or_useless_source_is_refused_and_leaves_nothing(
    cli: Cli, tmp_path: Path, make: Callable[[Path, Path], Path], part: str
) -> None:
    place, trace = tmp_path / "source", tmp_path / "trace"
    place.mkdir()
    source = make(place, trace)
    before = sorted(tmp_path.rglob("*"))
    cli("show", tmp_path)  # takes what was printed while it was made
    for line in (["import", source, tmp_path / "out"], ["export", source, tmp_path / "out", "--format=pt"]):
        if make is not _value_with_code or line[0] == "import":  # an export reads no optimizer
            assert part in refusal(cli(*line))
            assert sorted(tmp_path.rglob("*")) == before
