"""`examples/dpo.py` beside plain torch: rates, clipping, held-out pairs, what it prints and writes."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from examples import dpo
from fsdp2.options.errors import ConfigError
from fsdp2.run.process.signals import StopSignals
from fsdp2_extra.text import pairs
from fsdp2_extra.text.tokenizer_file import own_tokenizer
from fsdp2_tools.checkpoint import __main__ as checkpoint
from tests.harness import Ranks, python_environment, same
from tests.others.common import plain, save
from tests.others.test_examples import CPU, PAIRS, _batches, _norm_on_two_ranks
from tests.programs import in_a_process, on_ranks_of_its_own
from tests.test_chat import PLAIN, make_tokenizer

STEPS = 6


def _pairs(folder: str) -> pairs.Pairs:
    return pairs.load(str(PAIRS), own_tokenizer(Path(folder)), 64, 256, as_="text")


def _on_ranks(folder: str, out: Path, steps: int, *more: str) -> list[dict[str, float]]:
    flags = dpo.parse([folder, str(PAIRS), str(out), "--pairs-as=text", "--lr=1e-3", "--epochs=3", *more])
    return dpo.train(flags, _pairs(folder), CPU, steps, _pairs(folder))


def _records(out: Path, kind: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [one for one in records if one["kind"] == kind]


def _alone(folder: str) -> tuple[list[float], list[float], list[float], dict[str, float]]:
    """Losses, norms, rates and the last evaluation of a plain loop: two steps of warm-up, a cosine, norm 1."""
    policy, reference = plain(folder), plain(folder)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    both = [_batches(folder, rank) for rank in (0, 1)]
    losses, norms, rates = [], [], []
    for step in range(STEPS):
        rate = 1e-3 * ((step + 1) / 3 if step < 2 else (1 + math.cos(math.pi * (step - 2) / (STEPS - 2))) / 2)
        optimizer.param_groups[0]["lr"] = rate
        parts = []
        for batches in both:
            if batches.at_end():
                batches.next_epoch()
            (batch,) = next(iter(batches))
            parts.append(dpo.figures_of(policy, reference, 0.1, batch.inputs, batch.targets)[0] / batch.samples)
            parts[-1].backward()
        losses.append((parts[0] + parts[1]).item())
        norms.append(float(_norm_on_two_ranks([one.grad for one in policy.parameters() if one.grad is not None])))
        torch.nn.utils.clip_grads_with_norm_(policy.parameters(), 1.0, torch.tensor(norms[-1]), foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        rates.append(rate)
    with torch.no_grad():
        inputs, targets = _pairs(folder).__getitems__(range(6))
        held_out = dpo.figures_of(policy, reference, 0.1, inputs, targets) / 6
    return losses, norms, rates, dict(zip(dpo.FIGURES, held_out.tolist(), strict=True))


def test_a_run_is_the_plain_loop_and_is_written_down(ranks: Ranks, tmp_path: Path) -> None:
    folder, out = save("llama", tmp_path / "model").removeprefix("hf:"), tmp_path / "out"
    losses, norms, rates, held_out = _alone(folder)
    assert max(norms) > 1.0 > min(norms) or min(norms) > 1.0, "nothing is clipped: the test shows less than it says"
    for steps in (3, STEPS):  # the second goes on
        found = ranks.run(_on_ranks, folder, out, steps, "--warmup-steps=2")[0]
    assert len(found) == 3
    records = _records(out, "train")
    assert [one["step"] for one in records] == [1, 2, 3, 4, 5, 6]
    assert [one["loss"] for one in records] == losses
    assert [one["lr"] for one in records] == rates
    assert [one["grad_norm"] for one in records] == norms
    assert len(_records(out, "start")) == len(_records(out, "resume")) == 1
    evaluations = _records(out, "eval")
    assert [one["step"] for one in evaluations] == [2, 3, 4, 6]  # each epoch's end, and that of a run
    for name in dpo.FIGURES:  # sums of other batches
        assert evaluations[-1][name] == pytest.approx(held_out[name], rel=1e-5, abs=1e-6)
    said = (out / f"model-{STEPS}" / "README.md").read_text()
    assert f"| `train loss` | `{float(f'{losses[-1]:.4g}')}` |" in said
    assert "by `examples/dpo.py`" in said
    assert "| `warmup-steps` | `2" in said
    assert "| `beta` |" not in said  # it is the default
    assert str(tmp_path) not in said


def test_a_tracker_has_its_figures_through_a_resume(ranks: Ranks, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder, out = save("llama", tmp_path / "model").removeprefix("hf:"), tmp_path / "out"
    found = []
    for steps in (2, 3):
        found += ranks.run(_on_ranks, folder, out, steps, "--track=tensorboard")[0]
    board = accumulator.EventAccumulator(str(out / "tensorboard"))
    board.Reload()
    for name in dpo.FIGURES:
        shown = [(one.step, one.value) for one in board.Scalars(f"train/{name}")]
        assert shown == [(step, pytest.approx(one[name])) for step, one in enumerate(found, 1)]  # it keeps fp32
    assert [one.step for one in board.Scalars("eval/loss")] == [2, 3]


def test_a_tracker_hears_how_a_run_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    folder = save("llama", tmp_path / "model").removeprefix("hf:")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    line = [folder, str(PAIRS), "out", "--pairs-as=text", "--track=mlflow"]  # a path of the working directory
    for reason in ("finished", "already finished"):
        status, printed = on_ranks_of_its_own(2, dpo.__file__, line, tmp_path, {"MLFLOW_ALLOW_FILE_STORE": "true"})
        assert status == 0, printed
        client = mlflow.MlflowClient((tmp_path / "out" / "mlruns").as_uri())
        (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
        assert run.info.status == "FINISHED", printed
        assert _records(tmp_path / "out", "end")[-1]["reason"] == reason


def test_microbatches_are_one_batch_to_rounding(ranks: Ranks, tmp_path: Path) -> None:
    """Of the last step of an epoch, 2 pairs of 6, one rank's second microbatch is empty."""
    folder = save("llama", tmp_path / "model").removeprefix("hf:")
    for name, more in (("whole", ()), ("parts", ("--batch-size=1", "--eval-every=3", "--eval-pairs=none"))):
        ranks.run(_on_ranks, folder, tmp_path / name, STEPS, *more)
    evaluated = [[one["step"] for one in _records(tmp_path / name, "eval")] for name in ("whole", "parts")]
    assert evaluated == [[2, 4, 6], [2, 3, 4, 6]]
    whole, parts = (_records(tmp_path / name, "train") for name in ("whole", "parts"))
    for kind in (*dpo.FIGURES, "grad_norm"):  # sums in another order
        assert [one[kind] for one in parts] == pytest.approx([one[kind] for one in whole], rel=1e-4, abs=1e-6)
    assert [one["samples"] for one in parts] == [one["samples"] for one in whole] == [4, 2] * 3


