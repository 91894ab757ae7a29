"""Bytes of the running Python's standard library: real text that every machine has."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch

from fsdp2.data.splits import Dataset, Windows

VOCAB_SIZE = 256


def _text(files: list[Path]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def is_test(file: Path) -> bool:
    """One file in ten, by a hash of its name: whole files, so that no function is in both splits."""
    return hashlib.sha256(file.name.encode()).digest()[0] < 26


def load(seq_len: int) -> Dataset:
    """Windows of `seq_len` bytes from the library's top-level modules, split by file."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    train, test = (Windows(_text([f for f in files if is_test(f) == want]), seq_len) for want in (False, True))
    return Dataset(train, test, [repr(chr(byte))[1:-1] for byte in range(VOCAB_SIZE)])
