"""Return whether weights are numbers: no NaN, no infinity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fsdp2.options.errors import ConfigError
from fsdp2.parallel.inspect import local
from fsdp2.run.process.runtime import gather

SHOWN = 5


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """True if this rank's part of the tensors is free of NaN and infinity; integers are. Waits once for a GPU."""
    extremes: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        part = local(tensor).detach()
        part = torch.view_as_real(part) if part.is_complex() else part
        if part.numel() and part.is_floating_point():
            # NaN if there is one. It reads the memory once and copies nothing: a twentieth of the time of isfinite().
            extremes.setdefault(part.device, []).extend(one.double() for one in torch.aminmax(part))
    return all(bool(torch.stack(values).isfinite().all()) for values in extremes.values())


def require_finite(weights: Mapping[str, Tensor], what: str) -> None:
    """Raise ConfigError on every rank if weights by name, which `what` brought, are no numbers. A collective call."""
    tensors = {name: local(tensor) for name, tensor in weights.items()}
    wrong = {name: tensor for name, tensor in tensors.items() if not is_finite([tensor])}
    mine = {name: (bool(tensor.isnan().any()), bool(tensor.isinf().any())) for name, tensor in wrong.items()}
    everywhere = [item for found in gather(mine) for item in found.items()]
    if not everywhere:
        return
    names = sorted({name for name, _ in everywhere})
    kinds = [word for i, word in enumerate(("NaN", "infinity")) if any(flags[i] for _, flags in everywhere)]
    shown = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
    raise ConfigError(
        f"{what}: holds {' and '.join(kinds)}: {len(names)} of {len(tensors)} tensors ({shown}); the run that wrote it "
        "had diverged: use an older checkpoint of it"
    )
