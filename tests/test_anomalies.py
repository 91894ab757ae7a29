"""What looks wrong although all values are numbers: jumps, replicas that differ, and a rank that others wait for."""

from __future__ import annotations

import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp2.config import parse
from fsdp2.data.loader import Batches
from fsdp2.options.errors import ConfigError
from fsdp2.parallel.engine import Engine
from fsdp2.parallel.shards import local
from fsdp2.run.process.group import RunStopped
from fsdp2.run.watch import pace
from fsdp2.run.watch.jumps import FEWEST, REMEMBERED, Jumps
from fsdp2.run.watch.pace import slow
from fsdp2.run.watch.waiting import waits_in
from fsdp2.train import main
from fsdp2_extra.elastic import replicas
from tests.harness import Ranks, of_kind, small
from tests.test_resume import metrics_of

Events = list[tuple[str, dict[str, Any]]]


def _record(step: int, loss: float, norm: float) -> dict[str, Any]:
    return {"step": step, "loss": loss, "grad_norm": norm}


def _jumps(losses: list[float], norms: list[float]) -> list[tuple[int, str]]:
    looking = Jumps()
    found = [looking.look(_record(step, *both)) for step, both in enumerate(zip(losses, norms, strict=True))]
    return [(step, one[0]) for step, one in enumerate(found) if one is not None]


def test_a_value_far_above_the_last_ones_is_a_jump() -> None:
    noise = random.Random(0)
    losses = [3.0 * math.exp(noise.gauss(0, 0.05)) for _ in range(400)]
    norms = [0.5 * math.exp(noise.gauss(0, 0.3)) for _ in range(400)]
    assert _jumps(losses, norms) == []
    losses[100], losses[200], norms[300] = 6.0, 4.0, 20.0  # 4.0 is a worse batch
    losses[120] = losses[121] = losses[122] = 9.0  # told once
    losses[FEWEST - 1] = 30.0  # too early to know what is usual
    assert _jumps(losses, norms) == [(100, "loss"), (120, "loss"), (300, "grad_norm")]
    # A new level becomes the usual one.
    assert _jumps(losses[:90] + [30.0] * 3 * REMEMBERED, norms[:90] + [0.5] * 3 * REMEMBERED) == [(90, "loss")]


def test_a_record_of_anything_is_passed_over() -> None:
    looking = Jumps()
    values: list[Any] = ["1", [1], {}, None, True, 10**400, float("nan"), float("inf"), -1, 0]
    for value in values:
        assert looking.look({"loss": value}) is None
        assert looking.look({"grad_norm": value}) is None


def test_a_loss_that_falls_to_nothing_or_is_negative_raises_no_alarm() -> None:
    noise = random.Random(1)
    falling = [2.3 * math.exp(-step / 30) * math.exp(noise.gauss(0, 0.8)) for step in range(400)]
    assert _jumps(falling, falling) == []
    assert _jumps([-5.0, 0.0] * 100, [0.0] * 200) == []
    norms = [math.inf if step % 50 == 40 else math.nan if step % 50 == 45 else 1.0 for step in range(200)]
    assert _jumps([1.0] * 200, norms) == []  # fp16's overflows
    assert _jumps([1.0] * 200, [*norms[:-1], 9.0]) == [(199, "grad_norm")]
    assert _jumps([1.0] * 40 + [1.4], [1.0] * 41) == []  # no deviation at all


def _run_with(method: str, replacement: Callable[..., Any], line: list[str]) -> tuple[str, Events]:
    """How a run ends whose engine has another method, and its events."""
    events: Events = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, method, replacement)
        try:
            main(parse(line), lambda kind, data: events.append((kind, data)))
        except RunStopped as error:
            return str(error), events
    return "not stopped", events


def _with_a_jump(line: list[str], at: int = FEWEST + 4) -> tuple[str, Events]:
    """The gradients of one step of this start are a thousand times as large."""
    real, count = Engine.backward, itertools.count(1)

    def backward(self: Engine, loss: torch.Tensor, last_microbatch: bool) -> None:
        real(self, loss * (1000 if next(count) == at else 1), last_microbatch)

    return _run_with("backward", backward, line)


