"""What saving and loading take, beside the ledgers of runs that save and load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2 import train
from fsdp2.checkpoint import full_model
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.restore import restore
from fsdp2.checkpoint.saver import save_now
from fsdp2.checkpoint.state import AppState
from fsdp2.checkpoint.store import Store
from fsdp2.config import parse
from fsdp2.run import initial_weights
from fsdp2.run.process import runtime
from fsdp2_extra.allocations.ledger import Ledger
from fsdp2_extra.allocations.timeline import Timeline, load
from fsdp2_tools.plan.plans import plan
from fsdp2_tools.plan.saving import CHECKPOINT, FULL_MODEL, RESTORING, STARTING
from tests.harness import Ranks, small
from tests.plan.taken import planned, run_settled, taken

LLAMA = "--model=llama --model-size=debug --batch-size=3 --seq-len=96 --dataset=random-tokens --test-batch-size=4"


def _most(run: Path, phase: str) -> tuple[int, int]:
    """The most bytes of a phase on rank 0, and those of them that ranks sent each other as objects.

    Without what is mapped from a file, which a ledger takes for memory.
    """
    line = load((run / "rank0_memory_timeline.json.gz").read_bytes())
    most = sent = total = objects = 0
    for when, change, allocation in line.changes():
        there = line.phases[allocation.phase].name
        if there == FULL_MODEL and allocation.operation == "view":
            continue
        total += change
        objects += change * (there == CHECKPOINT and allocation.kind == "communication")
        if line.phase_at(when).name == phase and total > most:
            most, sent = total, objects
    return most, sent


@pytest.mark.parametrize("flags", ["", "--dcp-api --ema=0.9 --mixed-precision --optimizer=sgd"])
def test_a_save_takes_what_is_planned(ranks: Ranks, tmp_path: Path, flags: str) -> None:
    line = f"{LLAMA} {flags} --threads=1 --device=cpu --max-steps=3 --memory-snapshot"
    ranks.run(run_settled, [*line.split(), f"--run-dir={tmp_path}"])
    parts = planned(line).parts
    assert _most(tmp_path, FULL_MODEL)[0] == parts[FULL_MODEL].bytes
    taken, sent = _most(tmp_path, CHECKPOINT)
    objects = parts[CHECKPOINT].kinds["plans of all ranks"]
    assert parts[CHECKPOINT].bytes - objects == taken - sent
    # A scheduler's and a loader's state, which a plan doesn't have, are in what is sent.
    assert objects == pytest.approx(sent, rel=0.05)


def test_a_large_model_is_gathered_at_a_url_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_model, "LARGEST_UNASKED", 1_000)
    line = f"{LLAMA} --seed=2"  # of which no other test has a plan
    assert FULL_MODEL not in planned(f"{line} --save-model --run-dir=runs/large").parts
    assert FULL_MODEL not in planned(f"{line} --run-dir=memory://large").parts
    assert FULL_MODEL in planned(f"{line} --save-model --run-dir=memory://large").parts


def test_copies_of_a_save_in_the_background_are_there_in_later_steps(ranks: Ranks, tmp_path: Path) -> None:
    line = f"{LLAMA} --async-checkpoint --checkpoint-every=1 --no-save-model --threads=1 --device=cpu --max-steps=4"
    ranks.run(run_settled, [*line.split(), "--memory-snapshot", f"--run-dir={tmp_path}"])
    there = planned(line)
    assert there.peak.bytes == taken(tmp_path, 0)
    state = there.model_bytes + there.optimizer_bytes
    assert there.peak.bytes - planned(LLAMA).peak.bytes >= state
    # On a GPU they are in the machine's memory.
    on_gpu = planned(line, gpu=True)
    assert on_gpu.on_host >= state
    assert on_gpu.peak.bytes == planned(LLAMA, gpu=True).peak.bytes


def _restored(folder: str) -> tuple[int, int]:
    """The most bytes that a restore takes, and the largest piece of a file that it reads. In `Ranks`."""
    config, world = parse(LLAMA.split()), runtime.world()
    engine = train.make_engine(config, world, torch.device("cpu"), restoring=False)
    store, app = Store(LocalFiles(Path(folder))), AppState(engine.model, engine.optimizer, engine.parts, engine)
    save_now(store, app, 1, keep=1)
    with Ledger() as ledger:
        ledger.watch(engine.model, engine.held())
        restore(store.checkpoint(1), app)
    own = [a for a in ledger.allocations if a.kind != "communication"]  # which gloo's thread may hold for a while
    return Timeline({}, own, ledger.phases, []).peak()[1], max(a.bytes for a in own if a.operation == "empty")


def test_a_restore_takes_what_is_planned(ranks: Ranks, tmp_path: Path) -> None:
    taken, piece = ranks.run(_restored, str(tmp_path))[0]
    there = planned(LLAMA).parts[RESTORING]
    header = piece - there.kinds["between device and file"] // 2  # of the archive that a file has for each tensor
    assert 0 < header < 2048
    assert there.bytes == taken - header


def _started(flags: str) -> int:
    """The most bytes while the weights to start from are loaded. In `Ranks`."""
    config, ledger = parse(flags.split()), Ledger()
    real = initial_weights.LoadedWeights.__call__

    def counting(self: Any, model: Any) -> None:
        with ledger:
            ledger.watch(model, {"parameters": model.parameters(), "buffers": model.buffers()})
            real(self, model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial_weights.LoadedWeights, "__call__", counting)
        train.make_engine(config, runtime.world(), torch.device("cpu"), restoring=False)
    return ledger.peak_bytes


def test_starting_from_weights_takes_what_is_planned(ranks: Ranks, tmp_path: Path) -> None:
    run = [*LLAMA.split(), "--max-steps=1", "--save-model", "--device=cpu"]
    ranks.run(run_settled, [*run, f"--run-dir={tmp_path}"])
    line = f"{LLAMA} --init-from={tmp_path}/checkpoints/step-00000001"
    there = planned(line).parts[STARTING]
    taken = ranks.run(_started, line)[0]
    rows = there.kinds["between device and file"] // 3
    assert rows == 32768  # of the embedding
    assert 0 < taken - there.bytes < 2048  # an archive's header
    # torch maps the file on rank 0, which a ledger takes for memory, and broadcasts names and shapes with the tensors.
    file = tmp_path / "full_model/full-model.pt"
    for name in ("full-model.pt", "weights.bin"):  # a file of torch's under any name
        file = file.rename(tmp_path / name)
        line = f"{LLAMA} --dcp-api --init-from={file}"
        assert planned(line).parts[STARTING].bytes == pytest.approx(ranks.run(_started, line)[0], rel=0.005), name


WORDS = "--model=llama --model-size=debug --dataset=random-tokens --seq-len=16"


@pytest.mark.parametrize(
    ("flags", "count"), [("", 2), (f"{WORDS} --ema=0.9", 2), ("", 1), (f"{WORDS} --init-from={{}} --lora=4", 2)]
)
def test_the_files_of_a_checkpoint_take_at_most_what_is_planned(
    train: Callable[..., Any], tmp_path: Path, flags: str, count: int
) -> None:
    if "--lora" in flags:
        pytest.importorskip("peft")
        train(*WORDS.split(), "--save-model", n=count, steps=1, run="weights")
        flags = flags.format(tmp_path / "weights")
    train(*flags.split(), n=count, steps=1)
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    there = sum(file.stat().st_size for file in folder.iterdir())
    planned = plan(parse(small(tmp_path / "run", *flags.split())), count, None, None)
    assert there <= planned.checkpoint_bytes < 1.5 * there