def _stopped(folder: str, out: Path) -> int:
    class Stop(StopSignals):
        asked = 0

        @property
        def reason(self) -> str | None:
            self.asked += 1
            return "SIGTERM" if self.asked > 2 and dist.get_rank() else None  # before the third step, on one rank

    flags = dpo.parse([folder, str(PAIRS), str(out), "--pairs-as=text", "--lr=1e-3", "--epochs=3"])
    return len(dpo.train(flags, _pairs(folder), CPU, STEPS, _pairs(folder), Stop()))


def test_who_is_asked_to_stop_saves_and_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "model").removeprefix("hf:")
    ranks.run(_on_ranks, folder, tmp_path / "whole", STEPS)
    assert ranks.run(_stopped, folder, tmp_path / "run") == [3, 3]
    assert not (tmp_path / "run" / f"model-{STEPS}").exists()
    ranks.run(_on_ranks, folder, tmp_path / "run", STEPS)
    whole, run = (_records(tmp_path / name, "train") for name in ("whole", "run"))
    assert [one["loss"] for one in run] == [one["loss"] for one in whole]
    assert (tmp_path / "run" / f"model-{STEPS}").exists()


def test_steps_that_are_done_again_stand_once(ranks: Ranks, tmp_path: Path) -> None:
    folder, out = save("llama", tmp_path / "model").removeprefix("hf:"), tmp_path / "out"
    ranks.run(_on_ranks, folder, out, 3, "--checkpoint-every=2")
    shutil.rmtree(out / "checkpoints" / "step-00000003")  # as a kill after step 3 leaves it
    ranks.run(_on_ranks, folder, out, 4)
    assert [one["step"] for one in _records(out, "train")] == [1, 2, 3, 4]


