from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes accelerate's Accelerator of one CPU process; what it keeps for the process is taken back."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "False")  # which its plugin sets, for transformers
    yield lambda **options: Accelerator(cpu=True, **options)
    AcceleratorState._reset_state(reset_partial_state=True)
