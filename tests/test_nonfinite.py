"""A loss, gradients or weights that are no numbers: what each choice of --on-nonfinite makes of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.state import AppState
from fsdp2.checkpoint.store import HASH, Store, read_marker, says_finite, verify, write_marker
from fsdp2.config import parse
from fsdp2.data.loader import Batch
from fsdp2.options.errors import ConfigError
from fsdp2.parallel.engine import Engine
from fsdp2.parallel.shards import local
from fsdp2.run.process import runtime
from fsdp2.run.process.group import RunStopped
from fsdp2.train import main, train_step
from tests.harness import Ranks, losses, make_engine, of_kind, same, small
from tests.test_resume import metrics_of

Events = list[tuple[str, dict[str, Any]]]
Train = Callable[..., Events]

# The loss of step 3 is huge and its gradients are NaN; from then on the loss is NaN.
DIVERGES = ["--optimizer=sgd", "--lr=900", "--checkpoint-every=1"]


def _stopped(flags: list[str]) -> tuple[str, Events, list[str]]:
    """How a run stops: its message, its events, and threads that it has left behind."""
    events: Events = []
    try:
        main(parse(flags), lambda kind, data: events.append((kind, data)))
    except RunStopped as error:
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("save")]
        return str(error), events, left
    return "not stopped", events, []


def _store(run: Path) -> Store:
    return Store(LocalFiles(run / "checkpoints"))


@pytest.mark.parametrize("flags", ["", "--async-checkpoint", "--strategy=ddp", "--strategy=fsdp1"])
def test_every_rank_stops_after_the_step_and_saves_nothing(
    ranks: Ranks, train: Train, tmp_path: Path, flags: str
) -> None:
    run, given = tmp_path / "run", [*DIVERGES, "--keep=1", *flags.split()]
    results = ranks.run(_stopped, small(run, *given, "--max-steps=9"))
    for message, events, threads in results:
        assert message == results[0][0]
        assert message.startswith("step 3: the gradient norm is nan; nothing was saved after it; ")
        assert f"the last finite checkpoint is {run}/checkpoints/step-00000002; look at --lr" in message
        assert [event["step"] for event in of_kind(events, "checkpoint")] == [1, 2]
        assert not of_kind(events, "eval")
        assert not threads
    assert metrics_of(run)[-1]["kind"] == "failure"
    assert _store(run).committed() == [2]
    verify(_store(run).checkpoint(2))
    # It goes on from there.
    again = train(*given, "--on-nonfinite=continue", steps=4)
    assert of_kind(again, "resume")[0]["step"] == 2
    assert len(losses(again)) == 2


def test_a_step_whose_checkpoint_and_evaluation_are_due_has_neither(ranks: Ranks, tmp_path: Path) -> None:
    message, events, _ = ranks.run(_stopped, small(tmp_path / "run", *DIVERGES[:2], "--max-steps=3"))[0]
    assert message.startswith("step 3: ")
    assert "there is no finite checkpoint" in message
    assert [kind for kind, _ in events] == ["start", "train", "train", "train", "failure"]
    assert _store(tmp_path / "run").committed() == []


def test_the_last_finite_checkpoint_is_never_retired(train: Train, tmp_path: Path) -> None:
    events = train(*DIVERGES, "--on-nonfinite=continue", "--keep=1", steps=7)
    store = _store(tmp_path / "run")
    assert store.committed() == [2, 7]
    assert [read_marker(store.checkpoint(step))["finite"] for step in (2, 7)] == [True, False]
    assert of_kind(events, "end")[0]["nonfinite_steps"] == 5
    records = [record for record in metrics_of(tmp_path / "run") if record["kind"] == "train"]
    assert [record["grad_norm"] for record in records[2:]] == [None] * 5
    again = train(*DIVERGES, "--on-nonfinite=continue", steps=8)
    assert "step-00000007: its weights hold NaN or infinity" in of_kind(again, "resume")[0]["note"]


def test_retention_reads_old_markers_and_passes_over_damaged_ones(tmp_path: Path) -> None:
    store = _store(tmp_path)
    files = {".metadata": {"size": 0, HASH: ""}}
    for step, finite in ((1, None), (2, None), (3, False), (4, False), (5, False)):
        store.begin(step)
        store.commit(step, files, {} if finite is None else {"finite": finite})
    (tmp_path / "checkpoints" / "step-00000004" / "COMMIT.json").write_text("{}")
    assert store.retain(1) == [1, 3, 4]
    assert store.newest_finite(store.committed()) == 2
    assert not says_finite({"finite": "yes"})
    write_marker(store.checkpoint(5), {"step": 5, "files": files, "finite": True})
    assert store.retain(1) == [2]


def _with_and_without(flags: str) -> dict[str, bool]:
    """Three steps, the second of them with a NaN in one rank's data, next to a model that has never seen that step."""
    config = parse(["--model-size=tiny", *flags.split(), "--on-nonfinite=skip"])
    world = runtime.world()
    generator = torch.Generator().manual_seed(world.rank)
    batches = [torch.randn(4, 1, 28, 28, generator=generator) for _ in range(3)]
    if world.rank == world.world_size - 1:
        batches[1][0, 0, 0, 0] = math.nan

    def run(engine: Engine, inputs: torch.Tensor) -> tuple[dict[str, Any], float]:
        targets = torch.arange(4)
        batch = Batch(inputs, targets, True, 4, 4 * world.world_size, True)
        facts, values = train_step(engine, iter([batch]), config, world, [False, False])
        return facts, float(values[1])

    def state(engine: Engine) -> Any:
        tree = AppState(engine.model, engine.optimizer, {}).state_dict()
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: local(tensor).clone(), tree)

    one, other = make_engine(flags), make_engine(flags)
    run(one, batches[0])
    run(other, batches[0])
    before = state(one)
    facts, norm = run(one, batches[1])
    after = state(one)
    last, _ = run(one, batches[2])
    run(other, batches[2])
    return {
        "said": facts["skipped"] and not last["skipped"] and math.isnan(norm),
        "as before": same(after, before),
        "as if never seen": same(state(one), state(other)),
        "trained": not same(state(one), before),
    }


