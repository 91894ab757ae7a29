"""Losses on a GPU: which settings leave every bit, and which are other arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fsdp2 import minimal
from fsdp2.config import parse
from fsdp2.data.loader import Batch
from fsdp2.parallel import FLOAT8, FLOAT8_CAPABILITY
from fsdp2.train import train_step
from tests.gpu import harness
from tests.gpu.harness import (
    DEVICE,
    ON_GPU,
    Events,
    Ranks,
    assert_bit_equal,
    engine,
    losses,
    needs,
    of_kind,
    rank,
    small,
)

Train = Callable[..., Events]


@pytest.mark.parametrize("model", ["transformer", "cnn"])
def test_close_to_the_cpu(gpus: Ranks, tmp_path: Path, model: str) -> None:
    """The same samples and initial values. fp32 sums in another order: 1e-7 relative a sum, which Adam's division by
    small roots amplifies from step to step. cuDNN's convolutions may use TF32, with 10 bits of mantissa. A wrong sample
    or initial value would show in the first digits."""
    # The test split of source-text would take the CPU minutes.
    size = ["--model-size=debug", "--dataset=random-tokens"] if model == "transformer" else []
    flags = [f"--model={model}", "--max-steps=4", "--batch-size=8", *size]
    flags = [*(flag for flag in small(tmp_path / "gpu") if "size" not in flag and "steps" not in flag), *flags]
    on_cpu = [*flags, "--device=cpu", f"--run-dir={tmp_path / 'cpu'}"]
    here, there = (losses(gpus.run(harness.train, line)[0]) for line in (flags, on_cpu))
    assert len(here) == 4
    assert here == pytest.approx(there, rel=1e-2 if model == "cnn" else 1e-4)


@pytest.mark.parametrize("recipe", FLOAT8)
def test_float8_is_close_to_what_a_cpu_emulates(gpus: Ranks, tmp_path: Path, recipe: str) -> None:
    """The same rounding, and sums of products in another order, or with fewer bits where a GPU adds up fast. A sum is
    rounded to bf16, by 4e-3 of a layer's output, and a loss is the mean of many. Random words are not learned, so that
    steps don't move apart."""
    pytest.importorskip("torchao", reason="needs the extra torchao")
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < FLOAT8_CAPABILITY:
        pytest.skip(f"{torch.cuda.get_device_name()} has no float8 products")
    sizes = ["--model=llama", "--model-size=debug", "--dataset=random-tokens", "--seq-len=32", "--batch-size=8"]
    line = [flag for flag in small(tmp_path / "gpu") if "size" not in flag and "steps" not in flag]
    line = [*line, *sizes, "--max-steps=4", "--mixed-precision=bf16", f"--float8={recipe}"]
    on_cpu = [*line, "--device=cpu", f"--run-dir={tmp_path / 'cpu'}"]
    here, there = (losses(gpus.run(harness.train, one)[0]) for one in (line, on_cpu))
    assert here == pytest.approx(there, rel=2e-3)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("precision", [[], ["--mixed-precision=bf16"]])
def test_fsdp1_is_bit_equal(train: Train, count: int, precision: list[str]) -> None:
    new = train(*precision, run="fsdp2", count=count)
    old = train(*precision, "--strategy=fsdp1", run="fsdp1", count=count)
    assert_bit_equal(losses(new), losses(old))


def test_ddp_and_a_plain_process_are_bit_equal(train: Train) -> None:
    sharded = losses(train())
    assert losses(train("--strategy=ddp", "--check-replicas=1", run="ddp")) == sharded
    assert losses(train("--strategy=none", run="none")) == sharded


@pytest.mark.parametrize("count", [1, 2])
def test_settings_that_leave_every_bit(train: Train, count: int) -> None:
    expected = losses(train(run="default", count=count))
    for flags in (
        ["--reshard-after-forward=true"],
        ["--reshard-after-forward=false"],
        ["--explicit-prefetching"],
        ["--shard-granularity=root"],
        ["--activation-checkpointing=block"],
        ["--activation-checkpointing=op"],
        ["--async-checkpoint", "--checkpoint-every=2"],
        ["--dcp-api"],
        ["--loader-workers=1"],
    ):
        assert losses(train(*flags, run=flags[0][2:].replace("=", "-"), count=count)) == expected, flags


