"""DeepSpeed's ZeRO behind the engine seam: the same losses, checkpoints that any strategy resumes, refusals."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2 import infer
from fsdp2.checkpoint.places import open_files
from fsdp2.checkpoint.store import verify
from fsdp2.config import Config
from fsdp2.options.errors import ConfigError
from fsdp2.options.strategies import check_device
from fsdp2_extra.baselines import zero_refusals
from fsdp2_extra.baselines.deepspeed_settings import settings
from fsdp2_extra.baselines.swap_files import SwapFiles
from fsdp2_extra.baselines.zero_refusals import choose_accelerator
from tests.harness import Ranks, full_files, losses, of_kind, peak_at_start, same

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed: the extra deepspeed"
)
Train = Callable[..., list[tuple[str, dict[str, Any]]]]
STAGES = ["zero1", "zero2", "zero3"]


@pytest.fixture
def zero(train: Train, ranks: Ranks) -> Train:
    """`train` in processes of its own: DeepSpeed keeps groups of ranks in global variables."""

    def run(*flags: str, **options: Any) -> list[tuple[str, dict[str, Any]]]:
        ranks.close()
        try:
            # The first time on a machine DeepSpeed builds its communication for the CPU, which takes a minute.
            return train(*flags, **{"timeout": 280, **options})
        finally:
            ranks.close()

    return run


@needs_deepspeed
@pytest.mark.parametrize(
    "flags",
    [
        "--strategy=zero1",
        "--strategy=zero2",
        "--strategy=zero3 --model=cnn",
        "--strategy=zero3 --model=transformer --model-size=debug --seq-len=16",
    ],
)
def test_losses_norms_and_models_are_those_of_fsdp2(train: Train, zero: Train, tmp_path: Path, flags: str) -> None:
    """Left to its defaults DeepSpeed's drift off from the third step on: it clips to a norm of 1.0 unasked."""
    strategy, *others = flags.split()
    expected = train(*others, run="fsdp2", steps=8)
    found = zero(strategy, *others, run="zero", steps=8)
    assert losses(found) == losses(expected)
    norms = [[data["grad_norm"] for data in of_kind(events, "train")] for events in (found, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)  # another order of summation
    # The consolidated model and optimizer, in fp32.
    assert same(full_files(tmp_path / "zero"), full_files(tmp_path / "fsdp2"))
    header = of_kind(found, "start")[0]["header"]
    assert any(line.startswith(f"sharding: DeepSpeed's stage {strategy[-1]}: ") for line in header)
    assert not any(line.startswith("memory: 0 B") for line in header)
    config = json.loads((tmp_path / "zero" / "deepspeed.json").read_text())
    assert config["zero_optimization"]["stage"] == int(strategy[-1])
    assert config["gradient_clipping"] == 0.0


@needs_deepspeed
def test_stage_3_rounds_attention_of_the_vit_otherwise(train: Train, zero: Train) -> None:
    """Its hooks give each input of a module to another function, so that query, key and value are three tensors where
    they were one; torch.nn.MultiheadAttention then projects them one by one rather than together."""
    expected, found = losses(train(run="fsdp2", steps=8)), losses(zero("--strategy=zero3", run="zero", steps=8))
    assert found[:2] == expected[:2]
    assert found == pytest.approx(expected, rel=1e-6)


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_checkpoints_interchange_with_fsdp2_at_other_world_sizes(
    train: Train, zero: Train, tmp_path: Path, stage: str
) -> None:
    flags = ["--model=cnn", "--global-batch-size=24"]
    whole = losses(train(*flags, run="whole", steps=8))
    zero(f"--strategy={stage}", *flags, run="run", steps=2)
    verify(open_files(str(tmp_path / "run")).at("checkpoints/step-00000002"))
    assert losses(train(*flags, run="run", steps=4)) == whole[2:4]
    again = zero(f"--strategy={stage}", *flags, run="run", steps=6)
    assert of_kind(again, "resume")[0]["step"] == 4
    assert losses(again) == whole[4:6]
    three = zero(f"--strategy={stage}", *flags, run="run", steps=8, n=3)
    # Sums over three are rounded in another order, and dropout is drawn by other ranks.
    assert len(losses(three)) == 2


@needs_deepspeed
@pytest.mark.parametrize(
    "flags",
    [
        "--strategy=zero1 --model=cnn --optimizer=adadelta --lr=1.0",
        "--strategy=zero1 --optimizer=adamw --grad-accumulation=2 --activation-checkpointing",
        "--strategy=zero3 --model=cnn --optimizer=sgd --freeze=conv1.*",
        "--strategy=zero2 --bucket-mb=0.02 --overlap-comm --checkpoint-every=2",
        "--strategy=zero3 --model=cnn --bucket-mb=0.02 --cpu-offload",
        "--strategy=zero1 --cpu-offload",
    ],
)
def test_options_keep_their_meaning(train: Train, zero: Train, tmp_path: Path, flags: str) -> None:
    own = ("--strategy", "--bucket-mb", "--overlap-comm", "--cpu-offload")
    others = [flag for flag in flags.split() if not flag.startswith(own)]
    if "--grad-accumulation=2" in others:
        others.append("--grad-accumulation-sync=last")  # as stage 1 does
    expected = losses(train(*others, run="fsdp2", steps=6))
    assert losses(zero(*flags.split(), run="zero", steps=4)) == expected[:4]
    assert losses(zero(*flags.split(), run="zero", steps=6)) == expected[4:]


@needs_deepspeed
def test_accumulation_in_stage_2_adds_up_what_was_reduced(train: Train, zero: Train) -> None:
    """It has no memory for whole gradients, so each microbatch is reduced: sums are rounded in another order."""
    expected = losses(train("--grad-accumulation=2", run="fsdp2", steps=6))
    assert losses(zero("--strategy=zero2", "--grad-accumulation=2", run="zero", steps=6)) == pytest.approx(
        expected, rel=1e-6
    )


@needs_deepspeed
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_clipping(train: Train, zero: Train, stage: str) -> None:
    expected = losses(train("--clip-grad-norm=0.5", run="fsdp2", steps=8))
    found = zero(f"--strategy={stage}", "--clip-grad-norm=0.5", run="zero", steps=8)
    # The norm is summed in another order.
    assert losses(found) == pytest.approx(expected, abs=1e-5)
    assert all(data["grad_norm"] > 0.5 for data in of_kind(found, "train"))


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_half_precision_trains_and_resumes(zero: Train, train: Train, stage: str) -> None:
    flags = [f"--strategy={stage}", "--mixed-precision=bf16"]
    whole = losses(zero(*flags, run="whole", steps=6))
    close = losses(train("--mixed-precision=bf16", run="fsdp2", steps=6))
    assert whole == pytest.approx(close, rel=5e-3)  # gradients are rounded at other places
    assert losses(zero(*flags, run="run", steps=4)) == whole[:4]
    assert losses(zero(*flags, run="run", steps=6)) == whole[4:]


@needs_deepspeed
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_inference_from_both_kinds_of_file(zero: Train, ranks: Ranks, tmp_path: Path, stage: str) -> None:
    events = zero(f"--strategy={stage}", "--mixed-precision=bf16", "--bucket-mb=1", steps=25)
    accuracy = of_kind(events, "eval")[-1]["accuracy"]
    assert ranks.run(infer.main, tmp_path / "run", ranks=1)[0]["accuracy"] == accuracy
    assert ranks.run(_sharded, tmp_path / "run", ranks=2)[0]["accuracy"] == accuracy


def _sharded(run: Path) -> dict[str, Any]:
    return infer.main(run, sharded=True)


def test_fp16_on_the_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="DeepSpeed has no fp16 there; use bf16"):
        check_device(Config(strategy="zero1", mixed_precision="fp16"), "cpu")


