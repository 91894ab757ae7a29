"""A DCP reader that runs no code from the checkpoint.

DCP's `.metadata` is a pickle, and unpickling a stranger's file runs whatever it says. This reader allows
only the few classes that metadata consists of.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
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


class SafeReader(FileSystemReader):
    """`FileSystemReader` whose metadata is unpickled with an allow-list."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises pickle.UnpicklingError, naming the class, for anything that isn't metadata."""
        rank = kwargs.get("rank")
        with open(Path(self.path) / (".metadata" if rank is None else f"__{rank}.metadata"), "rb") as file:
            metadata: Metadata = MetadataUnpickler(file).load()
        # As in the base class: the reader marks the metadata with its own id.
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata
