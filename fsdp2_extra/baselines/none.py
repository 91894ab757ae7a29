"""Strategy `none`: one process, which holds the whole model; nothing distributed. What the others are compared with."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp2.parallel.rules import Baseline, Options, Start
from fsdp2_extra.baselines.autocast import AutocastEngine, reduces_in_fp32
from fsdp2_extra.baselines.starting import whole_model


class NoneEngine(AutocastEngine):
    strategy = "none"


def build(options: Options, start: Start) -> NoneEngine:
    """The plain model in one process."""
    return NoneEngine(whole_model(options, start), options, start)


def needs_one_process(options: Options, world_size: int) -> Iterator[str]:
    """A line if there is more than one process."""
    if world_size > 1:
        yield (
            f"--strategy none with {world_size} ranks: each would train a model of its own; start one process "
            "or use --strategy ddp or fsdp2"
        )


BASELINE = Baseline(
    build=build,
    honours=("betas", "weight_decay", "optimizer_state", "lora", "ema"),
    refusals=reduces_in_fp32,
    in_world=needs_one_process,
    autocasts=True,
)
