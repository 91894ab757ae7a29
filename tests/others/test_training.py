"""Models of transformers, trained from a folder on two ranks, are what plain transformers trains in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Ranks, losses, main_in_ranks
from tests.others.common import MODELS, WORDS, flags, plain, plain_losses, save


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
    rest, *_ = ranks.run(main_in_ranks, flags(model, tmp_path / "cut", "--max-steps=5", *more))
    assert losses(rest) == losses(whole)[3:]
