"""State dicts of FSDP1 and of the shim are the same, tensor by tensor, and each goes on from the other's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from tests.harness import Ranks, same
from tests.migrate.fsdp1_models import (
    Net,
    TiedNet,
    adam,
    build,
    needs_fsdp1_to_gather,
    policy,
    real,
    recompute,
    shim,
    train,
)

FULL = StateDictType.FULL_STATE_DICT
# On a CPU and with use_orig_params, FSDP1's full state of an optimizer is wrong with offload_to_cpu, its default:
# exp_avg and exp_avg_sq are one tensor, since copying to the CPU copies nothing (torch 2.15).
STAY = {"offload_to_cpu": False}
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "full": (FULL, FullStateDictConfig(), FullOptimStateDictConfig(**STAY)),
    "full on the CPU": (FULL, FullStateDictConfig(offload_to_cpu=True), FullOptimStateDictConfig(**STAY)),
    "full on rank 0": (
        FULL,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(rank0_only=True, **STAY),
    ),
    "sharded": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()),
}


def trained(fsdp: Any, **arguments: Any) -> tuple[Any, torch.optim.Optimizer]:
    arguments = {
        "auto_wrap_policy": policy("transformer"),
        "use_orig_params": True,
        "device_mesh": init_device_mesh("cpu", (2,)),  # so that FSDP1's sharded tensors are DTensors
        **arguments,
    }
    model = build(fsdp, **arguments)
    optimizer = adam(model)
    train(model, optimizer)
    return model, optimizer


def states(fsdp: Any, kind: str, **arguments: Any) -> tuple[Any, Any]:
    model, optimizer = trained(fsdp, **arguments)
    cls = fsdp.FullyShardedDataParallel
    with cls.state_dict_type(model, *KINDS[kind]):
        # Deep copies: FSDP1's tensors are views that the next step changes.
        return copy.deepcopy(dict(model.state_dict())), copy.deepcopy(cls.optim_state_dict(model, optimizer))


def comparable(tree: Any) -> Any:
    """DTensors as their shards with what is said of them."""
    if isinstance(tree, DTensor):
        return {"local": tree.to_local(), "placements": str(tree.placements), "shape": list(tree.shape)}
    if isinstance(tree, dict):
        return {key: comparable(value) for key, value in tree.items()}
    return tree


def difference(kind: str, arguments: dict[str, Any]) -> str:
    (expected, expected_optimizer), (got, got_optimizer) = (
        states(fsdp, kind, **arguments) for fsdp in (real(), shim())
    )
    if list(expected) != list(got):
        return f"names: {list(expected)} and {list(got)}"
    if not same(comparable(expected), comparable(got)):
        return "tensors of the model"
    if not arguments.get("use_orig_params", True):  # the parameters of a flat one stand together in FSDP1's list
        for state in filter(None, (expected_optimizer, got_optimizer)):
            state["param_groups"][0]["params"].sort()
    if not same(comparable(expected_optimizer), comparable(got_optimizer)):
        return f"optimizer: {expected_optimizer} and {got_optimizer}"
    return ""


@pytest.mark.parametrize("kind", [pytest.param(k, marks=needs_fsdp1_to_gather if "on" in k else ()) for k in KINDS])
def test_state_dicts_are_equal_to_those_of_fsdp1(ranks: Ranks, kind: str) -> None:
    assert ranks.run(difference, kind, {}) == ["", ""]


BUFFERS = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)}


@needs_fsdp1_to_gather
@pytest.mark.parametrize(
    "arguments",
    [BUFFERS, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, {"use_orig_params": False}],
    ids=["low buffers", "grad op", "flat"],
)
def test_full_state_dicts_with_other_options(ranks: Ranks, arguments: dict[str, Any]) -> None:
    assert ranks.run(difference, "full on rank 0", arguments) == ["", ""]


def crossed(kind: str, source: str, make: type[nn.Module] = Net) -> tuple[list[float], list[float]]:
    """Losses after going on: in the same library, and in the other one."""
    source, _, flat = source.partition(", ")
    sides = {"FSDP1": real(), "shim": shim()}
    model, optimizer = trained(sides[source], model=make, use_orig_params=not flat)
    cls = sides[source].FullyShardedDataParallel
    with cls.state_dict_type(model, *KINDS[kind]):
        state = copy.deepcopy(dict(model.state_dict()))
        optimizer_state = copy.deepcopy(cls.optim_state_dict(model, optimizer))
    expected = train(model, optimizer, 5, skip=3)

    other = next(fsdp for name, fsdp in sides.items() if name != source)
    cls = other.FullyShardedDataParallel
    torch.manual_seed(5)
    model = build(
        other,
        lambda: different(make),
        auto_wrap_policy=policy("transformer"),
        use_orig_params=True,
        device_mesh=init_device_mesh("cpu", (2,)),
    )
    optimizer = adam(model)
    with cls.state_dict_type(model, *KINDS[kind]):
        result = model.load_state_dict(state)
        assert not result.missing_keys
        assert not result.unexpected_keys
        optimizer.load_state_dict(cls.optim_state_dict_to_load(model, optimizer, optimizer_state))
    return expected, train(model, optimizer, 5, skip=3)


def different(make: type[nn.Module]) -> nn.Module:
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("source", ["FSDP1", "FSDP1, flat", "shim"])
def test_each_goes_on_from_the_others_state_dicts(ranks: Ranks, source: str, kind: str) -> None:
    """In a full state of flat parameters `step` is one tensor for all of a unit: each must count alone."""
    for expected, got in ranks.run(crossed, kind, source):
        assert got == expected


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("source", ["FSDP1", "shim"])
def test_tied_weights_go_on_from_the_others_state_dicts(ranks: Ranks, source: str, kind: str) -> None:
    for expected, got in ranks.run(crossed, kind, source, TiedNet):
        assert got == expected


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_state_dicts_of_tied_weights_are_equal_to_those_of_fsdp1(ranks: Ranks, kind: str) -> None:
    assert ranks.run(difference, kind, {"model": TiedNet}) == ["", ""]


def old_methods() -> list[bool]:
    cls = shim().FullyShardedDataParallel
    model, optimizer = trained(shim())
    full = copy.deepcopy(cls.full_optim_state_dict(model, optimizer))
    sharded = copy.deepcopy(cls.sharded_optim_state_dict(model, optimizer))
    expected = train(model, optimizer, 2, skip=3)
    found = []

    def of_rank_0(model: Any, optimizer: torch.optim.Optimizer) -> Any:
        with cls.state_dict_type(model, *KINDS["full on rank 0"]):
            return cls.optim_state_dict_to_load(model, optimizer, full or None)

    loads = {
        "rank 0": of_rank_0,
        "flatten": lambda model, optimizer: cls.flatten_sharded_optim_state_dict(sharded, model, optimizer),
        "scatter": lambda model, optimizer: cls.scatter_full_optim_state_dict(full or None, model),
    }
    for load in loads.values():
        model, optimizer = trained(shim())
        optimizer.state.clear()
        optimizer.load_state_dict(load(model, optimizer))
        found.append(train(model, optimizer, 2, skip=3) == expected)
    everywhere = cls.full_optim_state_dict(trained_model := trained(shim())[0], adam(trained_model), rank0_only=False)
    return [*found, (full != {}) == (dist.get_rank() == 0), everywhere["state"] == {}]


def test_the_deprecated_methods(ranks: Ranks) -> None:
    assert ranks.run(old_methods) == [[True] * 5] * 2


def optimizer_of_another_model() -> list[str]:
    cls = shim().FullyShardedDataParallel
    model, optimizer = trained(shim())
    state = cls.optim_state_dict(model, optimizer)
    messages = []
    smaller, larger, alike = (copy.deepcopy(state) for _ in range(3))
    smaller["param_groups"][0]["params"].remove("last.bias")
    larger["param_groups"][0]["params"].append("extra")
    alike["state"]["last.bias"].update(dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.ones(2)))
    for wrong in (smaller, larger, alike):
        try:
            cls.optim_state_dict_to_load(model, optimizer, wrong)
        except ValueError as error:
            messages.append(str(error))
    try:
        model.load_state_dict({"first.weight": torch.zeros(3, 3)}, strict=False)
    except RuntimeError as error:
        messages.append(str(error))
    return messages


def asked_of_another_group() -> list[str]:
    cls = shim().FullyShardedDataParallel
    model, optimizer = trained(shim())
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    messages = []
    for method in ("optim_state_dict", "full_optim_state_dict", "sharded_optim_state_dict"):
        with pytest.raises(ValueError, match="the model is sharded over") as caught:
            getattr(cls, method)(model, optimizer, group=alone)
        messages.append(str(caught.value))
    assert cls.optim_state_dict(model, optimizer, group=dist.new_group([0, 1]))["state"]
    return messages


def test_a_group_that_does_not_shard_the_model_is_refused(ranks: Ranks) -> None:
    for rank, messages in enumerate(ranks.run(asked_of_another_group)):
        assert all(f"group of the ranks [{rank}]: the model is sharded over [0, 1]" in text for text in messages)


def test_state_of_another_model_is_refused(ranks: Ranks) -> None:
    for small, large, memory, shape in ranks.run(optimizer_of_another_model):
        assert "exp_avg and exp_avg_sq of last.bias are the same memory" in memory
        assert "it has nothing for last.bias" in small
        assert "the model has no extra" in large
        assert "size mismatch for first.weight" in shape


def recomputed() -> list[str]:
    model, optimizer = trained(shim())
    recompute(model)
    cls = shim().FullyShardedDataParallel
    names = list(cls.optim_state_dict(model, optimizer)["state"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({name: value * 2 for name, value in before.items()})
    after = model.state_dict()
    assert all(torch.equal(after[name], value * 2) for name, value in before.items())
    return names


def test_names_are_plain_after_activation_checkpointing(ranks: Ranks) -> None:
    assert ranks.run(recomputed) == [[name for name, _ in Net().named_parameters()]] * 2


def settings() -> None:
    cls = shim().FullyShardedDataParallel
    model = build(shim(), auto_wrap_policy=policy("transformer"))
    before = cls.get_state_dict_type(model)
    assert before.state_dict_type is FULL
    cls.set_state_dict_type(model.blocks[0], StateDictType.SHARDED_STATE_DICT)
    with pytest.raises(RuntimeError, match="different kinds"):
        cls.get_state_dict_type(model)
    assert isinstance(model.state_dict()["blocks.0.inner.weight"], DTensor)
    old = cls.set_state_dict_type(model.blocks[0], FULL)
    assert old.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert cls.get_state_dict_type(model) == before
    plain_around = nn.ModuleDict({"net": model})
    assert not any(isinstance(value, DTensor) for value in plain_around.state_dict().values())


def test_the_kind_is_kept_by_each_unit(ranks: Ranks) -> None:
    ranks.run(settings)


def summoned(fsdp: Any) -> dict[str, Any]:
    """What is seen and left by summon_full_params."""
    model, optimizer = trained(fsdp)
    cls = fsdp.FullyShardedDataParallel
    found: dict[str, Any] = {}

    def values() -> dict[str, Tensor]:
        return {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in model.named_parameters()
        }

    with cls.summon_full_params(model, writeback=False):
        found["read"] = values()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    with cls.summon_full_params(model), torch.no_grad():
        found["unchanged"] = values()
        for parameter in model.parameters():
            parameter.mul_(0.5)
    with cls.summon_full_params(model, rank0_only=True, writeback=False, offload_to_cpu=True):
        found["rank 0"] = values() if dist.get_rank() == 0 else {}
    model.apply(double_linear)
    found["losses"] = train(model, optimizer, 2)
    return found


def double_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        with torch.no_grad():
            module.weight.copy_(module.weight.flip(0) * 2)  # not element by element: the whole has to be there


def both_summoned() -> tuple[Any, Any]:
    return summoned(real()), summoned(shim())


@needs_fsdp1_to_gather
def test_summon_full_params_reads_and_writes_as_fsdp1(ranks: Ranks) -> None:
    for expected, got in ranks.run(both_summoned):
        assert same(expected, got)
        assert got["read"]["blocks.0.inner.weight"].shape == (15, 8)


def gradients() -> list[bool]:
    model, _ = trained(shim())
    nn.functional.cross_entropy(model(torch.ones(4, 6)), torch.arange(4)).backward()
    whole = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
    cls = shim().FullyShardedDataParallel
    with cls.summon_full_params(model, with_grads=True):
        seen = [torch.equal(p.grad, whole[name]) for name, p in model.named_parameters()]
        for parameter in model.parameters():
            parameter.grad.mul_(2)
    return [*seen, *(torch.equal(p.grad.full_tensor(), whole[name] * 2) for name, p in model.named_parameters())]


def test_summon_full_params_with_gradients(ranks: Ranks) -> None:
    for found in ranks.run(gradients):
        assert found
        assert all(found)


def only_own() -> tuple[bool, bool, str]:
    model, _ = trained(shim())
    cls = shim().FullyShardedDataParallel
    with cls.summon_full_params(model, recurse=False):
        own = isinstance(model.first.weight, DTensor), isinstance(model.blocks[0].inner.weight, DTensor)
    try:
        with cls.summon_full_params(model, rank0_only=True):
            pass
    except ValueError as error:
        return *own, str(error)
    return *own, ""


def test_summon_full_params_without_recursion_and_what_it_refuses(ranks: Ranks) -> None:
    for first, inner, message in ranks.run(only_own):
        assert (first, inner) == (False, True)
        assert "writeback=True with rank0_only=True" in message


def scaled() -> tuple[list[float], list[float], list[float]]:
    """fp16 with a scale that overflows in the first step."""
    found: list[list[float]] = []
    scales: list[float] = []
    for fsdp in (real(), shim()):
        if fsdp is real():
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
        else:
            from fsdp1_interface import ShardedGradScaler  # type: ignore[assignment]
        model, _ = trained(fsdp, mixed_precision=MixedPrecision(param_dtype=torch.float16))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = ShardedGradScaler("cpu", init_scale=2.0**18)
        losses = []
        for number in range(5):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(number + 10 * dist.get_rank()))
            loss = nn.functional.cross_entropy(model(inputs).float(), torch.arange(4))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
        scales.append(scaler.get_scale())
    return found[0], found[1], scales


def test_the_scaler_skips_the_same_steps(ranks: Ranks) -> None:
    for expected, got, (scale, our_scale) in ranks.run(scaled):
        assert got == expected
        assert scale == our_scale < 2.0**18, "nothing overflowed"
