"""A run goes on bit for bit: killed or stopped, on other ranks, under another strategy."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import fsdp2.run.start
import fsdp2.train
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.state import RandomState
from fsdp2.checkpoint.store import MARKER, Store
from fsdp2.config import Config, parse
from fsdp2.options.errors import ConfigError
from fsdp2.options.parser import to_flags
from fsdp2.report import planned
from fsdp2.run import resuming
from fsdp2.run.directory.marker import shapes_of
from tests.harness import SMALL, Ranks, full_files, losses, main_in_ranks, of_kind, same

Events = list[tuple[str, dict[str, Any]]]
Train = Callable[..., Events]


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--model=cnn --clip-grad-norm",  # dropout: the random state of each rank counts
        "--mixed-precision=fp16 --optimizer=adadelta --lr=0.5 --grad-accumulation=2",
        "--strategy=ddp --optimizer=sgd",
        "--strategy=fsdp1 --model=cnn",
        "--cpu-offload --freeze=conv_proj.* --explicit-prefetching",
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(train: Train, tmp_path: Path, flags: str) -> None:
    whole = losses(train(*flags.split(), run="whole", steps=9))
    # Steps 1 to 4 stop in the middle of an epoch and lose step 5 on, as a kill would make them.
    first = train(*flags.split(), "--checkpoint-every=4", steps=6)
    assert losses(first) == whole[:6]
    for step in (6,):
        (tmp_path / "run" / "checkpoints" / f"step-{step:08d}" / MARKER).unlink()
    second = train(*flags.split(), steps=9)
    assert of_kind(second, "resume")[0]["step"] == 4
    assert losses(second) == whole[4:]
    steps = [record["step"] for record in metrics_of(tmp_path / "run") if record["kind"] == "train"]
    assert steps == list(range(1, 10)), "each step stands once in metrics.jsonl"
    assert same(full_files(tmp_path / "run"), full_files(tmp_path / "whole"))


def _drawing(flags: list[str], names: list[str]) -> Events:
    """A run in which functions of `train.main` draw numbers of every generator. To be run by `Ranks`."""

    def drawing(function: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            torch.rand(3), random.random(), numpy.random.random()
            return function(*args, **kwargs)

        return drawn

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(fsdp2.train, name, drawing(getattr(fsdp2.train, name)))
        return main_in_ranks(flags)


def test_only_the_training_draws_its_numbers(ranks: Ranks, tmp_path: Path) -> None:
    """A model that is made to be described draws its initial values, or its adapters do; a resumed run makes others."""
    line = [*SMALL, "--model=cnn", "--max-steps=3", "--checkpoint-every=never"]
    before = ["try_out", "keep_in_memory", "write_start", "observed", "Reports", "Watch", "Checkpoints"]
    plain, drawn = (
        losses(ranks.run(_drawing, [*line, f"--run-dir={tmp_path / str(len(names))}"], names)[0])
        for names in ([], before)
    )
    assert plain == drawn


# Flags that a resumed run may change in silence. The data's hash and the model's shapes tell when samples or weights
# are others, and what shards, stores and watches changes no loss but by rounding.
DATA = "model trust_remote_code model_size eval_dataset bad_samples tokenizer text_field data_root"
LENGTH = "max_steps eval_every batch_size global_batch_size test_batch_size loader_workers grad_accumulation"
SHARDING = """strategy replicas tp sp shard_modules shard_granularity reshard_after_forward explicit_prefetching
    forward_prefetch backward_prefetch bucket_mb fsdp1_sharding min_wrap_params fsdp1_backward_prefetch overlap_comm
    deepspeed_config nvme_offload cpu_offload grad_accumulation_sync"""
COMPUTING = """fused_optimizer activation_checkpointing chunked_loss compile attention device threads doctor
    matmul_precision deterministic gc_every timeout"""
KEEPING = """run_dir resume resume_partial verify init_from init_partial save_model dcp_api checkpoint_every keep
    keep_every keep_best async_checkpoint memory_checkpoint on_checkpoint_failure"""
WATCHING = """on_anomaly check_replicas inspect memory_snapshot memory_limit profile track run_name tag tensorboard"""


def test_each_flag_is_kept_told_or_may_change() -> None:
    """A new flag that changes what is trained goes into `KEPT` or `_COMPUTES` of run/resuming.py; another one, here."""
    free = {name.replace("_", "-") for name in " ".join((DATA, LENGTH, SHARDING, COMPUTING, KEEPING, WATCHING)).split()}
    told = {*resuming.KEPT, *resuming._COMPUTES}
    assert free & told == set()
    assert {one.name.replace("_", "-") for one in dataclasses.fields(Config)} == free | told


@pytest.mark.parametrize(
    ("flag", "default"),
    [
        ("--lr-floor=0.5", "0.0"),
        ("--ema=0.9", "None"),
        ("--weight-decay=0.3", "None"),
        ("--betas=0.8,0.9", "None"),
        ("--optimizer-state=8bit", "None"),
        ("--freeze=encoder.ln*", "[]"),
    ],
)
def test_a_checkpoint_of_before_a_flag_has_its_default(flag: str, default: str) -> None:
    usual = parse(line := ["--schedule=cosine", "--optimizer=adamw"])
    model, checkpoint = usual.spec.on_meta(usual.model_size), LocalFiles("a checkpoint")
    name = flag[2:].partition("=")[0]
    flags = {one: value for one, value in to_flags(usual).items() if one != name}
    marker = {"model": shapes_of(model), "config": flags}
    resuming.check_checkpoint(usual, model, checkpoint, marker)
    refused = rf"--{name} .*: the checkpoint to resume from was made with {re.escape(default)}; "
    with pytest.raises(ConfigError, match=refused):
        resuming.check_checkpoint(parse([*line, flag]), model, checkpoint, marker)


# Flags of which a plan is; `FREE` of report/planned.py has those that change neither memory nor time.
PLANNED = """model model_size dataset documents seq_len batch_size global_batch_size test_batch_size loader_workers
    optimizer fused_optimizer optimizer_state weight_decay ema clip_grad_norm grad_accumulation grad_accumulation_sync
    freeze lora lora_targets lora_dropout strategy replicas tp sp shard_modules shard_granularity reshard_after_forward
    explicit_prefetching forward_prefetch backward_prefetch bucket_mb fsdp1_sharding min_wrap_params
    fsdp1_backward_prefetch overlap_comm deepspeed_config nvme_offload mixed_precision float8 reduce_dtype cpu_offload
    activation_checkpointing chunked_loss compile attention matmul_precision deterministic gc_every async_checkpoint
    memory_checkpoint on_nonfinite dcp_api profile"""


def test_each_flag_is_part_of_a_plan_or_is_free_of_it() -> None:
    names = {name.replace("_", "-") for name in PLANNED.split()}
    assert names & planned.FREE == set()
    assert {one.name.replace("_", "-") for one in dataclasses.fields(Config)} == names | planned.FREE


def test_resuming_over_the_end_of_an_epoch(train: Train, tmp_path: Path) -> None:
    # 1,437 images in batches of 2 x 256: three steps an epoch, the last one short.
    flags = ["--batch-size=256", "--epochs=3", "--no-save-model"]
    whole = train(*flags, run="whole", steps=None)
    assert [event["samples"] for event in of_kind(whole, "train")][:3] == [512, 512, 413]
    assert [event["lr"] for event in of_kind(whole, "train")][2:4] == [1e-3, pytest.approx(0.85e-3)]
    train(*flags, steps=4)
    rest = train(*flags, steps=None)
    assert losses(rest) == losses(whole)[4:]
    kinds = [(r["kind"], r.get("step")) for r in metrics_of(tmp_path / "run") if r["kind"] in ("train", "eval")]
    assert kinds[-1] == ("eval", 9)
    # The interrupted run evaluated at step 4, because --max-steps ends a run properly.
    assert [kind for kind in kinds if kind != ("eval", 4)] == [
        (r["kind"], r["step"]) for r in metrics_of(tmp_path / "whole") if r["kind"] in ("train", "eval")
    ]


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (2, 3), (1, 4), (3, 2)])
def test_another_number_of_ranks_restores_the_same_state(
    train: Train, reference: Callable[..., list[float]], tmp_path: Path, saved: int, loaded: int
) -> None:
    train("--global-batch-size=48", n=saved)
    before = full_files(tmp_path / "run")
    (tmp_path / "run" / "full_model" / "full-model.pt").unlink()
    # Nothing is left to do but to write the full model again, from the restored shards.
    again = train("--global-batch-size=48", n=loaded)
    assert of_kind(again, "end")[0]["reason"] == "already finished"
    assert of_kind(again, "resume")[0]["random_state_restored"] is False
    assert same(full_files(tmp_path / "run"), before)
    # And it trains on with the same samples.
    more = train("--global-batch-size=48", "--no-save-model", n=loaded, steps=8)
    whole = reference("--global-batch-size=48", n=saved, steps=8)
    for ours, theirs in zip(losses(more), whole[6:], strict=True):
        assert abs(ours - theirs) / theirs < 1e-5  # sums over another number of ranks are rounded otherwise


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("fsdp2", 2), ("none", 1)),
        (("none", 1), ("fsdp2", 2)),
        (("ddp", 2), ("fsdp2", 2)),
        (("fsdp2", 2), ("ddp", 2)),
        (("fsdp2", 2), ("fsdp1", 2)),
        (("fsdp1", 2), ("fsdp2", 3)),
    ],
)
def test_strategies_read_each_others_checkpoints(
    train: Train, tmp_path: Path, first: tuple[str, int], second: tuple[str, int]
) -> None:
    train(f"--strategy={first[0]}", "--global-batch-size=32", n=first[1])
    before = full_files(tmp_path / "run")
    (tmp_path / "run" / "full_model" / "full-model.pt").unlink()
    train(f"--strategy={second[0]}", "--global-batch-size=32", n=second[1])
    after = full_files(tmp_path / "run")
    assert same(after[0], before[0])
    assert same(after[1]["state"], before[1]["state"])


def test_hsdp_and_one_dimensional_meshes_read_each_others_checkpoints(train: Train, tmp_path: Path) -> None:
    train("--replicas=2", "--global-batch-size=32", n=4)
    before = full_files(tmp_path / "run")
    (tmp_path / "run" / "full_model" / "full-model.pt").unlink()
    train("--global-batch-size=32", n=2)
    assert same(full_files(tmp_path / "run"), before)


def _resume_with_another_generator(run: str) -> bool:
    """Resume as a machine would that has a generator which the checkpoint lacks, such as a GPU's."""
    start: Any = fsdp2.run.start

    class WithGPU(RandomState):
        def state_dict(self) -> dict[str, Any]:
            return {self.key: {**super().state_dict()[self.key], "cuda": torch.zeros(16, dtype=torch.uint8)}}

    events: list[tuple[str, dict[str, Any]]] = []
    real, start.RandomState = start.RandomState, WithGPU
    try:
        flags = [*SMALL, "--max-steps=4"]
        fsdp2.train.main(parse([*flags, f"--run-dir={run}"]), lambda kind, data: events.append((kind, data)))
    finally:
        start.RandomState = real
    return of_kind(events, "resume")[0]["random_state_restored"]


