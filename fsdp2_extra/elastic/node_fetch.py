"""A checkpoint sent from the memory of one node to that of another, over gloo."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp2.checkpoint.dcp_files import HashingStream
from fsdp2.checkpoint.disk import disk_errors
from fsdp2.checkpoint.files import Files, publish
from fsdp2.checkpoint.safe_reader import read_slice
from fsdp2.checkpoint.store import MARKER, DamagedCheckpoint, Store, read_marker
from fsdp2.options.errors import ConfigError
from fsdp2.run.process.group import together
from fsdp2.run.process.runtime import World

_PIECE_BYTES = 64 << 20


def fetch(store: Store, step: int, pairs: Sequence[tuple[int, int]], world: World) -> None:
    """Copy a step's checkpoint from the first node of each pair to the second. A collective call.

    The ranks of a node send and receive its files side by side. It is committed there, by the marker that vouches for
    it where it came from, when all files have that marker's sizes and hashes. Raises ConfigError on every rank if not.
    """
    node, mine, per_node = world.rank // world.local_world_size, world.local_rank, world.local_world_size
    content, checkpoint = b"", store.checkpoint(step)
    with together(), _refused(store, step):
        if any(node == target for _, target in pairs) and mine == 0:
            store.clear()  # what doesn't count may be of this step: of an earlier start, or damaged
            store.begin(step)
    with together(), _refused(store, step):
        for source, target in pairs:  # in the same order on all ranks, so that none waits for one that waits for it
            if node == source:
                _send_files(checkpoint, mine, per_node, target * per_node + mine)
            elif node == target:
                content = _receive_files(checkpoint, mine, per_node, source * per_node + mine)
    with together(), _refused(store, step):
        if content and mine == 0:
            publish(checkpoint, MARKER, content)


@contextmanager
def _refused(store: Store, step: int) -> Iterator[None]:
    try:
        with disk_errors(store.files):
            yield
    except (OSError, DamagedCheckpoint) as error:
        raise ConfigError(f"--memory-checkpoint: step {step} could not be copied to this node: {error}") from None


def _names(marker: dict[str, Any], mine: int, per_node: int) -> list[str]:
    return sorted(marker["files"])[mine::per_node]


def _send_files(checkpoint: Files, mine: int, per_node: int, target: int) -> None:
    content = checkpoint.read(MARKER)
    marker = read_marker(checkpoint)
    dist.send(torch.tensor([len(content)]), target)
    dist.send(_tensor(content), target)
    for name in _names(marker, mine, per_node):
        size = marker["files"][name]["size"]
        with checkpoint.open(name) as file:
            for at in range(0, size, _PIECE_BYTES):
                dist.send(_tensor(read_slice(file, size, at, min(_PIECE_BYTES, size - at))), target)


def _receive_files(checkpoint: Files, mine: int, per_node: int, source: int) -> bytes:
    """The marker, as it is. After an error the rest is still taken, since its sender would wait."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source)
    raw = _received(int(length), source).numpy().tobytes()
    marker = json.loads(raw)  # of the same job; as a checkpoint's it is read again before anything is loaded
    failure: Exception | None = None
    for name in _names(marker, mine, per_node):
        expected = marker["files"][name]
        pieces = (min(_PIECE_BYTES, expected["size"] - at) for at in range(0, expected["size"], _PIECE_BYTES))
        arriving = map(partial(_received, source=source), pieces)
        try:
            with disk_errors(checkpoint), HashingStream(checkpoint.create(name)) as stream:
                for piece in arriving:
                    stream.write(piece.numpy().data)
            if stream.fingerprint() != expected:
                raise DamagedCheckpoint(f"{name} differs from what was committed")
        except (OSError, DamagedCheckpoint) as error:
            failure = error
            for _ in arriving:
                pass
    if failure is not None:
        raise failure
    return raw


def _tensor(content: bytes | memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _received(size: int, source: int) -> torch.Tensor:
    tensor = torch.empty(size, dtype=torch.uint8)
    dist.recv(tensor, source)
    return tensor