@pytest.mark.parametrize("flags", [[], ["--on-anomaly=stop", "--async-checkpoint"]])
def test_a_step_whose_gradients_jump_is_reported_or_stops_the_run(
    ranks: Ranks, tmp_path: Path, flags: list[str]
) -> None:
    step, run = FEWEST + 4, tmp_path / "run"
    line = small(run, f"--max-steps={step + 2}", "--checkpoint-every=8", "--strategy=ddp", "--no-save-model", *flags)
    results = ranks.run(_with_a_jump, line)
    for message, events in results:
        (found,) = of_kind(events, "anomaly")
        assert (found["step"], found["about"]) == (step, "grad_norm")
        assert found["what"].startswith("the gradient norm jumps to ")
        if flags:
            assert message.startswith(f"step {step}: {found['what']}; nothing was saved after it; ")
            assert f"the last checkpoint before it is {run}/checkpoints/step-{FEWEST:08}; look at that" in message
        else:
            assert message == "not stopped"
    assert [one["step"] for one in metrics_of(run) if one["kind"] == "anomaly"] == [step]


def test_a_resumed_run_knows_what_was_usual(ranks: Ranks, tmp_path: Path) -> None:
    line = small(tmp_path / "run", "--strategy=ddp", "--no-save-model")
    assert not of_kind(ranks.run(_with_a_jump, [*line, f"--max-steps={FEWEST}"])[0][1], "anomaly")
    for _, events in ranks.run(_with_a_jump, [*line, f"--max-steps={FEWEST + 6}"], 3):
        assert [one["step"] for one in of_kind(events, "anomaly")] == [FEWEST + 3]


def _with_another_norm(line: list[str]) -> tuple[str, Events]:
    """Rank 1 reads a larger gradient norm than its replica, as if its gradients had gone wrong after the reduction."""
    real, count = Engine.clip, itertools.count(1)

    def clip(self: Engine, *arguments: Any) -> torch.Tensor:
        return real(self, *arguments) * (1000 if next(count) == FEWEST + 4 and dist.get_rank() == 1 else 1)

    return _run_with("clip", clip, line)


def test_ranks_that_disagree_about_the_norm_stop_together(ranks: Ranks, tmp_path: Path) -> None:
    line = small(tmp_path / "run", f"--max-steps={FEWEST + 6}", "--strategy=ddp", "--on-anomaly=stop")
    (message, events), (other, others) = ranks.run(_with_another_norm, line)
    assert message == other
    assert message.startswith(f"step {FEWEST + 4}: the gradient norm jumps to ")
    assert [one["grad_norm"] for one in of_kind(events, "train")] == [
        one["grad_norm"] for one in of_kind(others, "train")
    ]


def _with_a_flipped_bit(line: list[str], at: int, rank: int, held: str) -> tuple[str, Events]:
    """One bit that one rank holds is flipped after a step: so low that no loss would show it, and high enough that the
    rounding of the next step doesn't undo it, whatever CPU computes that."""
    real, count = Engine.step, itertools.count(1)

    def step(self: Engine, *, update: bool = True) -> bool:
        updated = real(self, update=update)
        if next(count) == at and dist.get_rank() == rank:
            tensors = [self.model.get_parameter("model.norm.weight")] if held == "norm" else self.held()[held]
            part = local(next(one for one in tensors if local(one).numel() > 1).detach())
            part.view(torch.int32).view(-1)[-1] ^= 1 << 8
        return updated

    return _run_with("step", step, line)


@pytest.mark.parametrize(
    ("flags", "ranks_", "wrong", "held", "words"),
    [
        ("--check-replicas=2 --replicas=2", 4, [0, 2], "parameters", "differ, and which is right isn't known"),
        (
            "--check-replicas=2 --replicas=2 --mixed-precision --cpu-offload",
            2,
            [0, 1],
            "optimizer",
            "differ, and which is right isn't known",
        ),
        # What `fully_shard` splits is whole on no rank; a norm's shard is held by both ranks of --tp.
        (
            "--check-replicas=2 --tp=2 --model=llama --model-size=debug --dataset=random-tokens --seq-len=16",
            4,
            [2, 3],
            "norm",
            "differ, and which is right isn't known: model.norm.weight; ",
        ),
        # Compared by the save alone.
        ("--check-replicas=100 --strategy=ddp", 3, [2], "parameters", "hold other bits than most of their replicas: "),
    ],
)
def test_a_flipped_bit_is_found_and_its_rank_named(
    ranks: Ranks, tmp_path: Path, flags: str, ranks_: int, wrong: list[int], held: str, words: str
) -> None:
    run, common = tmp_path / "run", ["--checkpoint-every=3", "--max-steps=8", "--no-save-model"]
    line = small(run, *common, "--on-anomaly=stop", *flags.split())
    for message, events in ranks.run(_with_a_flipped_bit, line, 5, wrong[-1], held, ranks=ranks_):
        (found,) = of_kind(events, "anomaly")
        assert (found["step"], found["about"], found["ranks"]) == (6, "replicas", wrong)
        assert f"rank {wrong[-1]} (" in found["what"]
        assert words in found["what"]
        assert message.startswith("step 6: replicas differ: ")
        agreed = 4 if "=2" in flags.split()[0] else 3
        assert f"; they agreed after step {agreed}; nothing was saved after it; " in message
        assert f"the last checkpoint of that time is {run}/checkpoints/step-00000003; " in message
    assert [marker.parent.name for marker in run.glob("checkpoints/*/COMMIT.json")] == ["step-00000003"]


