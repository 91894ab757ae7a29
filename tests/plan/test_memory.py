"""Planned memory beside the ledger of runs, and what has to follow from the flags."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fsdp2.config import Config, parse
from fsdp2_tools.plan import execute
from fsdp2_tools.plan.plans import plan
from fsdp2_tools.plan.saving import CHECKPOINT
from tests.harness import Ranks
from tests.plan.taken import planned, run_settled, taken

LLAMA = "--model=llama --model-size=debug --batch-size=3 --seq-len=96 --dataset=random-tokens --no-save-model"
DEEP = "--model=llama --model-size=10m --batch-size=2 --seq-len=64 --dataset=random-tokens --no-save-model"


def _config(flags: str) -> Config:
    return parse(flags.split())


CNN = "--model=cnn --model-size=tiny --batch-size=4 --test-batch-size=16 --no-save-model"


@pytest.mark.parametrize(
    "flags",
    [
        LLAMA,
        f"{LLAMA} --mixed-precision=fp16 --activation-checkpointing=op",
        f"{LLAMA} --optimizer=adamw --fused-optimizer --grad-accumulation=2 --clip-grad-norm",
        f"{LLAMA} --reshard-after-forward=false --explicit-prefetching=1 --chunked-loss=32",
        f"{LLAMA} --global-batch-size=5 --ema=0.9 --cpu-offload --mixed-precision",
        f"{LLAMA} --test-batch-size=64",  # the peak is in evaluation
        pytest.param(
            f"{LLAMA} --optimizer=adamw --optimizer-state=8bit",
            marks=pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs the extra torchao"),
        ),
        CNN,  # one of its layers is most of the model, so its exchange is the peak
        f"{CNN} --optimizer=sgd --shard-granularity=2 --mixed-precision=bf16",
    ],
)
def test_a_plan_takes_what_a_run_takes(ranks: Ranks, tmp_path: Path, flags: str) -> None:
    line = f"{flags} --threads=1 --device=cpu --max-steps=3 --memory-snapshot"
    ranks.run(run_settled, [*line.split(), f"--run-dir={tmp_path}"])
    for rank in range(2):
        assert taken(tmp_path, rank) == planned(flags, rank=rank).peak.bytes


@pytest.mark.parametrize(
    "flags",
    [
        "--tp=2",
        "--sp=2 --clip-grad-norm",
        "--tp=2 --replicas=2 --activation-checkpointing=block --mixed-precision=bf16",
        "--tp=2 --sp=2 --grad-accumulation=2",
    ],
)
def test_a_plan_of_a_mesh_takes_what_a_run_takes(ranks: Ranks, tmp_path: Path, flags: str) -> None:
    ranks.close()  # torch keeps what it has made of a mesh for the life of a process
    line = f"{LLAMA} {flags} --threads=1 --device=cpu --max-steps=3 --memory-snapshot"
    ranks.run(run_settled, [*line.split(), f"--run-dir={tmp_path}"], ranks=4)
    ranks.close()
    for rank in (0, 3):
        assert taken(tmp_path, rank) == planned(f"{LLAMA} {flags}", ranks=4, rank=rank).peak.bytes


def test_equal_blocks_planned_once_are_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{DEEP} --mixed-precision --activation-checkpointing"
    # Of six blocks nobody plans nine instead.
    assert execute.depths(_config(flags)) is None
    assert execute.depths(_config(flags.replace("10m", "160m"))) == (12, 4, 5)
    monkeypatch.setattr(execute, "depths", lambda config: (6, 4, 5))
    short = planned(flags, ranks=64)
    monkeypatch.setattr(execute, "depths", lambda config: None)
    whole = planned(flags, ranks=64)
    # Ranks send the names of blocks to each other, and some names are longer.
    objects = [one.parts.pop(CHECKPOINT).bytes for one in (short, whole)]  # type: ignore[attr-defined]
    assert objects[0] == pytest.approx(objects[1], rel=0.02)
    assert short == whole


@pytest.mark.parametrize("flags", [LLAMA, f"{CNN} --global-batch-size=15 --grad-accumulation=2"])
def test_no_rank_takes_more_than_the_first(flags: str) -> None:
    # Of seven: one in the midst, and the last, which has no rows of a layer that has few.
    first, *others = (planned(flags, ranks=7, rank=rank) for rank in (0, 3, 6))
    assert first.model_bytes > others[-1].model_bytes
    for other in others:
        assert first.peak.bytes >= other.peak.bytes
        assert first.evaluation.bytes >= other.evaluation.bytes


def test_padding_takes_more_of_a_small_model_on_more_ranks() -> None:
    few, many = (
        planned("--model=vit --model-size=tiny --batch-size=2 --test-batch-size=2", ranks=count) for count in (64, 1024)
    )
    assert many.peak.bytes > few.peak.bytes


def test_more_ranks_take_less_until_padding_is_all_that_is_left() -> None:
    found = [planned(LLAMA, ranks=count).peak for count in (1, 2, 8, 4096)]
    parameters = [peak.kinds["parameters"] for peak in found]
    assert parameters == sorted(parameters, reverse=True)
    whole = sum(p.numel() * 4 for p in _config(LLAMA).spec.on_meta("debug").parameters())
    assert parameters[0] == whole
    assert parameters[-1] > whole / 4096  # a row of each parameter, whatever the rank count


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("--mixed-precision", "activations"),
        ("--activation-checkpointing", "activations"),
        ("--optimizer=sgd", "optimizer"),
        ("--chunked-loss=32", "logits and loss"),
        ("--reshard-after-forward=true", "gathered parameters"),
    ],
)
def test_a_flag_lowers_its_kind(flags: str, kind: str) -> None:
    assert planned(f"{LLAMA} {flags}").peak.kinds.get(kind, 0) < planned(LLAMA).peak.kinds[kind]


def test_replicas_hold_what_fewer_ranks_hold() -> None:
    state = "model_bytes", "optimizer_bytes"
    two = planned(LLAMA, ranks=2)
    four = planned(f"{LLAMA} --replicas=2", ranks=4)
    assert [getattr(two, name) for name in state] == [getattr(four, name) for name in state]


def test_offloaded_state_is_on_the_host_where_there_is_a_device() -> None:
    there = planned(f"{LLAMA} --cpu-offload", gpu=True)
    assert not {"parameters", "gradients", "optimizer"} & set(there.peak.kinds)
    assert there.on_host >= 2 * there.model_bytes + there.optimizer_bytes


def test_many_microbatches_take_what_three_take() -> None:
    few, many = (planned(f"{LLAMA} --grad-accumulation={count}").peak for count in (3, 64))
    assert few.bytes == many.bytes


def test_a_plan_that_is_over_its_budget_says_so() -> None:
    config = _config(LLAMA)
    there = plan(config, 2, None, None)
    assert plan(config, 2, None, there.bytes).fits
    assert not plan(config, 2, None, there.bytes - 1).fits
