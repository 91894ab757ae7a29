"""From FSDP1 to FSDP2: what each option means, and FSDP1's names on FSDP2.

    from fsdp2.migrate import FullyShardedDataParallel as FSDP

`from fsdp2.migrate.shim import …` is the same.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    # Late: the command line has no need of the shim, which imports what a training run imports.
    shim = importlib.import_module("fsdp2.migrate.shim")
    if name == "__all__" or name in shim.__all__:  # the former for `from fsdp2.migrate import *`
        return getattr(shim, name)
    raise AttributeError(
        f"fsdp2.migrate has no {name}; python -m fsdp2.migrate options {name} may say what became of it"
    )