def test_the_optimizer_is_fused_and_rounds_within_an_ulp_or_two(train: Train) -> None:
    fused = losses(train("--fused-optimizer", run="fused"))
    assert losses(train(run="unset")) == fused if ON_GPU else True
    assert losses(train("--no-fused-optimizer", run="foreach")) == pytest.approx(fused, rel=1e-5)


@pytest.mark.parametrize("flags", [[], ["--clip-grad-norm=0.5"], ["--clip-grad-norm=0.5", "--mixed-precision=fp16"]])
@pytest.mark.parametrize("count", [1, 2])
def test_offload_updates_on_the_cpu(train: Train, flags: list[str], count: int) -> None:
    """The update is the CPU's, which rounds differently; clipping and the scaler reduce CPU tensors, by gloo."""
    plain = train(*flags, run="plain", count=count)
    offloaded = train(*flags, "--cpu-offload", run="offloaded", count=count)
    assert losses(offloaded) == pytest.approx(losses(plain), rel=1e-2 if "--mixed-precision=fp16" in flags else 1e-4)
    assert all(data["grad_norm"] > 0 for data in of_kind(offloaded, "train"))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_is_near(train: Train, dtype: str) -> None:
    half = train(f"--mixed-precision={dtype}", run=dtype)
    assert losses(half) == pytest.approx(losses(train()), rel=3e-2)
    assert all(("loss_scale" in data) == (dtype == "fp16") for data in of_kind(half, "train"))


def test_compiled_is_near(train: Train) -> None:
    assert losses(train("--compile", run="compiled")) == pytest.approx(losses(train()), rel=1e-4)


@pytest.mark.parametrize("precision", [[], ["--mixed-precision=bf16"]])
def test_recomputing_keeps_the_bits_with_each_attention_kernel(train: Train, precision: list[str]) -> None:
    """In fp32 torch takes the memory-efficient attention, in half precision cuDNN's or flash attention."""
    expected = losses(train(*precision))
    for mode in ("block", "op"):
        assert losses(train(*precision, f"--activation-checkpointing={mode}", run=mode)) == expected, mode


@pytest.mark.parametrize(("count", "replicas"), [(2, 2), (4, 2)])
def test_hsdp_is_near_one_dimension(train: Train, count: int, replicas: int) -> None:
    one = losses(train(run="one", count=count))
    assert losses(train(f"--replicas={replicas}", run="two", count=count)) == pytest.approx(one, rel=1e-4)


def _both_loops(steps: int) -> tuple[list[float], list[float]]:
    """Losses of the one-screen loop's steps and of train.py's, on the same batches."""
    with rank() as (world, device):
        config = parse(["--model-size=tiny", f"--device={DEVICE}", "--clip-grad-norm", "--explicit-prefetching=1"])
        spec = config.spec
        generator = torch.Generator().manual_seed(world.rank)
        count, batches = 8 * world.world_size, []
        for _ in range(steps):
            images = torch.randn(8, 1, 28, 28, generator=generator).to(device)
            labels = torch.randint(10, (8,), generator=generator).to(device)
            batches.append(Batch(images, labels, True, count, count, True))
        model, optimizer = minimal.build(device, spec, config.model_size)
        first = []
        for batch in batches:
            loss = minimal.step(model, optimizer, spec.loss, batch.inputs, batch.targets, count).double()
            torch.distributed.all_reduce(loss)
            first.append(float(loss) / count)
        ours = engine(config, world, device)
        second = [float(train_step(ours, iter([b]), config, world, [])[1][0]) for b in batches]
        return first, second


@pytest.mark.parametrize("count", [1, 2])
def test_the_one_screen_loop_is_bit_equal(gpus: Ranks, count: int) -> None:
    needs(count)
    first, second = gpus.run(_both_loops, 4, count=count)[0]
    assert first == second
    assert first[0] != first[-1]
