"""Write a model as safetensors from one process, a few tensors at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from torch import Tensor

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.sources.safetensors_files import shards_of, write_file, write_index

WRITERS = 4  # shards that are written at a time; each has one tensor in memory


def write_safetensors(
    folder: LocalFiles, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor], max_shard_size: int
) -> None:
    """Write `model.safetensors`, or several files and their index, filled in the order of the tensors.

    Args:
        folder: it exists and is empty.
        tensors: name -> tensor on `meta`.
        read: name -> that tensor on the CPU, contiguous.
        max_shard_size: bytes of tensors in one file; a larger tensor has one for itself.

    Raises Refused, naming the tensor, for what the format doesn't have.
    """
    files = shards_of(tensors, max_shard_size)
    one_reads = Lock()  # a source keeps its files open, each with one position

    def read_alone(name: str) -> Tensor:
        with one_reads:
            return read(name)

    # A writer for each shard: while one waits for the disk, others read and copy.
    with ThreadPoolExecutor(WRITERS, thread_name_prefix="writes a shard") as threads:
        for _ in threads.map(lambda file: write_file(folder, file, files[file], read_alone), files):
            pass
    write_index(folder, files)
