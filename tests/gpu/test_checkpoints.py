"""Checkpoints on a GPU: resumed bit for bit, saved in the background from pinned memory, and taken to a CPU."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2.checkpoint import staging
from fsdp2.config import parse
from fsdp2.data.loader import Batch
from fsdp2.parallel.shards import local
from fsdp2.train import train_step
from tests.gpu import harness
from tests.gpu.harness import DEVICE, ON_GPU, Events, Ranks, engine, losses, of_kind, rank, small

Train = Callable[..., Events]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--mixed-precision=fp16", "--clip-grad-norm"],
        ["--cpu-offload", "--clip-grad-norm"],
        ["--cpu-offload", "--mixed-precision=fp16", "--async-checkpoint"],
        ["--async-checkpoint"],
        ["--strategy=fsdp1"],
        ["--strategy=ddp"],
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_resumed_run_is_the_same_to_the_last_bit(train: Train, flags: list[str], count: int) -> None:
    whole = losses(train(*flags, "--checkpoint-every=3", run="whole", count=count))
    train(*flags, "--checkpoint-every=3", "--max-steps=3", run="cut", count=count)
    resumed = train(*flags, "--checkpoint-every=3", run="cut", count=count)
    assert of_kind(resumed, "resume")[0]["step"] == 3
    assert losses(resumed) == whole[3:]


def test_a_checkpoint_goes_from_the_gpu_to_the_cpu_and_back(gpus: Ranks, train: Train, tmp_path: Path) -> None:
    train("--max-steps=2")
    flags = small(tmp_path / "run", "--device=cpu", "--max-steps=4")
    on_cpu = gpus.run(harness.train, flags)[0]
    assert of_kind(on_cpu, "resume")[0]["step"] == 2
    back = train("--max-steps=6")
    assert of_kind(back, "resume")[0]["step"] == 4
    assert losses(back) == pytest.approx(losses(train(run="on-one-device"))[4:], rel=1e-3)


def test_a_run_on_two_gpus_goes_on_with_one(train: Train) -> None:
    train("--max-steps=3", count=2)
    assert of_kind(train("--max-steps=4"), "resume")[0]["step"] == 3


def _staged(offloaded: bool) -> None:
    """A state with parameters on the GPU and the optimizer's `step` on the CPU, or all of it on the CPU."""
    device = torch.device(DEVICE, 0)
    weight = torch.nn.Parameter(torch.ones(1 << 20, device="cpu" if offloaded else device))
    optimizer = torch.optim.Adam([weight])
    stage = staging.Staging(optimizer, device)
    for step in (1, 2):  # the second time into buffers that are there
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        state = {"weight": weight.detach(), "buffer": torch.full((5,), step, device=device), **optimizer.state[weight]}
        expected = {name: tensor.cpu().clone() for name, tensor in state.items()}
        staged = stage.copy(state)
        threading.Thread(target=stage.finish).start()
        optimizer.step()  # waits for both sides
        stage._finished.wait()
        if ON_GPU:
            torch.cuda.synchronize()
        for name, tensor in staged.items():
            assert torch.equal(tensor, expected[name]), name
            assert tensor.is_pinned() == state[name].is_cuda, name
    stage.close()


@pytest.mark.parametrize("offloaded", [False, True])
def test_staging_has_pinned_copies_from_before_the_next_update(gpus: Ranks, offloaded: bool) -> None:
    gpus.run(_staged, offloaded)


def _with_and_without(flags: list[str]) -> list[dict[str, Any]]:
    """Three steps, the second with a NaN in the last rank's data, next to a model that has never seen that step."""
    with rank() as (world, device):
        config = parse(["--model-size=tiny", f"--device={DEVICE}", "--on-nonfinite=skip", *flags])
        generator = torch.Generator().manual_seed(world.rank)
        inputs = [torch.randn(4, 1, 28, 28, generator=generator).to(device) for _ in range(3)]
        if world.rank == world.world_size - 1:
            inputs[1][0, 0, 0, 0] = math.nan
        made = [engine(config, world, device) for _ in range(2)]
        found: list[dict[str, Any]] = []
        for which, steps in ((0, (0, 1, 2)), (1, (0, 2))):
            for index in steps:
                batch = Batch(inputs[index], torch.arange(4, device=device), True, 4, 4 * world.world_size, True)
                facts, _ = train_step(made[which], iter([batch]), config, world, [])
                if which == 0:
                    found.append(facts)
        for one, other in zip(made[0].weights(), made[1].weights(), strict=True):
            assert torch.equal(local(one), local(other)), "the skipped step has left something"
            assert local(one).isfinite().all()
        return found


@pytest.mark.parametrize("flags", [[], ["--cpu-offload"], ["--mixed-precision=bf16"]])
@pytest.mark.parametrize("count", [1, 2])
def test_a_step_that_is_not_finite_is_skipped(gpus: Ranks, flags: list[str], count: int) -> None:
    harness.needs(count)
    for facts in gpus.run(_with_and_without, flags, count=count):
        assert [step["skipped"] for step in facts] == [False, True, False]


def test_fp16_goes_on_after_an_overflow(train: Train) -> None:
    events = train("--mixed-precision=fp16", "--max-steps=4")
    assert all(math.isfinite(loss) for loss in losses(events))
    assert all(data["loss_scale"] > 0 for data in of_kind(events, "train"))
