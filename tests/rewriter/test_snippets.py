"""The functions that a rewritten program may get: each does what FSDP1 did, and stands in a program as it is tested."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from migration.rewriter import snippets
from migration.rewriter.helpers import HELPERS
from tests.harness import Ranks


def tree() -> nn.Sequential:
    """Lists, an attention, and modules with parameters of their own and without."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    blocks = nn.ModuleList([inner, nn.MultiheadAttention(4, 2), nn.Linear(4, 4)])
    return nn.Sequential(nn.Embedding(8, 4), nn.ModuleDict({"blocks": blocks}), nn.Linear(4, 2))


def chosen_units() -> None:
    for least in (1, 20, 60, 100, 200, 10000):
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=least)
        whole = FullyShardedDataParallel(tree(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
        names = [name for name, module in whole.named_modules() if isinstance(module, FullyShardedDataParallel)]
        wanted = [name.replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", "") for name in names][1:]
        model = tree()
        snippets.shard_by_size(model, least)
        assert [name for name, module in model.named_modules() if isinstance(module, FSDPModule)] == wanted


def test_groups_by_size_are_those_of_fsdp1(ranks: Ranks) -> None:
    ranks.run(chosen_units)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 2))


def in_use() -> None:
    whole, model = small(), small()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    batches = [torch.randn(3, 4) for _ in range(2)]
    with snippets.no_sync(model):
        model(batches[0]).sum().backward()
    assert all(p.grad is None for p in model.parameters()), "whole gradients aren't in .grad yet"
    model(batches[1]).sum().backward()
    torch.stack([whole(batch).sum() for batch in batches]).sum().backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        full = ours.grad.full_tensor()  # type: ignore[union-attr]
        assert torch.allclose(full, mean_over_ranks(theirs.grad))
        assert torch.equal(snippets.local_shard(ours.grad), ours.grad.to_local())  # type: ignore[union-attr]
        assert snippets.local_shard(theirs.grad) is theirs.grad
    with pytest.raises(KeyError), snippets.no_sync(model):
        raise KeyError
    model.zero_grad()
    model(batches[0]).sum().backward()
    assert all(p.grad is not None for p in model.parameters()), "it reduces again after an error"


def mean_over_ranks(gradient: Any) -> torch.Tensor:
    mean = gradient.clone()
    torch.distributed.all_reduce(mean)
    return mean / torch.distributed.get_world_size()


def test_in_training(ranks: Ranks) -> None:
    ranks.run(in_use)


def gathered() -> None:
    whole, plain = small(), small()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(plain[2], mesh=mesh)
    fully_shard(plain, mesh=mesh)
    with snippets.full_params(plain):
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name
    assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in plain.parameters())


def test_whole_parameters(ranks: Ranks) -> None:
    ranks.run(gathered)


@pytest.mark.parametrize("name", HELPERS)
def test_text_is_the_function_without_annotations(name: str) -> None:
    (function,) = ast.parse(HELPERS[name]).body
    assert isinstance(function, ast.FunctionDef)
    assert function.name == name.partition(" ")[0].partition(",")[0]
    arguments = (*function.args.args, function.args.vararg, function.args.kwarg)
    assert [one.annotation for one in arguments if one is not None] == [None] * sum(map(bool, arguments))
    assert function.returns is None
    assert "__" not in HELPERS[name]
    assert max(map(len, HELPERS[name].splitlines())) <= 120


def test_each_function_is_in_a_pair() -> None:
    """So that each is also seen at work in a program."""
    folder = Path(__file__).parent
    written = "".join(path.read_text() for path in sorted(folder.glob("*/*/out.py")))
    assert [name for name, text in HELPERS.items() if text not in written] == []


def test_moments_of_one_memory_are_refused() -> None:
    """As FSDP1 saves them on a CPU."""
    step, moment = torch.tensor(3.0), torch.ones(2)
    apart = {"state": {n: {"step": step, "exp_avg": moment, "exp_avg_sq": moment.clone()} for n in "ab"}}
    steps = [values["step"] for values in snippets.own_steps(apart)["state"].values()]
    assert steps[0].data_ptr() != steps[1].data_ptr()
    with pytest.raises(ValueError, match="a: one of its moments lies over another"):
        snippets.own_steps({"state": {"a": {"step": step, "exp_avg": moment, "exp_avg_sq": moment}}})
