"""Memory on a GPU: what the allocator counts beside what the ledger counts, and what the memory savers save."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fsdp2.config import parse
from fsdp2.data.loader import Batch
from fsdp2.parallel.shards import local
from fsdp2.train import main, train_step
from fsdp2_extra.allocations.ledger import Ledger
from fsdp2_extra.allocations.timeline import file_name, load
from tests.gpu.harness import DEVICE, ON_GPU, Events, Ranks, engine, losses, of_kind, rank, small

Train = Callable[..., Events]
SIZE = ["--model=transformer", "--model-size=seed", "--seq-len=64", "--batch-size=32", "--dataset=random-tokens"]


def _peaks(flags: list[str]) -> dict[str, int]:
    """Of the third step: its peak by the ledger and by the allocator, above what neither could know of before."""
    with rank() as (world, device):
        config = parse([*SIZE, f"--device={DEVICE}", *flags])
        made = engine(config, world, device)
        tokens = torch.randint(10_000, (config.batch_size, config.seq_len), device=device)
        batch = Batch(tokens, tokens, True, len(tokens), tokens.numel(), True)

        def step() -> None:
            train_step(made, iter([batch]), config, world, [])

        for _ in range(2):  # cuBLAS' workspaces and nccl's buffers, which stay
            step()
        held = {kind: [t for t in tensors if t.device.type == DEVICE] for kind, tensors in made.held().items()}
        state = sum(local(tensor).nbytes for tensor in held["parameters"])
        with Ledger() as ledger:
            ledger.watch(made.model, held)
            ledger.mark("data", [tokens])
            before = ledger.live_bytes
            if ON_GPU:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                others = torch.cuda.memory_allocated() - before
            step()
            if not ON_GPU:
                return {"ledger": ledger.peak_bytes, "allocator": ledger.peak_bytes, "parameters": state}
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - others
        return {"ledger": ledger.peak_bytes, "allocator": peak, "parameters": state}


@pytest.mark.parametrize("flags", [[], ["--mixed-precision=bf16"], ["--activation-checkpointing"]])
def test_the_ledger_counts_what_the_allocator_does(gpus: Ranks, flags: list[str]) -> None:
    """The allocator rounds up to 512 bytes, and kernels have temporary memory of their own; hence the room above."""
    found = gpus.run(_peaks, flags)[0]
    print(f"{flags or 'default'}: {found}")  # shown with -s: the figures of docs/memory.md
    assert found["allocator"] == pytest.approx(found["ledger"], rel=0.10)


def test_offload_leaves_no_parameter_on_the_gpu(gpus: Ranks) -> None:
    kept, offloaded = gpus.run(_peaks, [])[0], gpus.run(_peaks, ["--cpu-offload"])[0]
    assert kept["parameters"] > 0
    if ON_GPU:
        assert offloaded["parameters"] == 0
        assert offloaded["allocator"] < kept["allocator"] - 2 * kept["parameters"]


def test_half_precision_and_recomputing_save(gpus: Ranks) -> None:
    whole = gpus.run(_peaks, [])[0]["allocator"]
    assert gpus.run(_peaks, ["--mixed-precision=bf16"])[0]["allocator"] < whole
    assert gpus.run(_peaks, ["--activation-checkpointing"])[0]["allocator"] < whole


def test_a_snapshot_has_both_records_and_changes_no_loss(train: Train, tmp_path: Path) -> None:
    plain = losses(train(run="plain"))
    events = train("--memory-snapshot", run="recorded")
    assert losses(events) == plain
    line = load((tmp_path / "recorded" / file_name(0)).read_bytes())
    assert line.facts["device"] == DEVICE
    assert {phase.step for phase in line.phases if phase.name == "backward"} == {1, 2, 3, 4, 5, 6}
    snapshot = tmp_path / "recorded" / "rank0_memory_snapshot.pickle"
    assert snapshot.is_file() == ON_GPU
    if ON_GPU:
        assert 0 < line.facts["allocated_bytes"] <= line.facts["reserved_bytes"]
        history = pickle.loads(snapshot.read_bytes())
        assert history["segments"]
        assert any(history["device_traces"])


def test_a_profile(train: Train, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    plain = losses(train(run="plain"))
    assert losses(train("--profile", run="profiled")) == plain
    assert "Alive at the peak" in (tmp_path / "profiled" / "rank0_memory_profile.html").read_text()


def test_the_peak_in_the_metrics_is_the_allocators(train: Train) -> None:
    events = train()
    peaks = [data["peak_memory_bytes"] for data in of_kind(events, "train")]
    assert all(peak > 0 for peak in peaks)
    assert peaks == sorted(peaks)
    if ON_GPU:  # workspaces of cuBLAS and cuBLASLt above all: 32 MB each on Hopper, for each stream
        assert of_kind(events, "end")[0]["peak_memory_bytes"] < 400e6


def _out_of_memory(flags: list[str]) -> str:
    """The note of a run that has a small part of the device's memory."""
    if ON_GPU:
        torch.cuda.set_per_process_memory_fraction(3e9 / torch.cuda.get_device_properties(0).total_memory)
    try:
        main(parse(flags), lambda kind, data: None)
    except torch.OutOfMemoryError as error:
        return "\n".join(error.__notes__)
    finally:
        if ON_GPU:
            torch.cuda.set_per_process_memory_fraction(1.0)
    return "it had enough"


def test_out_of_memory_says_what_was_alive_and_what_to_do(gpus: Ranks, tmp_path: Path) -> None:
    limit = [] if ON_GPU else ["--memory-limit=40MB"]
    # Of the state, 1 GB, there is room; of the activations of 1024 samples there isn't.
    large = ["--model-size=base", "--batch-size=1024"] if ON_GPU else ["--model-size=seed", "--batch-size=64"]
    try:
        note = gpus.run(_out_of_memory, [*small(tmp_path / "run"), *large, *limit])[0]
    finally:
        gpus.close()  # what such an error leaves in a process is nobody else's to meet
    assert "of tensors were alive on this rank" in note
    assert "parameters" in note
    assert "--mixed-precision bf16" in note
    assert ("--cpu-offload" in note) == ON_GPU


def test_the_library_has_the_functions_of_the_allocators_history() -> None:
    """They have no public name, so a torch that moves them must be noticed."""
    assert callable(torch.cuda.memory._record_memory_history)
    assert callable(torch.cuda.memory._snapshot)
