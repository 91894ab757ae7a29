"""A notice of weights that hold NaN or infinity: they are copied as they are, never without a word."""

from __future__ import annotations

from torch import Tensor

from fsdp2.checkpoint.sources.source import comparable

_BLOCK = 1 << 20  # numbers that are looked at at a time
_SHOWN = 3


class Nonfinite:
    """The names of those that were found, in the order of their reading."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def look(self, name: str, tensor: Tensor) -> None:
        """Take note of a tensor, or of a part of one."""
        blocks = tensor.reshape(-1).split(_BLOCK) if tensor.is_floating_point() else ()
        if name not in self.names and not all(bool(comparable(block).isfinite().all()) for block in blocks):
            self.names.append(name)

    def note(self) -> list[str]:
        """A line, if there are any."""
        if not self.names:
            return []
        what = "1 tensor holds" if len(self.names) == 1 else f"{len(self.names)} tensors hold"
        return [f"{what} NaN or infinity: {', '.join(self.names[:_SHOWN])}" + ", …" * (len(self.names) > _SHOWN)]
