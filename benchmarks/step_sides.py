"""The sides of the step benchmark: the same training step by hand, by our loop, and by other libraries.

Each is a function that takes a Job, whose model starts from the same values, and returns a Side. One that can't do
the work here raises NotHere with the reason, which becomes its row.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from fsdp2 import minimal as one_screen
from fsdp2.config import Config, parse
from fsdp2.data.loader import Batch
from fsdp2.models.initial import reset_parameters
from fsdp2.report.metrics import MetricsFile, StepLog
from fsdp2.run.process.runtime import World
from fsdp2.train import make_engine, train_step


class NotHere(Exception):
    """This side can't do this work on this machine."""


@dataclass
class Job:
    """The work of all sides: the model and the batch that `flags` say."""

    flags: Sequence[str]
    world: World
    device: torch.device
    folder: Path

    def config(self, *flags: str) -> Config:
        return parse([*self.flags, *flags])

    def model(self) -> nn.Module:
        """The whole model with its initial values, on this rank's device."""
        config = self.config()
        spec = config.spec
        model = spec.build(config.model_size)
        reset_parameters(model, spec.initial_values, config.seed)
        return model.to(self.device)

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """The mean over this rank's samples; averaged over ranks it is the mean over the global batch."""
        total = self.config().spec.loss(output, batch.targets)
        return total * self.world.world_size / batch.target_count

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return self.config().spec.blocks(model)


@dataclass
class Side:
    step: Callable[[Batch], Tensor]  # a whole optimizer step; this rank's loss, detached
    model: nn.Module
    held: Callable[[], dict[str, Iterable[Tensor]]]  # what it keeps between steps, by kind


Make = Callable[[Job], Side]


def holding(model: nn.Module, optimizer: Any) -> Callable[[], dict[str, Iterable[Tensor]]]:
    return lambda: {
        "parameters": list(model.parameters()),
        "buffers": list(model.buffers()),
        "optimizer": [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)],
    }


def minimal(job: Job) -> Side:
    """FSDP2 on one screen, without its clipping: no norm, no log, nothing that all ranks agree on."""
    config = job.config()
    spec = config.spec
    model, optimizer = one_screen.build(job.device, spec, config.model_size)

    def step(batch: Batch) -> Tensor:
        count = batch.target_count
        loss = one_screen.step(model, optimizer, spec.loss, batch.inputs, batch.targets, count, clip=False)
        return loss * (job.world.world_size / count)

    return Side(step, model, holding(model, optimizer))


def _by_hand(job: Job, model: nn.Module, optimizer: Any, backward: Callable[[Tensor], Any] = Tensor.backward) -> Side:
    def step(batch: Batch) -> Tensor:
        loss = job.loss(model(batch.inputs), batch)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Side(step, model, holding(model, optimizer))


def _fused(device: torch.device) -> dict[str, bool]:
    """The optimizer that ours takes too: rounding is the same on all sides."""
    return {"fused": True} if device.type == "cuda" else {"foreach": True}


def ours(*flags: str) -> Make:
    """Our loop: the training step, and its line in the metrics file."""

    def make(job: Job) -> Side:
        config = job.config(*flags)
        if config.strategy.startswith("zero"):
            _needs("deepspeed")
        engine = make_engine(config, job.world, job.device, restoring=False)
        metrics = MetricsFile(job.folder / f"{'-'.join(flags) or 'ours'}.jsonl".replace("/", "-"), job.world.rank)
        log = StepLog(metrics, job.device)
        count = 0

        def step(batch: Batch) -> Tensor:
            nonlocal count
            count += 1
            facts, values = train_step(engine, iter([batch]), config, job.world, [False, False])
            log.add({"step": count, "epoch": 0, "lr": config.lr, **facts}, values)
            return values[0]

        return Side(step, engine.model, lambda: dict(engine.held()))

    return make


