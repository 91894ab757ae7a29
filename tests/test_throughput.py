"""What the progress line says of speed, and what it rests on."""

import dataclasses

import pytest
import torch
from torch import nn

from fsdp2 import models
from fsdp2.config import Config
from fsdp2.models.spec import ModelSpec
from fsdp2.report import console
from fsdp2.report.compute import flops_per_sample, peak_tflops
from fsdp2.report.console import Console
from fsdp2.report.throughput import Throughput

SPEC = ModelSpec(
    name="two",
    kind="image",
    sizes={"seed": {"width": 8}},
    make=lambda width: nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, width), nn.Linear(width, 10)),
    blocks=lambda model: [],
    initial_values={},
    loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, reduction="sum"),
)
SAMPLE = (torch.zeros(1, 28, 28), torch.tensor(3))


def test_operations_are_those_of_one_forward_and_backward() -> None:
    first, second = 28 * 28 * 8, 8 * 10
    # Forward and the weights' gradients of both, and of the second the inputs' gradient too; 2 for multiply and add.
    assert flops_per_sample(SPEC, "seed", SAMPLE) == 2 * (2 * first + 3 * second)


@pytest.mark.parametrize("model", models.NAMES)
def test_the_operations_of_every_model_can_be_counted(model: str) -> None:
    spec = models.get(model)
    inputs, targets = (torch.zeros(16, dtype=torch.int64),) * 2 if spec.kind == "language" else SAMPLE
    assert flops_per_sample(spec, next(iter(spec.sizes)), (inputs, targets)) > 0


@pytest.mark.parametrize(
    ("gpu", "precision", "matmul", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", "highest", 989.4),
        ("NVIDIA H100 80GB HBM3", None, "high", 494.7),
        ("NVIDIA H100 80GB HBM3", None, "highest", 66.9),
        ("NVIDIA H100 PCIe", "fp16", "highest", 756),
        ("NVIDIA A100-SXM4-40GB", "bf16", "highest", 312),
        ("NVIDIA L40S", "bf16", "highest", 362),
        ("NVIDIA A10G", "bf16", "highest", None),
        ("NVIDIA L40", "bf16", "highest", None),
        ("NVIDIA H200 NVL", "bf16", "highest", None),
    ],
)
def test_the_peak_is_that_of_the_arithmetic_and_of_no_other_gpu(
    gpu: str, precision: str | None, matmul: str, peak: float | None
) -> None:
    assert peak_tflops(gpu, precision, matmul) == peak


def _speed(monkeypatch: pytest.MonkeyPatch, gpu: str, spec: ModelSpec = SPEC) -> Throughput:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    config = Config(model_size="seed", mixed_precision="bf16")
    monkeypatch.setattr(Config, "spec", spec)
    return Throughput(config, [SAMPLE], torch.device("cuda", 0), ranks=4)


def test_mfu_is_the_share_of_all_gpus_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = _speed(monkeypatch, "NVIDIA A100-SXM4-40GB")
    figures = speed(samples=100, seconds=0.5)
    assert figures["samples_per_second"] == 200
    assert figures["tflops"] == pytest.approx(200 * flops_per_sample(SPEC, "seed", SAMPLE) / 1e12 / 4)
    assert figures["mfu"] == figures["tflops"] / 312
    assert "peak of NVIDIA A100-SXM4-40GB: 312 TFLOP/s" in speed.lines[0]


class _Looks(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.flatten(1) * inputs.sum().item())


def test_a_forward_that_needs_values_trains_without_these_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = dataclasses.replace(SPEC, make=lambda width: _Looks(28 * 28, 10))
    speed = _speed(monkeypatch, "NVIDIA A100-SXM4-40GB", spec)
    assert speed.lines[0].startswith("compute: unknown, so no TFLOP/s: a forward on meta fails (RuntimeError: ")
    assert speed(samples=100, seconds=0.5) == {"samples_per_second": 200}


def test_an_unknown_gpu_has_no_mfu_and_the_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = _speed(monkeypatch, "Graphcore IPU")
    figures = speed(samples=100, seconds=0.5)
    assert "mfu" not in figures
    assert "unknown, so no MFU" in speed.lines[0]
    assert console.speed(figures).endswith("TFLOP/s  MFU unknown")


def test_tokens_for_language_and_samples_for_images() -> None:
    tokens = torch.zeros(16, dtype=torch.int64)
    config = Config(model="transformer")
    speed = Throughput(config, [(tokens, tokens)], torch.device("cpu"), ranks=2)
    figures = speed(samples=10, seconds=2.0)
    assert figures == {"samples_per_second": 5, "tokens_per_second": 80}
    assert console.speed(figures) == "80 tokens/s"
    assert speed.lines == []


@pytest.mark.parametrize(("max_steps", "left"), [(None, "2 min 36 s"), (14, "12 s")])
def test_the_time_left_counts_what_is_left_of_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], max_steps: int | None, left: str
) -> None:
    clock = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    lines = Console(0, steps_per_epoch=10, epochs=5, max_steps=max_steps)
    lines.in_terminal = False
    for step in (8, 9, 11):  # a resumed run; epoch 1 begins with step 10
        data = {"step": step, "epoch": step // 10, "step_in_epoch": step % 10, "loss": 1.0, "grad_norm": 1.0}
        lines("train", {**data, "samples_per_second": 7.0})
        clock[0] += 6
    first, second, third = capsys.readouterr().out.splitlines()
    assert not first.endswith("left")
    assert second.endswith("left")
    assert third.endswith(f"7 samples/s  {left} left")


@pytest.mark.parametrize(
    ("epochs", "max_steps", "said"), [(2, None, [1, 2, 3, 4]), (9, 4, [1, 2, 3, 4]), (9, None, [1])]
)
def test_a_short_run_has_a_line_for_each_step(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    epochs: int,
    max_steps: int | None,
    said: list[int],
) -> None:
    """Of steps that take no time."""
    monkeypatch.setattr(console.time, "monotonic", lambda: 100.0)
    lines = Console(0, steps_per_epoch=2 if epochs == 2 else 10, epochs=epochs, max_steps=max_steps)
    lines.in_terminal = False
    for step in (1, 2, 3, 4):
        at = {"step": step, "epoch": (step - 1) // 2, "step_in_epoch": (step - 1) % 2 + 1}
        if epochs == 9:
            at = {"step": step, "epoch": 0, "step_in_epoch": step}
        lines("train", {**at, "loss": 1.0, "grad_norm": 1.0, "samples_per_second": 7.0})
    printed = capsys.readouterr().out.splitlines()
    assert [int(line.split("step ")[1].split()[0]) for line in printed] == said
    assert len(said) == 1 or not printed[-1].endswith("left"), "nothing is left after the last step"


def test_hours_are_left_without_seconds() -> None:
    assert [console.duration(s) for s in (3.4, 61, 7384)] == ["3 s", "1 min 01 s", "2 h 03 min"]