@needs_deepspeed
def test_stage_3_never_holds_the_whole_model(ranks: Ranks) -> None:
    for stage, most in (("zero1", 1.1), ("zero3", 0.7)):
        ranks.close()  # DeepSpeed keeps groups of ranks in global variables
        for whole, peak in ranks.run(peak_at_start, f"--strategy={stage}", timeout=280):
            assert 0.5 * whole < peak < most * whole
            assert stage == "zero3" or peak >= whole
    ranks.close()


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_it_starts_from_a_file_as_fsdp2_does(train: Train, zero: Train, tmp_path: Path, stage: str) -> None:
    train("--model=cnn", run="first", steps=2)
    flags = ["--model=cnn", f"--init-from={tmp_path / 'first' / 'full_model' / 'full-model.pt'}"]
    assert losses(zero(f"--strategy={stage}", *flags, run="zero", steps=3)) == losses(train(*flags, run="a", steps=3))


@needs_deepspeed
def test_memory_of_each_stage_is_less_than_of_the_one_before(zero: Train, tmp_path: Path) -> None:
    from fsdp2_tools.memory.read import read_timelines

    held = []
    for stage in STAGES:
        zero(f"--strategy={stage}", "--memory-snapshot", run=stage, steps=3)
        line = read_timelines(open_files(str(tmp_path / stage)), stage)[0]
        (last,) = [phase for phase in line.phases if phase.name == "optimizer" and phase.step == 3][:1]
        held.append(line.by_kind(last.began))
    # A bucket of DeepSpeed's own size would be 2 GB in each backward.
    assert max(sum(sizes.values()) for sizes in held) < 60e6
    assert held[2]["parameters"] < 0.6 * held[0]["parameters"]
    assert held[0]["optimizer"] == pytest.approx(held[2]["optimizer"], rel=0.05)


