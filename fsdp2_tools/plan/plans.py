"""A plan: what the fullest rank of so many takes, and whether that fits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fsdp2.config import Config
from fsdp2.parallel import FUSED
from fsdp2.run.preflight import check_model, check_world
from fsdp2.run.process.runtime import World
from fsdp2_tools.plan.device import Gpu, Term, beside_on_cpu, terms
from fsdp2_tools.plan.execute import Runs, run, saved_of
from fsdp2_tools.plan.memory import Memory, memory_of
from fsdp2_tools.plan.steptime import StepTime, step_time

# What a checkpoint's files have beside values: torch puts about 1,580 bytes around each shard of a tensor, and some 400
# into .metadata; a parameter has itself, up to three tensors of an optimizer and an average. The rest of a rank: its
# generators, and the marker.
FRAME, TENSORS_OF_EACH, REST = 2048, 5, 1 << 16


@dataclass(frozen=True)
class Plan:
    """The plan of `config` on so many ranks.

    Attributes:
        memory: of the rank that takes the most.
        last: of the last rank; the same object if it wasn't asked for.
        extra: what a GPU takes beside tensors, or gloo.
        budget: bytes that a rank may take; None if nobody said.
        time: of a step of rank 0; None without a GPU, or with one whose table says nothing of speed.
        runs: what it is drawn from, of rank 0; None if it wasn't to be kept.
    """

    config: Config
    ranks: int
    memory: Memory
    last: Memory
    extra: tuple[Term, ...]
    budget: int | None
    tensors_saved: int
    time: StepTime | None = None
    runs: Runs | None = dataclasses.field(default=None, repr=False)

    @property
    def tensors(self) -> int:
        return self.memory.peak.bytes

    @property
    def bytes(self) -> int:
        return self.tensors + sum(term.bytes for term in self.extra)

    @property
    def fits(self) -> bool:
        return self.budget is None or self.bytes <= self.budget

    @property
    def checkpoint_bytes(self) -> int:
        """Of the files, at most: the last ranks' shards are smaller, and not each parameter has that many tensors."""
        memory, shards = self.memory, self.ranks // self.config.replicas
        values = (memory.saved_bytes + memory.optimizer_bytes + memory.average_bytes) * shards
        return values + self.tensors_saved * TENSORS_OF_EACH * shards * FRAME + REST * self.ranks


def plan(
    config: Config, ranks: int, gpu: Gpu | None, budget: int | None, *, last: bool = False, keep: bool = False
) -> Plan:
    """Plan for so many ranks. Raises ConfigError for what can't run on them, or can't be planned.

    Args:
        last: plan the last rank too, and not only rank 0, which has the most rows of each parameter and batch.
        keep: what was executed, for other rates.
    """
    check_world(config, World(0, ranks, 0, ranks))
    model = check_model(config)
    on_gpu = gpu is not None and not gpu.on_cpu
    if on_gpu and config.fused_optimizer is None and not config.cpu_offload and config.optimizer_state is None:
        config = dataclasses.replace(config, fused_optimizer=config.optimizer in FUSED)  # what a GPU would take
    ordered = dict.fromkeys((0, ranks - 1 if last else 0))
    there = {rank: run(config, ranks, rank, gloo=not on_gpu) for rank in ordered}
    first, *others = (memory_of(config, rank, runs, offload_apart=on_gpu) for rank, runs in there.items())
    fullest = max((first, *others), key=lambda memory: memory.peak.bytes)
    extra = terms(there[0], fullest) if on_gpu else [beside_on_cpu(fullest)]
    time = None if gpu is None or gpu.speed is None else step_time(config, ranks, there[0], gpu.speed)
    runs = there[0] if keep else None
    tensors = len(saved_of(config, model))
    return Plan(config, ranks, fullest, (others or [first])[-1], tuple(extra), budget, tensors, time, runs)
