"""What the tests of `python -m fsdp2.checkpoint` share."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.safe_reader import SafeReader
from fsdp2.checkpoint.sources.opening import opened
from fsdp2_tools.checkpoint.__main__ import main

Cli = Callable[..., tuple[int, str, str]]
State = dict[str, Tensor]

FORMATS = {"pt": (), "safetensors": (), "sharded": ("--max-shard-size", "30kB"), "dcp": ()}


def checkpoint(run: Path, step: int = 5) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change_metadata(directory: Path, change: Callable[[Metadata], None]) -> None:
    metadata = SafeReader(LocalFiles(directory)).read_metadata()
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def refusal(answer: tuple[int, str, str]) -> str:
    """The one line of a refusal, which prints nothing else."""
    status, out, err = answer
    assert (status, out, err.count("\n")) == (2, "", 1), answer
    assert err.startswith("fsdp2.checkpoint: error: ")
    return err


def write(place: Path, out: Path, form: str, *options: str) -> Path:
    form, more = "safetensors" if form == "sharded" else form, FORMATS[form]
    assert main(["export", str(place), str(out), "--format", form, *more, *options]) == 0
    return out


def read_all(place: Path, prefix: str = "") -> State:
    with opened(str(place)) as source:
        return {name.removeprefix(prefix): source.read(name).clone() for name in source.tensors}
