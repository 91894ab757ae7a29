"""torch's errors about a DTensor beside a plain tensor, which FSDP1's parameters and gradients were: what to call."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

ADVICE = (
    "A plain tensor stands beside a DTensor, as which FSDP2 has parameters and gradients. Write p.to_local() for this "
    "rank's part, as FSDP1 had it, or p.full_tensor() on every rank. A p that is plain is still gathered: for unit in "
    "FSDP.fsdp_modules(model): unit.reshard(). For the norm of gradients call model.clip_grad_norm_(max_norm), or "
    "torch.nn.utils.get_total_norm(p.grad for p in model.parameters()), whose .full_tensor() is of all ranks"
)


def advise(error: BaseException) -> None:
    """Raised by torch's DTensor, it gets the advice as a note, which a traceback ends with."""
    from_tensor = any("/distributed/tensor/" in frame.filename for frame in traceback.extract_tb(error.__traceback__))
    bare = isinstance(error, AssertionError) and from_tensor and not str(error)
    if (bare or "mixed torch.Tensor and DTensor" in str(error)) and ADVICE not in getattr(error, "__notes__", ()):
        error.add_note(ADVICE)


def explained() -> None:
    """From now on: the error leaves the program's own lines, so that the end of the process is where it can be met."""
    shown = sys.excepthook
    if getattr(shown, "_fsdp1", False):
        return

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        advise(error)
        shown(kind, error, where)

    hook._fsdp1 = True  # type: ignore[attr-defined]
    sys.excepthook = hook
