"""DeepSpeed's strategies on a GPU: the losses of FSDP2, and a resume. Skipped where DeepSpeed is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.gpu.harness import Events, Ranks, losses, of_kind

Train = Callable[..., Events]


@pytest.fixture(autouse=True)
def _there_is_deepspeed(gpus: Ranks) -> Iterator[None]:
    pytest.importorskip("deepspeed", exc_type=ImportError)
    yield
    gpus.close()  # DeepSpeed keeps settings of its first run in the process


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("count", [1, 2])
def test_losses_are_near_fsdp2s_and_resume(train: Train, strategy: str, count: int) -> None:
    """Not bit-equal for stage 3: its hooks make the ViT's attention round differently."""
    expected = losses(train(run="fsdp2", count=count))
    flags = [f"--strategy={strategy}", "--checkpoint-every=3"]
    assert losses(train(*flags, run="whole", count=count)) == pytest.approx(expected, rel=1e-4)
    train(*flags, "--max-steps=3", run="cut", count=count)
    resumed = train(*flags, run="cut", count=count)
    assert of_kind(resumed, "resume")[0]["step"] == 3
    assert losses(resumed) == pytest.approx(expected[3:], rel=1e-4)


@pytest.mark.parametrize("flags", [["--cpu-offload"], ["--mixed-precision=fp16"], ["--mixed-precision=bf16"]])
def test_further_settings_train(train: Train, flags: list[str]) -> None:
    found = losses(train("--strategy=zero3", *flags))
    assert len(found) == 6
    assert found[-1] < 1.2 * found[0]
