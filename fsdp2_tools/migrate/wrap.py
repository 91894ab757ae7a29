"""`torch.distributed.fsdp.wrap`, whose names are the same, private ones such as `_or_policy` included."""

from typing import Any

from torch.distributed.fsdp import wrap as theirs


def __getattr__(name: str) -> Any:
    return getattr(theirs, name)
