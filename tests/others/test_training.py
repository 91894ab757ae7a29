"""Models of transformers, trained from a folder on two ranks, are what plain transformers trains in one process."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from fsdp2 import infer, models
from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.train import main
from tests.harness import Ranks, losses, main_in_ranks, of_kind
from tests.others import own
from tests.others.common import MODELS, SEED, WORDS, flags, plain, plain_losses, save


def _accuracy(run: str, *, sharded: bool) -> float:
    return float(infer.main(run, sharded=sharded)["accuracy"])


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_a_plain_loop_and_of_a_resumed_run(ranks: Ranks, tmp_path: Path, name: str) -> None:
    model = save(name, tmp_path / "model")
    expected = plain_losses(plain(model), 5)
    more = ("--no-save-model", *(() if name == "vit" else WORDS))
    whole, *_ = ranks.run(main_in_ranks, flags(model, tmp_path / "whole", "--max-steps=5", *more))
    if name == "t5":
        # Both decoder blocks use what the encoder gives. A plain backward adds up their gradients one by one, and with
        # FSDP2 each block's are added up first: its hooks stand at the inputs of the block.
        assert losses(whole) == pytest.approx(expected, rel=1e-6, abs=0)
    else:
        assert losses(whole) == expected
    ranks.run(main_in_ranks, flags(model, tmp_path / "cut", "--max-steps=3", *more))
    rest, *_ = ranks.run(main_in_ranks, flags(model, tmp_path / "cut", "--max-steps=5", *more, "--save-model"))
    assert losses(rest) == losses(whole)[3:]
    accuracy = of_kind(rest, "eval")[-1]["accuracy"]
    assert [accuracy] == ranks.run(partial(_accuracy, str(tmp_path / "cut"), sharded=False), ranks=1)
    assert [accuracy] * 2 == ranks.run(partial(_accuracy, str(tmp_path / "cut"), sharded=True))


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_a_layer_that_returns_its_own_weight(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    """It is a group of its own, whose memory is freed after its forward: before what it returned is used."""
    name = "tests.others.own:positions"
    torch.manual_seed(SEED)
    expected = plain_losses(own.positions(), 3, models.get(name))
    line = flags(name, tmp_path / "run", f"--strategy={strategy}", "--max-steps=3", "--no-save-model")
    assert losses(ranks.run(main_in_ranks, line)[0]) == expected


def test_a_run_goes_on_without_the_folder_that_its_model_came_from(ranks: Ranks, tmp_path: Path) -> None:
    model, run = save("llama", tmp_path / "model"), tmp_path / "run"
    line = flags(model, run, *WORDS, "--no-save-model")
    whole, *_ = ranks.run(main_in_ranks, [*flags(model, tmp_path / "whole", *WORDS), "--max-steps=4"])
    ranks.run(main_in_ranks, [*line, "--max-steps=2"])
    shutil.rmtree(tmp_path / "model")
    moved = run.rename(tmp_path / "moved")
    again = [f"--config={moved}/config.json", f"--run-dir={moved}", "--max-steps=4"]
    rest, *_ = ranks.run(main_in_ranks, [*again, "--save-model"])
    assert losses(rest) == losses(whole)[2:]
    assert json.loads((moved / "model" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    # Its copy has no weights to start another run from.
    with pytest.raises(ConfigError, match="--init-from scratch"):
        main(parse([f"--config={moved}/config.json", f"--run-dir={tmp_path}/other", "--strategy=none"]))
