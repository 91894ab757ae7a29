"""What a run sets for its process, and takes back: arithmetic, determinism, garbage collection, its GPU."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp2.config import Config
from fsdp2.models import attention
from fsdp2.options.errors import ConfigError
from fsdp2.run.process import runtime
from fsdp2.run.process.runtime import World
from fsdp2.run.process.settings import (
    ALLOCATOR,
    EXPANDABLE,
    WORKSPACE,
    growing_segments,
    grows_segments,
    process_settings,
)
from tests.harness import losses

Train = Callable[..., list[tuple[str, dict[str, Any]]]]


def _state() -> dict[str, Any]:
    cudnn = torch.backends.cudnn
    return {
        "precision": torch.get_float32_matmul_precision(),
        "cudnn": (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "workspace": os.environ.get(WORKSPACE),
        "gc": (gc.isenabled(), gc.get_freeze_count() > 0),  # what is frozen may die all the same
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
    assert during["gc"][1]
    assert _state() == before


def test_what_is_set_is_taken_back_where_the_last_setting_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(choice: str) -> None:
        raise KeyError(choice)

    monkeypatch.setattr(attention, "kernels", fails)
    before = _state()
    settings = process_settings(Config(matmul_precision="high", deterministic=True, gc_every=2, attention="math"))
    with pytest.raises(KeyError):
        settings.__enter__()
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


@pytest.mark.parametrize(
    ("said", "count", "expected"),
    [("3", 1, 3), ("1", 1, 1), ("3,1", 2, 3), ("1", 2, None), ("many", 1, None), (None, 1, None)],
)
def test_threads_are_those_of_the_flag_else_of_the_user(
    monkeypatch: pytest.MonkeyPatch, said: str | None, count: int, expected: int | None
) -> None:
    """torchrun sets OMP_NUM_THREADS to 1 for each of several ranks, so that 1 may be nobody's word there."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    before, world = torch.get_num_threads(), World(0, count, 0, count)
    try:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        assert runtime.set_threads(None, world) == (expected or max(1, cores // count))
        assert runtime.set_threads(2, world) == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_each_process_may_see_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(3, 4, 3, 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match="4 ranks and 1 GPU on this node"):
        runtime.pick_device("auto", world)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # as srun --gpus-per-task=1 sets it
    assert runtime.pick_device("auto", world) == torch.device("cuda", 0)


@pytest.fixture
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the environment says how GPU memory is allocated."""
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("unsaid")
def test_segments_of_gpu_memory_grow_where_nobody_says_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def during() -> dict[str, str]:
        with growing_segments():
            return {name: os.environ[name] for name in ALLOCATOR if name in os.environ}

    def fails() -> None:
        with growing_segments():
            raise KeyError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert during() == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert during() == {"PYTORCH_ALLOC_CONF": EXPANDABLE}
    with pytest.raises(KeyError):
        fails()
    assert not any(name in os.environ for name in ALLOCATOR)
    assert grows_segments(os.environ)
    for name in ALLOCATOR:
        with monkeypatch.context() as patch:
            patch.setenv(name, "max_split_size_mb:512")
            assert during() == {name: "max_split_size_mb:512"}
            assert os.environ[name] == "max_split_size_mb:512"  # as it was given
            assert not grows_segments(os.environ)


@pytest.mark.usefixtures("unsaid")
def test_torch_reads_the_allocators_settings_when_it_is_used_and_not_when_it_is_imported() -> None:
    program = (
        "import os, torch\n"
        "os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:Maybe'\n"
        "torch.cuda.is_available(), torch.cuda.device_count()\n"
        "print('not yet')\n"
        "torch._C._accelerator_setAllocatorSettings('')\n"
    )
    if not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        pytest.skip(f"torch {torch.__version__} can't be made to read them without a GPU")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "not yet\n"
    assert "Maybe" in done.stderr


@pytest.mark.usefixtures("unsaid")
def test_the_allocator_is_set_before_anything_of_a_run_can_use_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp2 import train

    found = []

    def first(*arguments: Any) -> Any:
        found.append(os.environ.get("PYTORCH_ALLOC_CONF"))
        raise KeyError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runtime, "world", first)
    for _ in range(2):  # each run, not the first alone
        with pytest.raises(KeyError):
            train.main(Config(device="cpu"))
    assert found == [EXPANDABLE] * 2


@pytest.mark.parametrize(("grow", "expected"), [(True, "; segments of GPU memory grow"), (False, "have a fixed size")])
def test_the_header_says_which_segments_there_are(monkeypatch: pytest.MonkeyPatch, grow: bool, expected: str) -> None:
    from fsdp2.report import header

    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"is_expandable": False}, {"is_expandable": grow}])
    assert header.segments(torch.device("cuda", 0)).endswith(expected)
    assert header.segments(torch.device("cpu")) == ""
