"""Ties, buffers, methods and copies of sharded models: docs/upstream.md, "Models"."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.harness import Ranks
from tests.upstream.common import TORCH, Tied, error_of, fully_shard, gone, still, uninitialized_is_nan

TOKENS = torch.tensor([1, 2, 2])


def _gradient_of_the_embedding(model: Tied) -> torch.Tensor:
    model(TOKENS).square().sum().backward()
    assert model.embed.weight.grad is not None
    return model.embed.weight.grad


def test_to_empty_makes_two_weights_of_a_tied_one() -> None:
    with torch.device("meta"):
        model = Tied()
    assert model.head.weight is model.embed.weight
    model.to_empty(device="cpu")
    still(model.head.weight is not model.embed.weight, "verl-project/verl#7834")
    # Both get the right values, as from a full state dict that has them twice. No error; the embedding learns from its
    # own place alone.
    right = Tied()
    model.load_state_dict(right.state_dict())
    assert not torch.equal(_gradient_of_the_embedding(model), _gradient_of_the_embedding(right))


def _tie_after_sharding() -> bool:
    with torch.device("meta"):
        model = Tied()
    fully_shard(model)
    model.to_empty(device="cpu")
    return model.head.weight is model.embed.weight


def test_what_fully_shard_has_tied_stays_so(ranks: Ranks) -> None:
    gone(ranks.run(_tie_after_sharding) != [True, True], "verl-project/verl#7834")


def _tied_in_two_groups() -> str:
    model = Tied()
    fully_shard(model.embed)
    fully_shard(model.head)
    fully_shard(model)
    return error_of(lambda: model(TOKENS))


@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11 trains such a model without a word")
def test_a_tied_weight_in_two_groups_is_an_error(ranks: Ranks) -> None:
    for message in ranks.run(_tied_in_two_groups):
        still("already managed by another FSDP group" in message, "NVIDIA/Megatron-LM#1447")


def _llama() -> Any:
    from transformers import LlamaConfig

    numbers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, **numbers)


def test_rotary_tables_are_garbage_after_to_empty() -> None:
    from transformers import LlamaForCausalLM

    right = LlamaForCausalLM(_llama())
    with torch.device("meta"):
        model = LlamaForCausalLM(_llama())
    with uninitialized_is_nan():
        model.to_empty(device="cpu")
    assert not any(model.load_state_dict(right.state_dict())), "strict, and no key is missing"
    still(bool(model.model.rotary_emb.inv_freq.isnan().all()), "pytorch/torchtitan#4783")


def _loaded(folder: str) -> int:
    """Bytes of the parameters that a rank, not the first of its node, has after from_pretrained."""
    from transformers import AutoModelForCausalLM

    # What `accelerate launch --use_fsdp --fsdp_cpu_ram_efficient_loading true` sets.
    names = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**names, "LOCAL_RANK": "1"}.items():
            patch.setenv(name, value)
        model = AutoModelForCausalLM.from_pretrained(folder)
    return sum(one.untyped_storage().nbytes() for one in model.parameters() if not one.is_meta)


def test_every_rank_has_the_whole_model_after_from_pretrained(ranks: Ranks, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(_llama())
    model.save_pretrained(tmp_path)
    (held,) = ranks.run(_loaded, str(tmp_path), ranks=1)
    still(held == sum(one.nbytes for one in model.parameters()), "huggingface/transformers#43749")


class _Scored(nn.Linear):
    def score(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


def _another_method() -> str:
    model = fully_shard(_Scored(4, 4))
    return error_of(lambda: model.score(torch.ones(1, 4)))


def test_a_method_that_is_not_forward_finds_shards(ranks: Ranks) -> None:
    for message in ranks.run(_another_method):
        still("mixed torch.Tensor and DTensor" in message, "huggingface/accelerate#3425")


def _copied() -> str:
    model = fully_shard(nn.Linear(4, 4))
    return error_of(lambda: copy.deepcopy(model))


def test_a_sharded_model_cannot_be_copied(ranks: Ranks) -> None:
    for message in ranks.run(_copied):
        still("does not support deepcopy" in message, "hao-ai-lab/FastVideo#915")


def _replicas() -> tuple[bool, bool]:
    """Whether two replicas have the same weights at the start, and after a step on the same data."""
    torch.manual_seed(dist.get_rank())
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def equal() -> bool:
        there = [torch.empty(4, 4) for _ in range(2)]
        dist.all_gather(there, model.weight.to_local().detach())
        return torch.equal(*there)

    before = equal()
    model(torch.ones(1, 4)).square().sum().backward()
    optimizer.step()
    return before, equal()


def test_replicas_that_begin_apart_stay_apart(ranks: Ranks) -> None:
    for before, after in ranks.run(_replicas):
        still(not before and not after, "pytorch/pytorch#140183")


class _Named(nn.ModuleDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self["layer"](x)


def _container() -> str:
    model = _Named({"layer": nn.Linear(4, 4)})
    return error_of(lambda: fully_shard(model)(torch.ones(1, 4)))


@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11 refuses it")
def test_a_container_with_a_forward_is_taken(ranks: Ranks) -> None:
    gone(any(ranks.run(_container)), "pytorch/pytorch#167856")


def _empty_shard() -> str:
    with torch.device("meta"):
        model = nn.Linear(4, 1)
    fully_shard(model)
    model.to_empty(device="cpu")
    return error_of(lambda: model(torch.ones(1, 4)).sum().backward())


def test_a_rank_without_a_row_is_filled(ranks: Ranks) -> None:
    gone(any(ranks.run(_empty_shard)), "pytorch/pytorch#164554")
