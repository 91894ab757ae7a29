"""Files that each rank wrote for itself, put together to whole tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp2.checkpoint.metadata import TreePath, sizes
from fsdp2.checkpoint.pickles import Unread
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.sources.dcp_tensors import misses
from fsdp2.checkpoint.sources.pt_file import open_pt
from fsdp2.checkpoint.sources.source import dotted
from migration.checkpoints.prove import hash_of
from migration.checkpoints.tree import Entry, Tree, tree_of

RANK_FILE = re.compile(r"(.*?rank[-_]?)(\d+)(.*)")
SHARDED = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
OF_SEVERAL = "the files are of several saves, or runs; put the files of one there"


@dataclass
class RankFiles:
    """The files of all ranks.

    Attributes:
        tree: what is whole: sharded tensors put together, and what is the same on all ranks, from rank 0.
        each: the trees of the ranks, for what isn't marked as sharded.
    """

    label: str
    tree: Tree
    each: list[Tree]


def joined(folder: Path, files: Sequence[Path]) -> RankFiles:
    """Open the files of all ranks. Raises Refused if one is missing."""
    numbered = sorted((int(match[2]), path) for path in files if (match := RANK_FILE.fullmatch(path.name)))
    first = RANK_FILE.fullmatch(files[0].name)
    assert first is not None
    label = f"{first[1]}*{first[3]}"
    for rank, (there, _) in enumerate(numbered):
        if rank != there:
            what = f"rank {rank} is missing" if there > rank else f"rank {there} is there twice"
            raise Refused(f"{folder}: {label} of {what}; put the files of all ranks there")
    trees: list[Tree] = [tree_of(open_pt(str(path), path, objects=True)) for _, path in numbered]
    tree: dict[TreePath, Entry] = {}
    for path, entry in trees[0].items():
        value = entry.read() if entry.meta is None else None
        if isinstance(value, Unread) and value.named == SHARDED:
            tree[path] = _whole(path, trees)
        else:
            tree[path] = entry
    return RankFiles(label, tree, trees)


def _whole(path: TreePath, trees: Sequence[Tree]) -> Entry:
    """One sharded tensor, of the shards that the ranks have of it."""
    where = trees[0][path].where
    shards: list[tuple[torch.Size, Tensor]] = []
    try:
        size = sizes(trees[0][path].read().state[1].state["size"], "size")
        for tree in trees:
            local = tree[path].read().state[0] if path in tree else []
            for shard in local:
                offsets = sizes(shard.state["metadata"].state["shard_offsets"], "shard's place")
                shards.append((offsets, shard.state["tensor"].detach()))
        problem = misses(size, [(offsets, tuple(tensor.shape)) for offsets, tensor in shards])
        dtypes = {tensor.dtype for _, tensor in shards}
    except Refused as error:
        raise Refused(f"{where} {error}") from None
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise Refused(f"{where}: its shards are not as torch saves them ({type(error).__name__}: {error})") from None
    if problem or len(dtypes) != 1:
        raise Refused(f"{where}: {problem or 'its shards have several dtypes'}; a rank's file is missing or foreign")
    meta = torch.empty(size, dtype=dtypes.pop(), device="meta")
    return Entry(meta, partial(_assemble, where, meta, shards), f"{dotted(path)} of all ranks")


def _assemble(where: str, meta: Tensor, shards: Sequence[tuple[torch.Size, Tensor]]) -> Tensor:
    whole, filled = torch.empty(meta.shape, dtype=meta.dtype), set()
    for offsets, tensor in shards:
        part: Any = tuple(slice(start, start + length) for start, length in zip(offsets, tensor.shape, strict=True))
        # Replicas have the same shard.
        if (offsets, tensor.shape) in filled and hash_of(whole[part]) != hash_of(tensor):
            raise Refused(f"{where}: two ranks' shards of one place differ; {OF_SEVERAL}")
        filled.add((offsets, tensor.shape))
        whole[part] = tensor
    return whole
