"""Strategy `ddp`: each rank holds the whole model, from its first tensor on; gradients are all-reduced.

Source: https://arxiv.org/abs/2006.15704
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from fsdp2.parallel.engine import Microbatch
from fsdp2.parallel.mesh import make_mesh
from fsdp2.parallel.rules import Baseline, Options, Start
from fsdp2_extra.baselines.autocast import AutocastEngine, reduces_in_fp32
from fsdp2_extra.baselines.starting import whole_model


def replicate(model: nn.Module, mesh: DeviceMesh, bucket_mb: float | None) -> DistributedDataParallel:
    """Give a model DDP's hooks. A collective call: DDP compares the parameters' shapes over all ranks.

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

    def forward(self, batch: Microbatch) -> Any:
        # DDP decides in forward whether the backward that follows will all-reduce.
        if batch.last:
            return super().forward(batch)
        with self.model.no_sync():
            return super().forward(batch)


def build(options: Options, start: Start) -> DDPEngine:
    """A model with initial or loaded weights, copied to each rank by DDP. A collective call."""
    mesh = make_mesh(start.device.type, start.world_size)
    return DDPEngine(replicate(whole_model(options, start), mesh, options.bucket_mb), options, start)


BASELINE = Baseline(
    build=build,
    honours=("bucket_mb", "check_replicas", "betas", "weight_decay", "lora", "ema"),
    refusals=reduces_in_fp32,
    autocasts=True,
)