@pytest.mark.parametrize(
    ("flags", "n"),
    [
        ("", 2),
        ("--optimizer=sgd --cpu-offload", 2),
        ("--strategy=fsdp1", 2),
        ("--strategy=ddp", 2),
        ("--replicas=2", 4),
        ("--strategy=none", 1),
    ],
)
def test_a_skipped_step_leaves_everything_as_it_was(ranks: Ranks, flags: str, n: int) -> None:
    for result in ranks.run(_with_and_without, flags, ranks=n):
        assert result == dict.fromkeys(result, True)


def test_a_run_that_skips_says_so_and_keeps_its_weights(train: Train, tmp_path: Path) -> None:
    events = train(*DIVERGES, "--on-nonfinite=skip", "--keep=9", steps=5)
    assert [event["skipped"] for event in of_kind(events, "train")] == [False, False, True, True, True]
    assert of_kind(events, "end")[0]["nonfinite_steps"] == 3
    store = _store(tmp_path / "run")
    assert store.committed() == [1, 2, 3, 4, 5]
    assert all(says_finite(read_marker(store.checkpoint(step))) for step in store.committed())
    with pytest.raises(ConfigError, match=r"--on-nonfinite skip with --strategy zero2: DeepSpeed tells"):
        parse(["--strategy=zero2", "--on-nonfinite=skip"])


def _overflows_by_itself(flags: list[str]) -> tuple[str, Events, list[str]]:
    """A run of finite losses and gradients, in which one rank's second update makes one of its weights infinite."""
    real, done = Engine.step, [0]

    def step(self: Engine, **how: bool) -> bool:
        updated, done[0] = real(self, **how), done[0] + 1
        if done[0] == 2 and dist.get_rank() == 1:
            with torch.no_grad():
                next(part for part in map(local, self.weights()) if part.numel()).view(-1)[0] = math.inf
        return updated

    Engine.step = step  # type: ignore[method-assign]
    try:
        return _stopped(flags)
    finally:
        Engine.step = real  # type: ignore[method-assign]


@pytest.mark.parametrize("mode", ["", "--async-checkpoint"])
def test_weights_that_the_update_itself_breaks_are_not_saved(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    line = small(tmp_path / "run", "--checkpoint-every=1", "--max-steps=2", *mode.split())
    for message, events, threads in ranks.run(_overflows_by_itself, line):
        assert message.startswith("step 2: the weights hold NaN or infinity; nothing was saved after it; ")
        assert "step-00000001; look at" in message
        assert [event["step"] for event in of_kind(events, "checkpoint")] == [1]
        assert not threads
    assert _store(tmp_path / "run").committed() == [1]
    line = small(tmp_path / "on", "--on-nonfinite=continue", "--max-steps=2", *mode.split())
    assert ranks.run(_overflows_by_itself, line)[0][0] == "not stopped"
    assert read_marker(_store(tmp_path / "on").checkpoint(2))["finite"] is False
