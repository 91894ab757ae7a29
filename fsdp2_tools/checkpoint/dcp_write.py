"""Write a DCP directory from one process, one tensor at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from fsdp2.checkpoint.dcp_files import ShardWriter
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.metadata import TreePath
from fsdp2.checkpoint.spool import spool


def write_dcp(
    files: LocalFiles,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    paths: Mapping[str, TreePath],
    read: Callable[[str], Tensor],
    commit: Callable[[Mapping[str, Mapping[str, Any]]], None] = lambda written: None,
) -> None:
    """Write the files of a checkpoint, each durable when this returns. A temporary file takes as much space again.

    Args:
        files: of the new directory; it exists and is empty.
        tensors: name -> tensor on `meta`.
        paths: name -> its place in a nested state dict, of tensors and values.
        read: name -> that tensor on the CPU, contiguous.
        commit: called last, with the fingerprint of every file.
    """
    failure: BaseException | None = None
    with warnings.catch_warnings():
        # It says that there is a single process, which is meant.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            dcp.save(
                {**spool(tensors, read, files.root), **values},
                storage_writer=ShardWriter(files, begin=lambda: None, commit=commit),
                planner=_Named(paths),
                no_dist=True,
            )
        except CheckpointException as error:
            failure, _ = next(iter(error.failures.values()))
    if failure is not None:  # raised here, it keeps what it was caused by
        raise failure


class _Named(DefaultSavePlanner):
    """Saves under the names that it is given, and notes the paths that belong to them."""

    def __init__(self, paths: Mapping[str, TreePath]) -> None:
        super().__init__()
        self._paths = paths

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.mappings, self.is_coordinator = state_dict, dict(self._paths), is_coordinator
