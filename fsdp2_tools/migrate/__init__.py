"""From FSDP1 to FSDP2: what each option means, and FSDP1's names on FSDP2.

    from fsdp2.migrate import FullyShardedDataParallel as FSDP

Each module of `torch.distributed.fsdp` that programs import from stands here by its name, so that `fsdp2.migrate` in
the place of `torch.distributed.fsdp` is all that changes in an import. `fsdp1_interface` has FSDP1's names alone.
"""

from __future__ import annotations

import importlib
from typing import Any

_SUBMODULES = ("api", "fully_sharded_data_parallel", "sharded_grad_scaler", "shim", "wrap")


def __getattr__(name: str) -> Any:
    # Late: the command line has no need of the interface, which imports torch.
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    shim, theirs = (importlib.import_module(path) for path in ("fsdp1_interface", "torch.distributed.fsdp"))
    if name == "__all__":  # for `from fsdp2.migrate import *`
        return sorted({*shim.__all__, *theirs.__all__} - {*_SUBMODULES})
    if name in shim.__all__:
        return getattr(shim, name)
    if name in theirs.__all__:
        return getattr(theirs, name)  # FSDP2's own
    advice = f"fsdp2.migrate has no {name}; python -m fsdp2.migrate options {name} may say what became of it"
    if name == "FlatParameter":
        advice = "fsdp2.migrate has no FlatParameter: FSDP2 has none. Each parameter is a DTensor of its own shape"
    # Of an AttributeError `from fsdp2.migrate import …` would show nothing.
    raise ImportError(advice) if hasattr(theirs, name) else AttributeError(advice)