def test_a_generator_that_was_not_saved_is_seeded_anew(train: Train, ranks: Ranks, tmp_path: Path) -> None:
    train(steps=2)
    assert ranks.run(_resume_with_another_generator, str(tmp_path / "run")) == [False, False]


def test_a_finished_run_says_so(train: Train, tmp_path: Path) -> None:
    train(steps=3)
    before = (tmp_path / "run" / "full_model" / "full-model.pt").stat().st_mtime_ns
    again = train(steps=3)
    assert losses(again) == []
    assert of_kind(again, "end")[0]["reason"] == "already finished"
    assert (tmp_path / "run" / "full_model" / "full-model.pt").stat().st_mtime_ns == before


def test_resume_from_an_older_step_sets_the_newer_aside(train: Train, tmp_path: Path) -> None:
    first = train("--checkpoint-every=2", "--no-save-model", steps=6)
    again = train("--checkpoint-every=2", "--no-save-model", "--resume=2", steps=6)
    assert losses(again) == losses(first)[2:]
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == [
        *(f"step-0000000{n}" for n in (2, 4, 6)),
        *(f"superseded-1-step-0000000{n}" for n in (4, 6)),
    ]


def test_what_a_resume_computes_otherwise_is_said(train: Train) -> None:
    train(steps=1)
    (begun,) = of_kind(train("--clip-grad-norm=0.5", "--mixed-precision=bf16", steps=2), "resume")
    words = "from here on --clip-grad-norm 0.5 (before: off), --mixed-precision bf16 (before: off)"
    assert begun["note"] == words
    (begun,) = of_kind(train("--clip-grad-norm=0.5", "--mixed-precision=bf16", steps=3), "resume")
    assert begun["note"] is None


