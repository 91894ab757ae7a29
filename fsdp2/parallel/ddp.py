"""Strategy `ddp`: a full copy of the model on each rank; gradients are all-reduced.

Source: https://arxiv.org/abs/2006.15704
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from fsdp2.parallel.engine import AutocastEngine, Microbatch


def replicate(model: nn.Module, mesh: DeviceMesh, bucket_mb: float | None) -> DistributedDataParallel:
    """Give a model DDP's hooks.

    Args:
        bucket_mb: MiB of gradients that are all-reduced together, as soon as backward has them all: small buckets
            start early and are many, one large one waits for the end of backward. None is torch's 25.
    """
    return DistributedDataParallel(
        model,
        process_group=mesh.get_group(),
        init_sync=False,  # initial values are the same on every rank already
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=True,  # else each gradient is in memory twice: as itself, and in its bucket
    )


class DDPEngine(AutocastEngine):
    strategy = "ddp"

    model: DistributedDataParallel

    def forward(self, batch: Microbatch) -> Tensor:
        # DDP decides in forward whether the backward that follows will all-reduce.
        if batch.last:
            return super().forward(batch)
        with self.model.no_sync():
            return super().forward(batch)
