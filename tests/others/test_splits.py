"""`--tp` for models of transformers, by their own plans: a few rows of the table, and runs against one process."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2_tools.checkpoint.__main__ import main as checkpoint_command
from tests.harness import Ranks, forget_models, full_files, losses, main_in_ranks, of_kind, relative, same
from tests.others.common import WORDS, flags, plain, save
from tests.others.sections import PAGE
from tests.others.splits import EQUAL, MESHES, outcome, passed
from tests.test_dimensions import apart, trained


@pytest.fixture(autouse=True)
def _new_processes(ranks: Ranks) -> Iterator[None]:
    """torch keeps what it has made of a mesh for the life of a process, and an equal mesh of other groups finds it."""
    pytest.importorskip("transformers")
    yield
    ranks.close()


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",  # norms of heads
        "gemma",  # its embedding is its head, and has a token that isn't trained
        "gpt_neox",  # queries, keys and values of a head in a row; biases
        "phi3",  # queries, keys and values in one weight, and gate and up: computed in parts, joined for attention
        "mixtral",  # experts, whose gate and up are one weight
        "apertus",  # an activation with numbers to learn, of which the plan says nothing
        "minicpm3",  # latent attention
        "granite_swa",  # a number for each head, of the attention itself
    ],
)
def test_each_gradient_is_that_of_plain_transformers(ranks: Ranks, tmp_path: Path, name: str) -> None:
    found = outcome(name, ranks, tmp_path)
    assert passed(found), found
    assert found.keys() == MESHES.keys()
    assert re.search(rf"^\| {name} \| [\de-]+ \| [\de-]+ \|", PAGE.read_text(), re.MULTILINE)


RUNS: dict[str, dict[str, Any]] = {"llama": {"tie_word_embeddings": True}, "mixtral": {}}
LINE = ["--optimizer=sgd", "--lr=0.5", "--clip-grad-norm=0.1", "--max-steps=4"]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(
    ("more", "count"),
    [
        ("--grad-accumulation=2 --activation-checkpointing=block --freeze=*layernorm.weight", 2),
        ("--shard-granularity=layer --cpu-offload --ema=0.9 --inspect", 4),
        ("--replicas=2 --activation-checkpointing=op --explicit-prefetching", 4),
    ],
)
def test_a_run_is_that_of_one_process(ranks: Ranks, tmp_path: Path, name: str, more: str, count: int) -> None:
    model = save(name, tmp_path / "model", **RUNS[name])
    both = [*WORDS, *LINE, "--global-batch-size=8", "--save-model", "--checkpoint-every=never"]
    same_numbers = ("--replicas", "--cpu", "--shard", "--inspect", "--explicit")
    alone = [word for word in more.split() if not word.startswith(same_numbers)]
    theirs, *_ = ranks.run(main_in_ranks, flags(model, tmp_path / "one", *both, *alone), ranks=1)
    ranks.close()
    ours, *_ = ranks.run(main_in_ranks, flags(model, tmp_path / "run", *both, *more.split(), "--tp=2"), ranks=count)
    assert losses(ours)[-1] != losses(ours)[0]
    assert relative(losses(ours), losses(theirs)) < EQUAL
    norms, wanted = ([event["grad_norm"] for event in of_kind(events, "train")] for events in (ours, theirs))
    assert relative(norms, wanted) < EQUAL
    assert apart(trained(tmp_path / "run"), trained(tmp_path / "one")) < EQUAL


@pytest.mark.parametrize("name", RUNS)
def test_the_first_step_in_bf16_is_that_of_one_process(ranks: Ranks, tmp_path: Path, name: str) -> None:
    model = save(name, tmp_path / "model", **RUNS[name])
    line = [*WORDS, "--global-batch-size=8", "--mixed-precision=bf16", "--max-steps=1", "--checkpoint-every=never"]
    theirs, *_ = ranks.run(main_in_ranks, flags(model, tmp_path / "one", *line), ranks=1)
    ranks.close()
    ours, *_ = ranks.run(main_in_ranks, flags(model, tmp_path / "run", *line, "--tp=2", "--inspect"), ranks=4)
    (one,), (split,) = (of_kind(events, "train") for events in (theirs, ours))
    # Numbers are rounded to 8 bits, in other sums.
    assert abs(split["loss"] / one["loss"] - 1) < 1e-3
    assert abs(split["grad_norm"] / one["grad_norm"] - 1) < 1e-2
    assert split["loss"] != one["loss"], "nothing was rounded"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_bit_for_bit_and_is_exported_in_the_published_order(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    model = save(name, tmp_path / "model", **RUNS[name])
    line = [*WORDS, "--tp=2", "--checkpoint-every=2", "--save-model"]
    whole, *_ = ranks.run(main_in_ranks, flags(model, tmp_path / "whole", *line, "--max-steps=4"), ranks=4)
    ranks.run(main_in_ranks, flags(model, tmp_path / "run", *line, "--max-steps=2"), ranks=4)
    rest, *_ = ranks.run(main_in_ranks, flags(model, tmp_path / "run", *line, "--max-steps=4"), ranks=4)
    assert losses(rest) == losses(whole)[2:]
    before = full_files(tmp_path / "run")
    assert same(before, full_files(tmp_path / "whole"))
    assert checkpoint_command(["export", str(tmp_path / "run"), str(tmp_path / "exported"), "--format", "hf"]) == 0
    exported, state = plain(f"hf:{tmp_path / 'exported'}").state_dict(), trained(tmp_path / "run")
    assert same(dict(exported), state)
    ranks.close()
    (tmp_path / "run" / "full_model" / "full-model.pt").unlink()
    ranks.run(main_in_ranks, flags(model, tmp_path / "run", *WORDS, "--save-model", "--max-steps=4"), ranks=1)
    assert same(full_files(tmp_path / "run"), before)


def test_a_plan_that_the_folder_brings_does_not_count(ranks: Ranks, tmp_path: Path) -> None:
    """transformers takes it in the place of its class's: a layer whose sum is taken twice trains, and is wrong."""
    model, found = save("llama", tmp_path / "model"), []
    file = tmp_path / "model" / "config.json"
    for name, plan in (("theirs", {}), ("own", {"base_model_tp_plan": {"layers.*.mlp": "all_reduce"}})):
        file.write_text(json.dumps({**json.loads(file.read_text()), **plan}))
        line = [*WORDS, "--tp=2", "--max-steps=2", "--checkpoint-every=never"]
        found.append(ranks.run(main_in_ranks, flags(model, tmp_path / name, *line), ranks=2)[0])
        ranks.close()
    theirs, own = ([(one["loss"], one["grad_norm"]) for one in of_kind(events, "train")] for events in found)
    assert own == theirs