def test_a_resume_of_a_run_from_weights_says_what_it_lost(train: Train, tmp_path: Path) -> None:
    given = ("--optimizer=adamw", "--lr=1e-3", "--schedule=constant", "--warmup-steps=0", "--no-save-model")
    train(run="first", steps=1)
    train(*given, f"--init-from={tmp_path / 'first'}", steps=1)
    (begun,) = of_kind(train(*given, steps=2), "resume")
    assert begun["note"] == "from here on --epochs 12 (before: 3), --clip-grad-norm off (before: 1.0)"


def test_resume_never_starts_again_and_loses_nothing(train: Train, tmp_path: Path) -> None:
    first = train(steps=3)
    again = train("--resume=never", steps=3)
    assert losses(again) == losses(first)
    assert "set aside" in of_kind(again, "start")[0]["note"]
    assert (tmp_path / "run" / "checkpoints" / "superseded-1-step-00000003" / MARKER).exists()
    assert [r["step"] for r in metrics_of(tmp_path / "run") if r["kind"] == "train"] == [1, 2, 3]


@pytest.mark.parametrize("path", ["first", "first/checkpoints/step-00000003"])
def test_resume_from_another_run(
    train: Train, reference: Callable[..., list[float]], tmp_path: Path, path: str
) -> None:
    train("--no-save-model", run="first", steps=3)
    assert (
        losses(train(f"--resume={tmp_path / path}", "--no-save-model", run="second", steps=5)) == reference(steps=5)[3:]
    )


def test_keep_removes_the_oldest(train: Train, tmp_path: Path) -> None:
    train("--checkpoint-every=1", "--keep=2", "--no-save-model", steps=5)
    assert Store(LocalFiles(tmp_path / "run" / "checkpoints")).committed() == [4, 5]


def test_checkpoints_are_written_each_epoch_unless_told(train: Train, tmp_path: Path) -> None:
    events = train("--batch-size=360", "--epochs=2", steps=None)
    assert [(e["step"], e["epoch"]) for e in of_kind(events, "checkpoint")] == [(2, 1), (4, 2)]
    assert [(e["step"], e["epoch"]) for e in of_kind(events, "eval")] == [(2, 0), (4, 1)]