def _refused(folder: str, out: Path, *more: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        _on_ranks(folder, out, 4, *more)
    return str(refusal.value)


def test_with_another_configuration_of_its_model_a_run_does_not_go_on(ranks: Ranks, tmp_path: Path) -> None:
    folder, out = save("llama", tmp_path / "model").removeprefix("hf:"), tmp_path / "out"
    ranks.run(_on_ranks, folder, out, 1)
    file = Path(folder) / "config.json"
    said = file.read_text()
    file.write_text(said.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.5'))
    assert file.read_text() != said
    for refusal in ranks.run(_refused, folder, out):
        assert refusal == f"{folder}/config.json: has changed since {out} began; put it back, or another OUT"
    file.write_text(said)
    assert len(ranks.run(_on_ranks, folder, out, 2)[0]) == 1


def test_a_model_by_its_name_has_its_own_tokenizer(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "hub" / "models--a--b" / "snapshots" / ("0" * 40)
    save("llama", snapshot, vocab_size=300)
    make_tokenizer(snapshot, PLAIN)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    pair = {"chosen": "What is it? It is a bird.", "rejected": "What is it? It is a b."}
    (tmp_path / "pairs.jsonl").write_text((json.dumps(pair) + "\n") * 4)
    wanted = pairs.load(str(tmp_path / "pairs.jsonl"), str(snapshot), 64, 300).about
    environment = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    command = [sys.executable, dpo.__file__, "a/b", "pairs.jsonl", "out"]  # new, since the hub's library reads HF_HOME
    done = subprocess.run(
        command, env=python_environment() | environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert f"pairs: {wanted}\n" in done.stdout, done.stderr
    assert dpo.parse([os.path.relpath(snapshot), "pairs.jsonl", "out"]).model == str(snapshot)
    assert dpo.parse(["a/b", "pairs.jsonl", "out"]).model == "a/b"
    at_home = [f"~/{snapshot.relative_to(tmp_path)}", "pairs.jsonl", "out-2"]
    assert f"pairs: {wanted}\n" in on_ranks_of_its_own(1, dpo.__file__, at_home, tmp_path, environment)[1]
    (snapshot / "tokenizer.json").rename(snapshot / "vocab.json")
    status, printed = on_ranks_of_its_own(1, dpo.__file__, at_home, tmp_path, environment)
    assert status == 2
    assert "its tokenizer is in " in printed


def test_without_its_adapters_a_run_does_not_go_on(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder, out = save("llama", tmp_path / "model").removeprefix("hf:"), tmp_path / "out"
    make_tokenizer(Path(folder), PLAIN)
    ranks.run(_on_ranks, folder, out, 1, "--lora=4")
    for said in ranks.run(_refused, folder, out):
        assert said == f"{out}: began with --lora 4, and not none; give that, or another OUT"
    for said in ranks.run(_refused, folder, out, "--lora=4", "--schedule=linear"):
        assert "began with --schedule cosine, and not linear" in said
    for said in ranks.run(_refused, folder, out, "--lora=4", "--lora-alpha=16"):
        assert "began with --lora-alpha 8.0, and not 16.0" in said


def _recomputed(folder: str, out: Path, *more: str) -> tuple[list[dict[str, float]], int]:
    """Figures of a run, and how often a block's forward ran."""
    from transformers.models.llama import modeling_llama

    with pytest.MonkeyPatch.context() as patch:
        counted = Mock(side_effect=modeling_llama.LlamaMLP.forward)
        patch.setattr(modeling_llama.LlamaMLP, "forward", lambda *inputs: counted(*inputs))
        return _on_ranks(folder, out, STEPS, *more), counted.call_count


def test_activations_are_computed_again_for_the_same_figures(ranks: Ranks, tmp_path: Path) -> None:
    """Of adapters, whose reference, in which nothing learns, is the same modules."""
    pytest.importorskip("peft")
    folder = save("llama", tmp_path / "model").removeprefix("hf:")
    kept = ranks.run(_recomputed, folder, tmp_path / "kept", "--lora=4")
    again = ranks.run(_recomputed, folder, tmp_path / "again", "--lora=4", "--activation-checkpointing")
    for (figures, calls), (theirs, fewer) in zip(again, kept, strict=True):
        assert figures == theirs
        assert calls > fewer


def test_adapters_have_the_scale_that_is_asked_for(ranks: Ranks, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder, out = save("llama", tmp_path / "model").removeprefix("hf:"), tmp_path / "out"
    ranks.run(_on_ranks, folder, out, 2, "--lora=4", "--lora-alpha=64")
    assert peft.PeftConfig.from_pretrained(out / "model-2").lora_alpha == 64
    with pytest.raises(ConfigError, match="there are no adapters without --lora"):
        dpo.parse([folder, "pairs", str(out), "--lora-alpha=64"])
    with pytest.raises(ConfigError, match="there is nothing to evaluate without --eval-pairs"):
        dpo.parse([folder, "pairs", str(out), "--eval-every=6"])


@pytest.mark.parametrize("more", [[], ["--lora=4"]], ids=["all weights", "adapters"])
def test_any_checkpoint_is_exported_as_a_runs(
    ranks: Ranks, tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    folder, out = save("llama", tmp_path / "model").removeprefix("hf:"), tmp_path / "out"
    ranks.run(_on_ranks, folder, out, 2, "--checkpoint-every=1", *more)
    assert checkpoint.main(["export", str(out), str(tmp_path / "newest"), "--format=hf"]) == 0
    earlier = out / "checkpoints" / "step-00000001"
    assert checkpoint.main(["export", str(earlier), str(tmp_path / "earlier"), "--format=hf"]) == 0
    if not more:
        theirs = plain(str(out / "model-2")).state_dict()
        assert same(plain(str(tmp_path / "newest")).state_dict(), theirs)
        assert not same(plain(str(tmp_path / "earlier")).state_dict(), theirs)
    said = capsys.readouterr()
    assert "can't be compared" not in said.out
    if more:
        file = out / "model" / "adapter_config.json"
        file.write_text(file.read_text().replace('"lora_alpha": 8', '"lora_alpha": 8000'))
        assert checkpoint.main(["export", str(out), str(tmp_path / "forged"), "--format=hf"]) == 2
        assert "alpha" in capsys.readouterr().err
    (out / "model" / "config.json").write_text("{}")
    assert checkpoint.main(["export", str(out), str(tmp_path / "again"), "--format=hf"]) == 2


def test_what_a_program_says(tmp_path: Path) -> None:
    folder, file = save("llama", tmp_path / "model", vocab_size=300).removeprefix("hf:"), tmp_path / "pairs.jsonl"
    make_tokenizer(Path(folder), PLAIN)
    rows = [{"prompt": f"q{n}", "chosen": "yes", "rejected": "no"} for n in range(6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + json.dumps({**rows[0], "rejected": "yes"}) + "\n")
    words, out = [folder, str(file)], tmp_path / "out"
    status, printed = on_ranks_of_its_own(2, dpo.__file__, [*words, str(out)], tmp_path, {})
    assert status == 2
    assert "of 7 pairs 1 with one answer as chosen and rejected (" in printed
    status, printed = on_ranks_of_its_own(2, dpo.__file__, [*words, str(out), "--track=wandbb"], tmp_path, {})
    assert (status, "--track wandbb: must be one of wandb, mlflow, tensorboard" in printed) == (2, True), printed
    held_out = tmp_path / "held-out.jsonl"  # with other names
    held_out.write_text("".join(json.dumps({"q": row["prompt"], "good": "yes", "bad": "no"}) + "\n" for row in rows))
    words += [
        str(out),
        "--bad-samples=drop",
        f"--eval-pairs={held_out}",
        "--chat-fields=;prompt=q,chosen=good,rejected=bad",
    ]
    for epochs, line in (("1", ""), ("2", f"resumed from {out}/checkpoints/step-00000002 at step 2, epoch 1")):
        status, printed = on_ranks_of_its_own(2, dpo.__file__, [*words, f"--epochs={epochs}"], tmp_path, {})
        assert status == 0, printed
        said = printed.splitlines()
        (about,) = (one for one in said if one.startswith("pairs: "))
        assert about.startswith("pairs: 6 of ")
        assert "6 through the chat template; left out by --bad-samples drop: 1 with one answer" in about
        (steps,) = (one for one in said if one.startswith("steps: "))
        assert "global batch 4 pairs; beta 0.1; AdamW, lr 1e-06, cosine after 3% of warm-up; gradients clipped" in steps
        assert sum(one.startswith("model: ") and "on 2 ranks" in one for one in said) == 1
        assert line in said or not line
        assert any(one.startswith("held out, after step ") for one in said)
        assert f"wrote {out}/model-{2 * int(epochs)}" in said
    status, printed = in_a_process(dpo.__file__, [*words, "--epochs=3"], tmp_path)  # without torchrun
    assert status == 0, printed
    assert " on 1 rank\n" in printed
    assert f"wrote {out}/model-6" in printed.splitlines()


def test_no_rank_is_left_without_a_pair(tmp_path: Path) -> None:
    status, printed = on_ranks_of_its_own(8, dpo.__file__, ["model", "pairs.jsonl", str(tmp_path)], tmp_path, {})
    assert status == 2
    assert "--global-batch-size 4: fewer pairs than the 8 ranks that share them; give 8 or more" in printed
