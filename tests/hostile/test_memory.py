"""A small file takes no large memory: every command, under a limit of address space."""

from __future__ import annotations

import copy
import io
import json
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.safe_reader import SafeReader
from fsdp2_extra.models.meta_trial import wrong_with
from tests.harness import python_environment
from tests.hostile.common import checkpoint_of, vouch

MEGABYTES = 600

UNDER_A_LIMIT = f"""
import json, resource, sys
from pathlib import Path
from fsdp2 import infer; from fsdp2.run import preflight
from fsdp2_tools.checkpoint.__main__ import main
from fsdp2.options.errors import ConfigError

used = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (used + ({MEGABYTES} << 20),) * 2)
for line in json.loads(sys.argv[1]):
    if line[0] == "infer":
        try:
            infer.main(Path(line[1]))
        except ConfigError as error:
            print("fsdp2: error:", error, file=sys.stderr)
            print("status", 2)
    else:
        print("status", main(line))
"""


def _metadata(run: Path, content: bytes) -> None:
    checkpoint = checkpoint_of(run)
    checkpoint.write(".metadata", content)
    vouch(checkpoint)


def _a_high_number_in_metadata(run: Path) -> None:
    sound = checkpoint_of(run).read(".metadata")
    # The number is put where the pickle's first memo is; the C unpickler makes a table as long.
    _metadata(run, sound[:2] + b"Nr\xff\xff\xff\x0f0" + sound[2:])


def _claims(run: Path) -> None:
    """Tensors of 256 GB, each in one chunk of some bytes."""
    checkpoint = checkpoint_of(run)
    metadata: Any = SafeReader(checkpoint).read_metadata()
    for name, entry in metadata.state_dict_metadata.items():
        if name.startswith("app.model."):
            entry.size = torch.Size([1 << 36])
            entry.chunks = [ChunkStorageMetadata(torch.Size([0]), entry.size)]
    for index in [index for index in metadata.storage_data if index.fqn.startswith("app.model.")]:
        info = metadata.storage_data.pop(index)
        metadata.storage_data[type(index)(index.fqn, (0,))] = info
    _metadata(run, pickle.dumps(metadata))


def _shards(run: Path, content: bytes) -> None:
    """Every entry of the checkpoint is these bytes."""
    checkpoint = checkpoint_of(run)
    metadata: Any = SafeReader(checkpoint).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path, info.offset, info.length = "__0_0.distcp", 0, len(content)
    checkpoint.write("__0_0.distcp", content)
    (checkpoint.root / "__1_0.distcp").unlink()
    _metadata(run, pickle.dumps(metadata))
    LocalFiles(run / "full_model").write("full-model.pt", content)
    vouch(LocalFiles(run / "full_model"))


def _rewritten(change: Callable[[zipfile.ZipFile, str, bytes], None]) -> bytes:
    """torch's archive of one tensor, each of its entries as `change` writes it."""
    plain, file = io.BytesIO(), io.BytesIO()
    torch.save({"a": torch.zeros(1 << 18)}, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            change(new, name, old.read(name))
    return file.getvalue()


def _compressed(run: Path) -> None:
    def change(new: zipfile.ZipFile, name: str, content: bytes) -> None:
        if not name.endswith("data/0"):
            new.writestr(name, content)
            return
        info = zipfile.ZipInfo(name)
        info.compress_type = zipfile.ZIP_DEFLATED
        with new.open(info, "w", force_zip64=True) as target:
            for _ in range(MEGABYTES // 8 + 1):
                target.write(bytes(8 << 20))

    _shards(run, _rewritten(change))


def _overlapping(run: Path) -> None:
    def change(new: zipfile.ZipFile, name: str, content: bytes) -> None:
        new.writestr(name, content)
        if name.endswith("data/0"):
            for number in range(1, MEGABYTES):
                info = copy.copy(new.getinfo(name))
                info.filename = info.orig_filename = name[:-1] + str(number)
                new.filelist.append(info)

    _shards(run, _rewritten(change))


def _a_number_of_bytes(run: Path) -> None:
    def change(new: zipfile.ZipFile, name: str, content: bytes) -> None:
        made = b"\x80\x02c__builtin__\nbytearray\n\x8a\x06\x00\x00\x00\x00\x10\x00\x85R."
        new.writestr(name, made if name.endswith("data.pkl") else content)

    _shards(run, _rewritten(change))


HOSTILE = [_a_high_number_in_metadata, _claims, _compressed, _overlapping, _a_number_of_bytes]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures as Linux does")
def test_no_file_takes_more_memory_than_it_has(finished: Path, tmp_path: Path) -> None:
    lines = []
    for make in HOSTILE:
        run = tmp_path / make.__name__
        shutil.copytree(finished, run)
        make(run)
        lines += [
            ["verify", run],
            ["export", run, tmp_path / "out", "--format", "pt"],
            ["diff", run, run],
            ["import", run, tmp_path / "in"],
        ]
        if make is not _claims:  # of which a table can be made
            lines.append(["show", run])
        if make not in (_a_high_number_in_metadata, _claims):  # which leave the full model alone
            lines += [["infer", run], ["show", run / "full_model" / "full-model.pt"]]
    given = json.dumps([[str(word) for word in line] for line in lines])
    done = subprocess.run(
        [sys.executable, "-c", UNDER_A_LIMIT, given],
        capture_output=True,
        text=True,
        env=python_environment(),
        timeout=100,
    )
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    statuses = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("status ")]
    expected = ["1" if line[0] == "verify" else "2" for line in lines]
    assert list(zip(statuses, lines, strict=True)) == list(zip(expected, lines, strict=True)), done.stderr
    assert "weights_only" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(make.__name__ for make in HOSTILE)


class _Wide(nn.Module):
    """Makes a tensor of so many elements, in the dtype of its weight."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, device="meta"))
        self.elements = elements

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight.expand(self.elements).exp()


@pytest.mark.parametrize(("elements", "wrong"), [(4 << 30, None), (5 << 30, "makes a tensor of 20 GiB")])
def test_a_tensor_that_would_fit_in_half_precision_is_too_large(elements: int, wrong: str | None) -> None:
    assert wrong_with(_Wide(elements), "causal", lambda model, batch: model(batch.inputs)) == wrong
