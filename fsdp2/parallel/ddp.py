"""Strategy `ddp`: a full copy of the model on each rank; gradients are all-reduced.

Source: https://arxiv.org/abs/2006.15704
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from fsdp2.parallel.engine import AutocastEngine, Microbatch


def replicate(model: nn.Module, mesh: DeviceMesh) -> DistributedDataParallel:
    # init_sync=False: initial values are the same on every rank already.
    return DistributedDataParallel(model, process_group=mesh.get_group(), init_sync=False)


class DDPEngine(AutocastEngine):
    strategy = "ddp"

    model: DistributedDataParallel

    def forward(self, batch: Microbatch) -> Tensor:
        # DDP decides in forward whether the backward that follows will all-reduce.
        if batch.last:
            return super().forward(batch)
        with self.model.no_sync():
            return super().forward(batch)
