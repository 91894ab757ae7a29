"""What a process is on a GPU: its device, its process group, and how it ends when it or another one fails."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp2.data.loader import Batches
from fsdp2.data.random_tokens import load
from fsdp2.run.process.group import broadcast, gather
from fsdp2.run.watch.waiting import last_collective
from tests.gpu.harness import DEVICE, ON_GPU, ROOT, Ranks, launched, needs, rank, small


def _collectives() -> tuple[list[float], list[str]]:
    with rank() as (world, device):
        tensors = [torch.ones(4, device=device), torch.ones(4)]
        for tensor in tensors:  # nccl takes the first, gloo the second
            dist.all_reduce(tensor)
            assert "all_reduce" in last_collective([dist.group.WORLD])
        placed = [str(tensor.device.type) for tensor in tensors]
        assert gather({"rank": world.rank}) == [{"rank": i} for i in range(world.world_size)]
        assert broadcast(device.type) == DEVICE
        if ON_GPU:
            assert torch.cuda.current_device() == world.local_rank
        return [float(tensor.sum()) for tensor in tensors], placed


@pytest.mark.parametrize("count", [1, 2])
def test_one_group_takes_tensors_of_the_gpu_and_of_the_cpu(gpus: Ranks, count: int) -> None:
    needs(count)
    for sums, placed in gpus.run(_collectives, count=count):
        assert sums == [4.0 * count] * 2
        assert placed == [DEVICE, "cpu"]


def _pinned(workers: int) -> list[bool]:
    """Of each batch that a loader hands out, whether it lay in pinned memory before it went to the device."""
    with rank() as (_, device):
        pinned: list[bool] = []
        batches = Batches(
            load(16, 32).train,
            global_batch=8,
            accumulation=1,
            seed=1,
            rank=0,
            world_size=1,
            device=device,
            workers=workers,
        )
        real = torch.Tensor.to

        def noting(tensor: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
            if options.get("non_blocking"):
                pinned.append(tensor.is_pinned())
            return real(tensor, *arguments, **options)  # type: ignore[call-overload]

        torch.Tensor.to = noting  # type: ignore[method-assign, assignment]
        try:
            for _, microbatches in zip(range(3), batches, strict=False):
                for batch in microbatches:
                    assert batch.inputs.device.type == batch.targets.device.type == DEVICE
        finally:
            torch.Tensor.to = real  # type: ignore[method-assign]
        return pinned


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_go_to_the_gpu_from_pinned_memory(gpus: Ranks, workers: int) -> None:
    assert gpus.run(_pinned, workers)[0] == [ON_GPU] * 6


def test_torchrun_starts_the_training_and_inference_reads_its_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = launched("fsdp2.train", *small(run))
    output, _ = training.communicate(timeout=200)
    assert training.returncode == 0, output
    for arguments in ([], ["--sharded"]):
        inference = launched("fsdp2.infer", str(run), *arguments)
        output, _ = inference.communicate(timeout=200)
        assert inference.returncode == 0, output
        assert "test accuracy" in output


def test_the_one_screen_loop_runs(tmp_path: Path) -> None:
    if not ON_GPU and torch.cuda.is_available():
        pytest.skip("it takes the GPU where there is one")
    program = launched("fsdp2.minimal", str(tmp_path))
    assert program.stdout is not None
    for line in program.stdout:
        if line.startswith("epoch 1/"):
            break
    else:
        pytest.fail("it ended before its first epoch did")
    os.killpg(program.pid, signal.SIGKILL)
    program.wait()
    assert (tmp_path / "epoch-0001" / ".metadata").is_file()


FAULTY = """
import os, sys, time
from pathlib import Path
from fsdp2.config import parse
from fsdp2.run.process import ending, runtime
from fsdp2.train import main

folder, how, *flags = sys.argv[1:]

def on_event(kind, data):
    if kind == "train" and data["step"] == 2:
        Path(folder, f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
        if int(os.environ["RANK"]) == runtime.world().world_size - 1:
            if how == "fails":
                raise ValueError("on purpose")
            if how == "is stuck":
                time.sleep(600)

with ending.exit_status():
    main(parse(flags), on_event)
"""


def _ended(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.2)
    return False


def _pids(folder: Path, count: int, seconds: float = 150) -> list[int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        there = [path.read_text() for path in sorted(folder.glob("rank-*"))]
        if len(there) == count and all(there):
            return [int(text) for text in there]
        time.sleep(0.2)
    pytest.fail(f"of {count} ranks {len(there)} came to step 2")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("how", ["fails", "is stuck", "loses torchrun"])
def test_no_process_is_left_on_the_gpu_when_a_rank(
    tmp_path: Path, how: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(count)
    (tmp_path / "faulty_rank.py").write_text(FAULTY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", str(ROOT))]))
    flags = [*small(tmp_path / "run"), "--max-steps=100000", "--epochs=100000"]
    with open(tmp_path / "output", "w") as output:
        program = launched("faulty_rank", str(tmp_path), how, *flags, count=count, output=output)
    pids = _pids(tmp_path, count)
    if how == "is stuck":  # what a scheduler does: torchrun passes SIGTERM on, and kills who doesn't end in 30 s
        time.sleep(1)
        program.terminate()
    if how == "loses torchrun":
        program.kill()
    program.wait(timeout=100)
    assert program.returncode != 0
    assert all(_ended(pid, 60) for pid in pids), (tmp_path / "output").read_text()
    if how == "fails":
        assert "ValueError: on purpose" in (tmp_path / "output").read_text()