def test_replicas_that_agree_raise_no_alarm_and_change_no_loss(ranks: Ranks, train: Any) -> None:
    def losses(events: Events) -> list[float]:
        assert not of_kind(events, "anomaly")
        return [one["loss"] for one in of_kind(events, "train")]

    plain = losses(train("--strategy=ddp", "--resume=never", steps=4))
    assert losses(train("--strategy=ddp", "--resume=never", "--check-replicas=1", steps=4)) == plain


def test_who_differs() -> None:
    rows, columns = ((0, 2), (1, 3)), ((0, 2, 4, 6), (1, 3, 5, 7))
    assert replicas.different([5, 6, 5, 6], rows) == ([], True)
    assert replicas.different([5, 6, 5, 7], rows) == ([1, 3], False)
    assert replicas.different([5, 5, 9, 5], ((0, 1, 2, 3),)) == ([2], True)
    assert replicas.different([1, 2, 1, 2, 1, 3, 4, 2], columns) == ([5, 6], True)
    assert replicas.different([1, 1, 2, 2], ((0, 1, 2, 3),)) == ([0, 1, 2, 3], False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_a_checksum_sees_each_bit(dtype: torch.dtype) -> None:
    device, tensor = torch.device("cpu"), torch.randn(7, 3).to(dtype)
    before = replicas.checksum(tensor, device)
    assert before.dtype == torch.int64
    assert replicas.checksum(tensor.new_empty(0), device) == 0
    raw = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(torch.uint8).view(-1)
    for bit in range(8):
        raw[9] ^= 1 << bit
        assert replicas.checksum(tensor, device) != before
        raw[9] ^= 1 << bit


@pytest.mark.parametrize("flags", ["", "--strategy=fsdp1", "--strategy=none", "--replicas=1"])
def test_what_has_no_replicas_refuses_to_compare_them(flags: str) -> None:
    with pytest.raises(ConfigError, match=r"^--check-replicas with --(replicas 1|strategy \w+): .*(add|use) --"):
        parse(["--check-replicas=10", *flags.split()])


def _slow_rank(line: list[str]) -> Events:
    """Rank 1's batches take long."""
    real = Batches.__iter__
    events: Events = []

    def slow_batches(self: Batches) -> Iterator[Any]:
        for batch in real(self):
            time.sleep(0.12 if dist.get_rank() == 1 else 0.01)
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "WINDOW", 1.0)
        patch.setattr(pace, "FEWEST", 10)
        patch.setattr(Batches, "__iter__", slow_batches)
        main(parse(line), lambda kind, data: events.append((kind, data)))
    return events


def test_a_rank_that_the_others_wait_for_is_named(ranks: Ranks, tmp_path: Path) -> None:
    line = small(tmp_path / "run", "--max-steps=40", "--no-save-model", "--batch-size=8")
    first, _ = ranks.run(_slow_rank, line)
    found = of_kind(first, "anomaly")
    assert found
    assert (found[0]["about"], found[0]["ranks"]) == ("pace", [1])
    assert found[0]["what"].startswith("the others wait for rank 1 (")


def test_who_is_slow() -> None:
    assert slow({0: 0.5, 1: 0.55, 2: 0.4}) == ()
    assert slow({0: 0.5, 1: 0.95}) == (1,)
    assert slow({0: 0.5, 1: 0.9, 2: 0.45, 3: 0.8}) == (1, 3)


class _Looks(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = waits_in(sys._getframe().f_back)
        return inputs


def test_a_module_that_is_recomputed_is_no_wait() -> None:
    looks = _Looks()
    nn.Sequential(checkpoint_wrapper(looks))(torch.zeros(1))
    assert looks.seen == ""
