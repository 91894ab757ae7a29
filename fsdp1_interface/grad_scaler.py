"""`ShardedGradScaler`: torch's own scaler is enough, since gradients are DTensors."""

from __future__ import annotations

from typing import Any

import torch

from fsdp1_interface.explain import say


class ShardedGradScaler(torch.amp.GradScaler):
    """FSDP1's arguments. Raises what torch.amp.GradScaler raises."""

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
    ) -> None:
        # process_group said who agrees on an overflow; now that is the mesh of the gradients.
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        say("ShardedGradScaler", f'scaler = torch.amp.GradScaler("{device}")')
