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
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import (
    _or_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from rewriter import snippets
from rewriter.check import load
from rewriter.helpers import HELPERS, SOURCES
from rewriter.rewrite import rewrite
from tests.harness import Ranks


def tree() -> nn.Sequential:
    """Lists, an attention, and modules with parameters of their own and without."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    blocks = nn.ModuleList([inner, nn.MultiheadAttention(4, 2), nn.Linear(4, 4)])
    return nn.Sequential(nn.Embedding(8, 4), nn.ModuleDict({"blocks": blocks}), nn.Linear(4, 2))


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 2))


@pytest.mark.parametrize("recurse", [True, False])
def test_policies_answer_as_those_of_fsdp1(recurse: bool) -> None:
    wide = functools.partial(size_based_auto_wrap_policy, min_num_params=20)
    ours_wide = functools.partial(snippets.wrap_by_size, min_num_params=20)
    classes = {nn.Linear, nn.Embedding}
    pairs: list[tuple[Any, Any]] = [
        (snippets.wrap_by_size, size_based_auto_wrap_policy),
        (ours_wide, wide),
        (
            functools.partial(snippets.wrap_by_class, transformer_layer_cls=classes),
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes),
        ),
        (
            functools.partial(snippets.wrap_by_function, lambda_fn=lambda m: hasattr(m, "in_features")),
            functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: hasattr(m, "in_features")),
        ),
        (
            functools.partial(snippets.wrap_by_any, policies=[ours_wide, snippets.wrap_by_size]),
            functools.partial(_or_policy, policies=[wide, size_based_auto_wrap_policy]),
        ),
    ]
    for ours, theirs in pairs:
        for module in tree().modules():
            for numel in (0, 19, 20, int(1e8)):
                given = {"module": module, "recurse": recurse, "nonwrapped_numel": numel}
                assert ours(**given) == theirs(**given), (theirs, module, numel)
    for module in tree().modules():  # FSDP1 wrapped modules without parameters too, of which fully_shard makes no group
        own = any(True for _ in module.parameters(recurse=False))
        assert snippets.wrap_always(module, recurse, 0) == (recurse or own)


def units_of_fsdp1(policy: Any) -> list[str]:
    model = FullyShardedDataParallel(tree(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    names = [name for name, module in model.named_modules() if isinstance(module, FullyShardedDataParallel)]
    return sorted(name.replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", "") for name in names)[1:]


def units(model: nn.Module) -> list[str]:
    return sorted(name for name, module in model.named_modules() if isinstance(module, FSDPModule))


def chosen_units() -> None:
    for least in (1, 20, 60, 100, 200, 10000):
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=least)
        by_size, by_policy = tree(), tree()
        seen: list[nn.Module] = []
        total = snippets.shard_by_size(by_size, least, seen.append)
        assert total == snippets.shard_by_policy(by_policy, policy)
        assert units(by_size) == units(by_policy) == units_of_fsdp1(policy)
        assert sorted(name for name, module in by_size.named_modules() if module in seen) == units(by_size)
    firsts: list[Any] = []
    model = small()
    snippets.shard_by_policy(model, snippets.wrap_always, firsts.append)
    assert firsts == [module for module in snippets.inner_first(model) if isinstance(module, FSDPModule)]


def test_groups_are_those_of_fsdp1(ranks: Ranks) -> None:
    ranks.run(chosen_units)


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


def without_reduction() -> None:
    batch = torch.full((3, 4), float(torch.distributed.get_rank()))
    ddp = nn.parallel.DistributedDataParallel(small())
    with snippets.no_sync__or_ddp(ddp):
        ddp(batch).sum().backward()
    gradient = next(ddp.parameters()).grad
    assert gradient is not None
    assert not torch.equal(gradient, mean_over_ranks(gradient))
    sharded = small()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    with snippets.no_sync__or_ddp(sharded):
        sharded(batch).sum().backward()
    assert all(p.grad is None for p in sharded.parameters())
    sharded(batch).sum().backward()
    assert all(p.grad is not None for p in sharded.parameters())


def test_a_model_that_may_be_ddps(ranks: Ranks) -> None:
    ranks.run(without_reduction)


def gathered() -> None:
    whole, model = small(), small()
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (2,))
    for module in (model[2], model):
        fully_shard(module, mesh=mesh, mp_policy=low)
    with torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.bfloat16))  # leaves the root gathered
    before = dict(model.named_parameters())
    with snippets.full_params__own_dtype(model):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name
    model.reshard()  # type: ignore[operator]
    assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters())
    assert [*before] == [name for name, _ in model.named_parameters()]
    plain = small()
    fully_shard(plain[2], mesh=mesh)
    fully_shard(plain, mesh=mesh)
    with snippets.full_params(plain):
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name
    assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in plain.parameters())


def test_whole_parameters(ranks: Ranks) -> None:
    ranks.run(gathered)


def initial_values() -> None:
    rank = torch.distributed.get_rank()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    torch.manual_seed(rank)
    snippets.initialise(model, torch.device("cpu"), sync=True)
    torch.manual_seed(0)
    wanted = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), wanted.state_dict().values(), strict=True)
    )
    torch.manual_seed(rank)
    different = nn.Linear(4, 4)
    held = different.weight.clone()
    snippets.initialise(different, torch.device("cpu"))
    assert torch.equal(different.weight, held), "what has values keeps them, and each rank its own"
    with torch.device("meta"):
        outer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    named: list[nn.Module] = []
    snippets.initialise(outer, torch.device("cpu"), named.append)
    assert named == [outer, outer[0], outer[1]], "from the outside in, as FSDP1"
    outer[1] = nn.Sequential(outer[0])
    outer.append(nn.Linear(2, 2))
    fully_shard(outer[2], mesh=init_device_mesh("cpu", (2,)))
    named.clear()
    snippets.initialise(outer, torch.device("cpu"), named.append)
    assert named == [outer, outer[0], outer[1]], "a module in two places once, and a group that is sharded not again"


def test_values_for_the_meta_device(ranks: Ranks) -> None:
    ranks.run(initial_values)


def strategies() -> None:
    def shape(*given: Any) -> tuple[tuple[int, ...], Any]:
        made = snippets.sharding_options(*given)
        return tuple(made["mesh"].shape), made["reshard_after_forward"]

    assert shape("FULL_SHARD", "cpu") == shape(None, "cpu") == ((2,), None)
    assert shape("SHARD_GRAD_OP", "cpu") == ((2,), False)
    assert shape("NO_SHARD", "cpu") == ((2, 1), False)
    assert shape("HYBRID_SHARD", "cpu") == ((2, 1), None), "a node has one CPU"
    line = init_device_mesh("cpu", (2,))
    table = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    assert snippets.sharding_options("SHARD_GRAD_OP", "cpu", line)["mesh"] is line
    assert shape("_HYBRID_SHARD_ZERO2", "cpu", table) == ((1, 2), False)
    for strategy, mesh in (("FULL_SHARD", table), ("HYBRID_SHARD", line), ("NO_SHARD", line)):
        with pytest.raises(ValueError, match=f"{strategy} on a mesh of {mesh.ndim} dimensions"):
            snippets.sharding_options(strategy, "cpu", mesh)


def test_a_strategy_by_its_name(ranks: Ranks) -> None:
    ranks.run(strategies)


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
    written += rewrite(load([str(folder / "scripts" / "scaler_or_ddp.py")])[0]).files[0].data.decode()
    assert [name for name, text in SOURCES.items() if text not in written] == []
