"""What `tests/docs/recipes.py` plans for `examples/dpo.py` is what its two models take on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples import dpo
from fsdp2.config import parse
from fsdp2_extra.allocations.ledger import Ledger
from tests.docs.recipes import with_reference
from tests.harness import Ranks

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

PAIRS, LENGTH = 1, 32  # of each rank


def _taken(folder: str, *, steps: int = 2) -> int:
    """The most bytes of tensors at a time, loading included. In `Ranks`."""
    cpu = torch.device("cpu")
    with Ledger() as ledger:
        flags = dpo.parse([folder, "none", "none"])
        policy, reference = (dpo.sharded(flags, cpu, trained=trained) for trained in (True, False))
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
        rows = [torch.ones(PAIRS, 2, LENGTH, dtype=torch.long) for _ in range(2)]  # tokens and targets
        for _ in range(steps):
            dpo.figures_of(policy, reference, flags.beta, *rows)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
    return ledger.peak_bytes


def test_the_sum_of_a_plan_and_the_references_shards(ranks: Ranks, tmp_path: Path) -> None:
    shape = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**shape, num_hidden_layers=6, vocab_size=512)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    taken = max(ranks.run(_taken, str(tmp_path / "model")))
    flags = f"--model hf:{tmp_path}/model --init-from scratch --optimizer adamw --dataset random-tokens"
    flags += f" --seq-len {LENGTH} --batch-size {2 * PAIRS}"
    expected = with_reference(parse(flags.split()), 2, None)
    shards = sum(p.numel() for p in transformers.LlamaForCausalLM(config).parameters()) * 4 / 2
    assert 0.92 < taken / expected < 1.03
    assert taken > 1.06 * (expected - shards), "so small a copy could be left out of the sum"
