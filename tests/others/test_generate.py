"""A sharded model's other ways in: `generate`, which gives the tokens of one process, and methods of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.tensor import DTensor

from fsdp2 import train
from fsdp2.config import parse
from fsdp2.run.process import runtime
from tests.harness import Ranks, same
from tests.others.common import WORDS, flags, plain, save

PROMPTS = torch.tensor([[5, 9, 14], [20, 3, 7]])


def _generated(model: Any, prompts: torch.Tensor, **how: Any) -> list[list[int]]:
    model.eval()
    tokens: list[list[int]] = model.generate(prompts, do_sample=False, max_new_tokens=6, **how).tolist()
    return tokens


def _sharded(line: list[str], asked: list[tuple[list[torch.Tensor], dict[str, Any]]]) -> Any:
    """What a sharded model generates for each thing asked: a prompt for each rank, and how."""
    config = parse(line)
    engine = train.make_engine(config, runtime.world(), torch.device("cpu"), restoring=False)
    with engine.evaluating():
        return [_generated(engine.model, prompts[runtime.world().rank], **how) for prompts, how in asked]


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_generate_gives_the_tokens_of_one_process(ranks: Ranks, tmp_path: Path, name: str) -> None:
    model = save(name, tmp_path / "model")
    alone = plain(model)
    greedy = _generated(alone, PROMPTS)
    # With the second token of the first prompt as the end of text, the ranks have other lengths.
    end = {"eos_token_id": greedy[0][-5], "pad_token_id": 0}
    assert len({len(_generated(alone, prompt, **end)[0]) for prompt in PROMPTS.split(1)}) == 2
    asked: list[tuple[list[torch.Tensor], dict[str, Any]]] = [
        ([PROMPTS, PROMPTS], {}),
        ([PROMPTS, PROMPTS], {"num_beams": 2, "use_cache": True}),
        (list(PROMPTS.split(1)), end),
    ]
    expected = [[_generated(alone, prompts[rank], **how) for prompts, how in asked] for rank in (0, 1)]
    assert expected[0][0] == greedy
    for more in ("--seed=1", "--reshard-after-forward=true"):
        assert ranks.run(_sharded, [*flags(model, tmp_path / "run", *WORDS), more], asked) == expected


def _scored(strategy: str) -> tuple[list[float], list[torch.Tensor]]:
    """What a method of a model's own gives, and the gradients of it."""
    config = parse(["--model=tests.others.own:words", f"--strategy={strategy}", "--device=cpu"])
    engine = train.make_engine(config, runtime.world(), torch.device("cpu"), restoring=False)
    scores = cast(Any, engine.model).scores(PROMPTS)
    scores.sum().backward()
    gradients = [one.grad for one in engine.model.parameters() if one.grad is not None]
    return scores.tolist(), [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]


def test_a_method_that_a_spec_lists_finds_its_parameters(ranks: Ranks) -> None:
    (alone,) = ranks.run(_scored, "none", ranks=1)
    assert len(alone[1]) == 6  # all but the head's, which has no part in it
    for found in ranks.run(_scored, "fsdp2"):
        assert same(found, alone)
