"""Defaults of a run that begins with trained weights: the field's; and those of one from nothing are as they were."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp2.config import Config, parse
from fsdp2.options.errors import ConfigError
from fsdp2.options.own_model import FROM_NOTHING, FROM_WEIGHTS, WITH_ADAPTERS
from fsdp2.options.parser import to_flags
from fsdp2.report.console import Console
from fsdp2.run.preflight import preflight
from fsdp2.run.process.runtime import World
from fsdp2_extra.models import from_weights
from tests.harness import Ranks, main_in_ranks, of_kind, small

Train = Callable[..., list[tuple[str, dict[str, Any]]]]

LLAMA = ("--model=llama", "--model-size=debug", "--dataset=random-tokens", "--seq-len=16")


def _set(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in FROM_NOTHING}


def test_defaults_follow_from_where_a_run_begins() -> None:
    assert _set(parse([])) == FROM_NOTHING
    assert (parse([]).epochs, parse([]).lr, parse([]).schedule) == (12, 1e-3, "step")
    assert _set(parse([*LLAMA, "--init-from=a"])) == {**FROM_WEIGHTS, "seq_len": 16}
    assert _set(parse([*LLAMA, "--init-from=a", "--lora=4"])) == {**WITH_ADAPTERS, "seq_len": 16}
    assert _set(parse([*LLAMA, "--init-from=scratch"])) == {**FROM_NOTHING, "seq_len": 16}
    of_images = {name: FROM_NOTHING[name] for name in ("seq_len", "batch_size")}
    assert _set(parse(["--init-from=a"])) == {**FROM_WEIGHTS, **of_images}
    # A test batch of language is as large as one of training.
    assert (parse([*LLAMA, "--init-from=a"]).test_batch_size, parse(LLAMA).test_batch_size) == (8, 64)


def test_what_is_said_counts_also_where_it_is_the_other_default() -> None:
    said = {**FROM_NOTHING, "clip_grad_norm": "off"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in said.items()]
    assert _set(parse([*LLAMA, "--init-from=a", *words])) == FROM_NOTHING
    given: dict[str, Any] = dict(FROM_WEIGHTS)
    assert _set(Config(**given)) == FROM_WEIGHTS


@pytest.mark.parametrize(("positions", "expected"), [(514, 512), (2050, 1024), (64, 64), (131072, 1024), (0, 1024)])
def test_sequences_are_no_longer_than_a_model_has_positions_for(tmp_path: Path, positions: int, expected: int) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    folder = tmp_path / "model"
    transformers.LlamaConfig(vocab_size=300, max_position_embeddings=positions, **sizes).save_pretrained(folder)
    flags = [f"--model=hf:{folder}", "--dataset=source-text"]
    assert parse([*flags, "--init-from=a"]).seq_len == expected
    assert parse([*flags, "--init-from=a", "--seq-len=33"]).seq_len == 33
    assert parse([*flags, "--init-from=scratch"]).seq_len == 128


def test_no_clipping_is_kept_by_the_file_of_a_run(tmp_path: Path) -> None:
    for given in ("off", "auto", "0.5"):
        config = parse([*LLAMA, "--init-from=a", f"--clip-grad-norm={given}"])
        assert config.clip_grad_norm == {"off": None, "auto": 1.0, "0.5": 0.5}[given]
        file = tmp_path / "flags.json"
        file.write_text(json.dumps(to_flags(config)))
        assert parse([f"--config={file}"]) == config


@pytest.mark.parametrize("value", ["1.5", "-1", "x", "1.0e9999"])
def test_a_warm_up_is_steps_or_a_share(value: str) -> None:
    assert parse(["--warmup-steps=3"]).warmup_steps == 3
    assert parse(["--warmup-steps=0.25"]).warmup_steps == 0.25
    with pytest.raises(ConfigError, match=r"--warmup-steps .*: must be a number of steps, or a share of them below 1"):
        parse([f"--warmup-steps={value}"])


def test_a_run_from_weights_says_its_defaults_and_a_resume_keeps_them(
    train: Train, ranks: Ranks, tmp_path: Path
) -> None:
    train(*LLAMA, run="first", steps=1)
    weights = f"--init-from={tmp_path / 'first' / 'full_model' / 'full-model.pt'}"
    events = train(*LLAMA, weights, "--no-save-model", run="second", steps=40)
    (start,) = of_kind(events, "start")
    (line,) = (line for line in start["header"] if line.startswith("from weights: "))
    assert "adamw, lr 2e-05, cosine, warm-up of 3% of the steps, weight decay 0.01, gradients clipped to" in line
    assert "norm 1, 16 sequences of 16 tokens a rank and microbatch; --epochs" in line
    rates = [record["lr"] for record in of_kind(events, "train")]
    assert rates[:3] == pytest.approx([2e-5 / 3, 4e-5 / 3, 2e-5])  # 3 % of 40 are 2 steps
    assert rates[-1] < 1e-7
    # The same folder without the weights' flag would have the other defaults.
    with pytest.raises(ConfigError, match="the checkpoint to resume from was made with") as refused:
        preflight(parse(small(tmp_path / "second", *LLAMA, "--max-steps=41")), World(0, 1, 0, 1))
    assert f"--config {tmp_path / 'second' / 'config.json'} has all that the run had" in str(refused.value)
    line_of_run = [f"--config={tmp_path / 'second' / 'config.json'}", f"--run-dir={tmp_path / 'second'}"]
    more = of_kind(ranks.run(main_in_ranks, [*line_of_run, "--max-steps=41"])[0], "train")
    assert [record["step"] for record in more] == [41]


def test_a_header_says_where_steps_end_before_the_epochs() -> None:
    line = from_weights.line(parse([*LLAMA, "--init-from=a", "--max-steps=60"]))
    assert line.startswith("from weights: 3 epochs (60 steps at most), adamw, ")


@pytest.mark.parametrize("seq_len", [256, 257])
def test_a_header_warns_of_sequences_beyond_the_weights_positions(seq_len: int) -> None:
    config = parse([*LLAMA, "--init-from=a", f"--seq-len={seq_len}"])
    known = SimpleNamespace(**vars(config), spec=dataclasses.replace(config.spec, positions=256))
    said = "microbatch (warning: its weights were trained for 256 positions)" in from_weights.line(known)
    assert said == (seq_len > 256)


def test_a_header_says_what_a_step_is_and_that_steps_are_few(train: Train) -> None:
    def found(kind: str, *flags: str, run: str, steps: int | None) -> list[str]:
        header = of_kind(train(*flags, "--no-save-model", run=run, steps=steps), kind)[0]["header"]
        return [line for line in header if line.startswith(("steps: ", "warning: "))]

    parts = (*LLAMA, "--grad-accumulation=3", "--batch-size=4", "--clip-grad-norm=0.5")
    of_all = "global batch 24 = 4 a microbatch x 3 accumulated x 2 data-parallel ranks, 384 tokens (sequences of 16)"
    for kind, steps in (("start", 2), ("resume", 4)):
        line = f"steps: {steps} in all, 43 an epoch; {of_all}; gradients clipped to norm 0.5"
        warned = f"warning: the whole run is {steps} optimizer steps; raise --max-steps"
        assert found(kind, *parts, run="language", steps=steps) == [line, warned]
    few = ("--epochs=1", "--checkpoint-every=never", "--grad-accumulation=2")
    assert found("start", *few, "--global-batch-size=719", run="vit", steps=None) == [
        "steps: 2 in all, 2 an epoch; global batch 719 = up to 16 a microbatch x 23 accumulated x 2 data-parallel "
        "ranks; gradients not clipped",
        "warning: the whole run is 2 optimizer steps; lower --global-batch-size, raise --epochs or give more data",
    ]
    assert found("start", *few, "--batch-size=1000", run="one", steps=5)[1:] == [
        "warning: the whole run is 1 optimizer step, an epoch is one of them; lower --grad-accumulation, raise "
        "--epochs or give more data"
    ]


def test_the_console_of_a_language_model_counts_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(0, 2, 1)
    step = {"epoch": 0, "step_in_epoch": 1, "loss": 1.0, "grad_norm": 1.0, "samples": 4}
    for number in (1, 2):
        console("train", {**step, "step": number, "samples_per_second": 2.0, "tokens_per_second": 256.0})
    console("eval", {"epoch": 0, "step": 2, "loss": 1.0, "accuracy": 0.25, "count": 99, "perplexity": 2.718})
    end = {"reason": "finished", "step": 2, "steps": 2, "seconds": 1.0, "left": "checkpoint", "accuracy": 0.25}
    console("end", {**end, "run_dir": "runs/a", "nonfinite_steps": 0})
    said = capsys.readouterr().out
    assert "epoch 1/1  step 2  test loss 1.0000  perplexity 2.72  tokens right 25.00%\n" in said
    assert "trained 2 steps in 1.0 s, on 1,024 tokens\n" in said
    assert "\nperplexity: 2.72, tokens right: 25.00%\n" in said
    assert "test accuracy" not in said


def test_a_header_says_which_positions_bound_the_length() -> None:
    config = parse([*LLAMA, "--init-from=a", "--seq-len=512"])
    known = SimpleNamespace(**vars(config), spec=dataclasses.replace(config.spec, positions=514))
    assert "sequences of 512 tokens a rank and microbatch (it has 514 positions); --epochs" in from_weights.line(known)
    known.spec = dataclasses.replace(config.spec, positions=4096)
    assert "positions" not in from_weights.line(known)
