"""`torch.distributed.fsdp.api`, whose names are the same."""

from typing import Any

from torch.distributed.fsdp import api as theirs


def __getattr__(name: str) -> Any:
    return getattr(theirs, name)