def _has_file_io() -> bool:
    """Whether DeepSpeed can build its file I/O here."""
    if importlib.util.find_spec("deepspeed") is None:
        return False
    choose_accelerator("cpu")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))


@needs_deepspeed
def test_state_in_files_trains_and_resumes_bit_for_bit(zero: Train, tmp_path: Path) -> None:
    if not _has_file_io():
        pytest.skip("needs libaio-dev, which DeepSpeed builds its file I/O with")
    # Large enough for files: smaller tensors DeepSpeed keeps in memory.
    flags = ["--strategy=zero3", "--model=transformer", "--model-size=seed", "--seq-len=8", "--batch-size=2"]
    flags += ["--mixed-precision=bf16"]
    expected = losses(zero(*flags, run="memory", steps=4))
    files = [*flags, f"--nvme-offload={tmp_path / 'files'}"]
    assert losses(zero(*files, steps=2)) == expected[:2]
    assert losses(zero(*files, steps=4)) == expected[2:]
    assert same(full_files(tmp_path / "run"), full_files(tmp_path / "memory"))
    assert [path.name for path in (tmp_path / "files").rglob("*.swp")] == []


@needs_deepspeed
def test_state_in_files_is_refused_without_libaio(tmp_path: Path) -> None:
    if _has_file_io():
        pytest.skip("libaio is here")
    with pytest.raises(ConfigError, match=r"--nvme-offload .*: DeepSpeed builds its file I/O with libaio, .* install"):
        check_device(Config(strategy="zero3", nvme_offload=str(tmp_path), mixed_precision="bf16"), "cpu")


def test_fp32_in_files_is_refused_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match=r"--nvme-offload /x on the CPU: .* files of bf16 .* add --mixed-precision"):
        check_device(Config(strategy="zero3", nvme_offload="/x"), "cpu")


def test_files_of_a_rank_are_one_runs_and_go_with_it(tmp_path: Path) -> None:
    mine = SwapFiles(str(tmp_path), 0)
    with pytest.raises(ConfigError, match=r"--nvme-offload .*: in use by a run that is still going"):
        SwapFiles(str(tmp_path), 0)
    other = SwapFiles(str(tmp_path), 1)
    for rank in (0, 1):
        folder = tmp_path / "zero_stage_3" / "optimizer" / f"rank{rank}"
        folder.mkdir(parents=True)
        (folder / "a.swp").write_bytes(b"state")
    mine.release()
    assert [path.parent.name for path in tmp_path.rglob("*.swp")] == ["rank1"]
    SwapFiles(str(tmp_path), 0).release()
    other.release()


def _config(**values: Any) -> dict[str, Any]:
    stage, device_type = values.pop("stage", 2), values.pop("device_type", "cpu")
    return settings(Config(strategy=f"zero{stage}", batch_size=8, **values), device_type)


