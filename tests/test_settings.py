"""What a run sets for its process, and takes back: arithmetic, determinism, garbage collection, its GPU."""

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp2.config import Config
from fsdp2.options.errors import ConfigError
from fsdp2.run import runtime
from fsdp2.run.runtime import World
from fsdp2.run.settings import WORKSPACE, process_settings
from tests.harness import losses

Train = Callable[..., list[tuple[str, dict[str, Any]]]]


def _state() -> dict[str, Any]:
    cudnn = torch.backends.cudnn
    return {
        "precision": torch.get_float32_matmul_precision(),
        "cudnn": (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "workspace": os.environ.get(WORKSPACE),
        "gc": (gc.isenabled(), gc.get_freeze_count()),
    }


def test_a_run_takes_back_what_it_sets_for_its_process() -> None:
    before = _state()
    during = {}

    def fails() -> None:
        with process_settings(Config(matmul_precision="high", deterministic=True, gc_every=2)) as garbage:
            garbage.after_step(2)
            during.update(_state())
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert during["precision"] == "high"
    assert during["cudnn"] == (True, True, False)
    assert during["deterministic"]
    assert during["workspace"] == ":4096:8"
    assert not during["gc"][0]
    assert during["gc"][1] > 0
    assert _state() == before


def test_fp32_is_fp32_in_convolutions_too_unless_another_precision_is_asked_for() -> None:
    with process_settings(Config()):
        assert not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize(("every", "expected"), [(3, [3, 6, 9]), (0, [])])
def test_python_collects_between_steps_and_at_no_other_time(every: int, expected: list[int]) -> None:
    collected: list[int] = []
    step = 0

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            collected.append(step)

    with process_settings(Config(gc_every=every)) as garbage:
        assert gc.isenabled() == (every == 0)
        gc.callbacks.append(note)
        try:
            for step in range(1, 10):
                garbage.after_step(step)
        finally:
            gc.callbacks.remove(note)
    assert collected == expected


def test_objects_that_the_caller_put_aside_stay_there() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with process_settings(Config(gc_every=1)) as garbage:
            garbage.after_step(1)
        assert gc.get_freeze_count() >= count - 10  # some of them are freed in the ordinary way
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("model", ["vit", "cnn", "transformer --model-size=debug --dataset=random-tokens --seq-len=16"])
def test_deterministic_algorithms_and_collections_leave_the_losses_as_they_are(train: Train, model: str) -> None:
    flags = (*f"--model={model}".split(), "--resume=never")
    plain = train(*flags, "--gc-every=0", steps=3)
    assert losses(train(*flags, "--deterministic", "--gc-every=1", steps=3)) == losses(plain)
    assert len(losses(plain)) == 3


def test_each_process_may_see_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(3, 4, 3, 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match="4 ranks and 1 GPU on this node"):
        runtime.pick_device("auto", world)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # as srun --gpus-per-task=1 sets it
    assert runtime.pick_device("auto", world) == torch.device("cuda", 0)