def accelerate(job: Job) -> Side:
    """Accelerate's FSDP2, wrapping the same blocks."""
    _needs("accelerate")
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    model = job.model()
    groups = len(job.blocks(model))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(job.blocks(model)[0]).__name__],
        reshard_after_forward=True,
    )
    accelerator = Accelerator(cpu=job.device.type == "cpu", fsdp_plugin=plugin)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **_fused(job.device))
    model, optimizer = accelerator.prepare(model, optimizer)
    # With cpu=True it shards nothing and says nothing, so that its times would be those of something else.
    _must_shard(model, groups, "without a GPU it shards nothing: each rank has a whole copy, as with DDP")
    return _by_hand(job, model, optimizer, accelerator.backward)


def fabric(job: Job) -> Side:
    """Lightning Fabric's FSDP2: its ModelParallelStrategy, wrapping the same blocks."""
    _needs("lightning")
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    def shard(model: Any, mesh: Any) -> Any:
        for block in job.blocks(model):
            fully_shard(block, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"])

    fabric = Fabric(
        accelerator=job.device.type,
        devices=job.world.local_world_size,
        strategy=ModelParallelStrategy(shard, data_parallel_size=job.world.world_size, tensor_parallel_size=1),
    )
    fabric.launch()
    model = fabric.setup_module(job.model())
    _must_shard(model, len(job.blocks(model.module)), "it sharded nothing")
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=1e-3, **_fused(job.device)))
    return _by_hand(job, model, optimizer, fabric.backward)


def megatron(job: Job) -> Side:
    """Megatron-FSDP, its ZeRO-3, wrapping the same blocks."""
    if job.device.type != "cuda":
        raise NotHere("its buffers and streams need a GPU")
    _needs("megatron_fsdp")
    from megatron_fsdp import fully_shard as megatron_shard

    model = job.model()
    kinds = [type(job.blocks(model)[0])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = megatron_shard(
            module=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=1e-3, **_fused(job.device)),
            fsdp_unit_modules=kinds,
            zero_dp_strategy=3,
        )
    return _by_hand(job, model, optimizer)


def _needs(module: str) -> None:
    try:
        __import__(module)
    except ImportError as error:
        raise NotHere(f"not installed ({error})") from None


def _must_shard(model: nn.Module, groups: int, otherwise: str) -> None:
    found = sum(isinstance(module, FSDPModule) for module in model.modules())
    if found < groups + 1:
        raise NotHere(otherwise)


SIDES: dict[str, Make] = {
    "a minimal FSDP2 loop": minimal,
    "ours": ours(),
    "ours, fused optimizer": ours("--fused-optimizer"),
    "ours, 2 blocks a group": ours("--shard-granularity=2"),
    "ours, no reshard": ours("--reshard-after-forward=false"),
    "ours, one group": ours("--shard-granularity=root"),
    "ours, one group, fused": ours("--shard-granularity=root", "--fused-optimizer"),
    "ours, FSDP1": ours("--strategy=fsdp1"),
    "ours, DDP": ours("--strategy=ddp"),
    "ours, ZeRO-1": ours("--strategy=zero1"),
    "ours, ZeRO-2": ours("--strategy=zero2"),
    "ours, ZeRO-3": ours("--strategy=zero3"),
    "Fabric's FSDP2": fabric,
    "accelerate's FSDP2": accelerate,
    "megatron-fsdp": megatron,
}

# Left out on the CPU, where they cost what their arithmetic costs and save nothing.
GPU_SIDES: dict[str, Make] = {
    f"ours, {flags[2:]}": ours(*flags.split())
    for flags in (
        "--explicit-prefetching",
        "--no-fused-optimizer",
        "--cpu-offload",
        "--activation-checkpointing=block",
        "--activation-checkpointing=op",
        "--mixed-precision=bf16",
        "--compile",
        "--compile --mixed-precision=bf16",
        "--activation-checkpointing=block --mixed-precision=bf16",
        "--activation-checkpointing=op --mixed-precision=bf16",
        "--strategy=ddp --mixed-precision=bf16",
        "--strategy=fsdp1 --mixed-precision=bf16",
    )
}
