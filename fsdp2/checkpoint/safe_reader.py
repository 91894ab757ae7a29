"""DCP's `.metadata` is a pickle, and unpickling a stranger's file runs whatever it says. Here only the few
classes that metadata consists of are allowed."""

from __future__ import annotations

import pickle
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    # Until torch 2.2 a tensor's properties were a class of sharded tensors.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("builtins", "set"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


class MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f".metadata asks for {module}.{name}, which a checkpoint's metadata never holds; it was not loaded"
        )


def load_metadata(file: IO[bytes]) -> Metadata:
    """Unpickle a `.metadata`. Raises pickle.UnpicklingError, naming the class, for anything that isn't metadata."""
    metadata = MetadataUnpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f".metadata holds a {type(metadata).__name__} and no checkpoint's metadata")
    return metadata