def test_a_gathered_head_is_no_warning(ranks: Ranks, tmp_path: Path) -> None:
    line = [*WORDS, "--tp=2", "--max-steps=1", "--checkpoint-every=never"]
    for found in ranks.run(_warned, flags(save("llama", tmp_path / "model"), tmp_path / "run", *line), ranks=2):
        assert not [one for one in found if "view tensor" in one]


def _warned(line: list[str]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        main_in_ranks(line)
    return [str(one.message) for one in found]


def test_weights_of_a_folder_arrive_as_they_are(ranks: Ranks, tmp_path: Path) -> None:
    model = save("mixtral", tmp_path / "model")
    line = [*WORDS, "--tp=2", "--lr=1e-30", "--max-steps=1", "--save-model"]
    ranks.run(main_in_ranks, flags(model, tmp_path / "run", *line), ranks=2)
    state = plain(model).state_dict()
    assert all(torch.equal(one, state[name]) for name, one in trained(tmp_path / "run").items())


@pytest.mark.parametrize(
    ("name", "numbers", "tp", "says"),
    [
        ("gpt2", {}, 2, "transformers has no plan for splitting the layers of GPT2LMHeadModel"),
        ("llama", {"num_key_value_heads": 1}, 2, "doesn't divide num_key_value_heads 1; drop --tp"),
        ("llama", {}, 4, "doesn't divide num_key_value_heads 2; use --tp 2"),
        ("llama", {"vocab_size": 257}, 2, "doesn't divide model.embed_tokens.weight 257, lm_head 257"),
        ("mixtral", {"intermediate_size": 40}, 16, "mlp.experts.gate_up_proj 40, .*; use --tp 2"),
        ("llama", {"attention_dropout": 0.1}, 2, "attention_dropout is above 0, and ranks would drop the same"),
        ("llama", {"clip_qkv": 8.0}, 2, "clip_qkv has it change in place what another layer gives"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, name: str, numbers: dict[str, Any], tp: int, says: str) -> None:
    model = save(name, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **numbers}))
    forget_models()
    with pytest.raises(ConfigError, match=f"--tp {tp} with --model.*{says}"):
        parse(flags(model, tmp_path / "run", *WORDS, f"--tp={tp}"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("doge", "a rank can't compute with its part of each layer"),
        ("gemma3n_text", "transformers' plan doesn't fit it"),
    ],
)
def test_a_plan_that_its_model_does_not_follow_is_refused(ranks: Ranks, tmp_path: Path, name: str, says: str) -> None:
    assert says in outcome(name, ranks, tmp_path)["refused"]