def test_flags_become_deepspeeds_configuration() -> None:
    plain = _config()
    assert plain["gradient_clipping"] == 0.0
    buckets = {"reduce_bucket_size": 6553600, "allgather_bucket_size": 6553600}
    assert plain["zero_optimization"] == {"stage": 2, "overlap_comm": False, **buckets}
    assert _config(clip_grad_norm=0.5)["gradient_clipping"] == 0.5
    assert _config(bucket_mb=2)["zero_optimization"]["reduce_bucket_size"] == 524288
    assert _config(bucket_mb=2)["zero_optimization"]["allgather_bucket_size"] == 524288
    assert _config(bucket_mb=2, stage=3)["zero_optimization"]["stage3_prefetch_bucket_size"] == 524288
    offload = _config(cpu_offload=True, stage=3, device_type="cuda")["zero_optimization"]
    assert offload["offload_optimizer"] == offload["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert "offload_param" not in _config(cpu_offload=True)["zero_optimization"]
    files = _config(nvme_offload="/disk", stage=3)["zero_optimization"]
    assert files["offload_optimizer"]["nvme_path"] == files["offload_param"]["nvme_path"] == "/disk"
    assert files["offload_param"]["device"] == "nvme"
    half = _config(mixed_precision="fp16", reduce_dtype="fp16")
    assert half["fp16"]["loss_scale_window"] == torch.amp.GradScaler("cpu").get_growth_interval()
    assert half["communication_data_type"] == "fp16"


def test_a_file_overrides_what_the_flags_make(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": 1000}, "wall_clock_breakdown": True}))
    merged = settings(Config(strategy="zero2", deepspeed_config=str(file), clip_grad_norm=2.0), "cpu")
    assert merged["zero_optimization"]["reduce_bucket_size"] == 1000
    assert merged["zero_optimization"]["allgather_bucket_size"] == 6553600
    assert merged["wall_clock_breakdown"] is True
    assert merged["gradient_clipping"] == 2.0


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a table of settings"),
        ('{"gradient_accumulation_steps": 4}', "use --grad-accumulation"),
        ('{"optimizer": {"type": "Adam"}}', "use --optimizer"),
        ('{"zero_optimization": {"stage": 3}}', "is for stage 3; use --strategy zero3"),
        ('{"bf16": {"enabled": true}}', "sets bf16 other than --mixed-precision does"),
    ],
)
def test_a_file_that_contradicts_the_flags_is_refused(tmp_path: Path, content: str, part: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        settings(Config(strategy="zero2", deepspeed_config=str(file)), "cpu")
    assert part in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        settings(Config(strategy="zero2", deepspeed_config=str(tmp_path / "none.json")), "cpu")


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"strategy": "zero1", "compile": True}, "--compile with --strategy zero1"),
        ({"strategy": "zero3", "reshard_after_forward": True}, "--reshard-after-forward with --strategy zero3"),
        ({"strategy": "fsdp2", "overlap_comm": True}, "--overlap-comm with --strategy fsdp2"),
        ({"strategy": "ddp", "deepspeed_config": "x"}, "use --strategy zero1 or drop --deepspeed-config"),
        ({"strategy": "zero1", "resume_partial": True, "resume": "3"}, "--resume-partial with --strategy zero1"),
        ({"strategy": "zero1", "async_checkpoint": "wait"}, "--async-checkpoint with --strategy zero1"),
        ({"strategy": "zero2", "nvme_offload": "x"}, "--nvme-offload with --strategy zero2: zero2 can't keep"),
        ({"strategy": "zero3", "nvme_offload": "x", "cpu_offload": True}, "--nvme-offload with --cpu-offload"),
        ({"strategy": "zero2", "replicas": 2}, "--replicas with --strategy zero2"),
    ],
)
def test_what_zero_can_not_do_is_refused(values: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**values)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("module", "part"), [("deepspeed", "pip install --no-build-isolation"), ("ninja", "ninja can't be found")]
)
def test_what_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, part: str
) -> None:
    from fsdp2.train import main

    found = importlib.util.find_spec("json")
    monkeypatch.setattr(zero_refusals.importlib.util, "find_spec", lambda name: None if name == module else found)
    monkeypatch.setattr(zero_refusals.shutil, "which", lambda name: None if name == module else f"/bin/{name}")
    with pytest.raises(ConfigError, match=part):
        main(Config(strategy="zero1", device="cpu", run_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
