"""What `tests/docs/recipes.py` plans for `examples/dpo.py` is what its two models take on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples import dpo
from fsdp2.config import parse
from fsdp2_extra.allocations.ledger import Ledger
from fsdp2_tools.plan.plans import plan
from tests.docs.recipes import with_reference
from tests.harness import Ranks

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

PAIRS, LENGTH = 1, 32  # of each rank


def _taken(folder: str, *more: str, steps: int = 2) -> int:
    """The most bytes of tensors at a time, loading included. In `Ranks`."""
    cpu = torch.device("cpu")
    with Ledger() as ledger:
        flags = dpo.parse([folder, "none", "none", *more])
        policy = dpo.sharded(flags, cpu, trained=True)
        reference = None if flags.lora else dpo.sharded(flags, cpu, trained=False)
        optimizer = torch.optim.AdamW([one for one in policy.parameters() if one.requires_grad], lr=1e-3)
        rows = [torch.ones(PAIRS, 2, LENGTH, dtype=torch.long) for _ in range(2)]  # tokens and targets
        for _ in range(steps):
            dpo.figures_of(policy, reference, flags.beta, *rows)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
    return ledger.peak_bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**shape, num_hidden_layers=6, vocab_size=512)
    folder = tmp_path_factory.mktemp("dpo-memory")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _flags(model: Path) -> list[str]:
    flags = f"--model=hf:{model} --optimizer=adamw --dataset=random-tokens --seq-len={LENGTH} --batch-size={2 * PAIRS}"
    return flags.split()


def test_the_sum_of_a_plan_and_the_references_shards(ranks: Ranks, model: Path) -> None:
    taken = max(ranks.run(_taken, str(model)))
    expected = with_reference(parse([*_flags(model), "--init-from=scratch", "--clip-grad-norm=off"]), 2, None)
    shards = sum(p.numel() for p in transformers.LlamaForCausalLM.from_pretrained(model).parameters()) * 4 / 2
    assert 0.92 < taken / expected < 1.03
    assert taken > 1.06 * (expected - shards), "so small a copy could be left out of the sum"


@pytest.mark.parametrize("again", [[], ["--activation-checkpointing"]], ids=["kept", "computed again"])
def test_with_adapters_a_plan_of_the_training(ranks: Ranks, model: Path, again: list[str]) -> None:
    pytest.importorskip("peft")
    more = ["--lora=16", "--mixed-precision", *again]
    taken = max(ranks.run(_taken, str(model), *more))
    found = plan(parse([*_flags(model), *more, "--clip-grad-norm=off"]), 2, None, None)
    assert 0.95 < taken / found.tensors < 1.05  # what a ledger sees; the losses differ
