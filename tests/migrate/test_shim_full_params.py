"""summon_full_params of the shim: a model computes with whole parameters, as FSDP1's inner modules do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from fsdp1_interface import mixing
from tests.harness import Ranks
from tests.migrate.fsdp1_models import CPU, Net, batches, build, needs_fsdp1_to_gather, policy, real, shim


def outputs() -> None:
    torch.manual_seed(0)
    whole, inputs = Net(), torch.randn(3, 6)
    with torch.no_grad():
        expected = whole(inputs)
    for fsdp in (real(), shim()):
        cls = fsdp.FullyShardedDataParallel
        model = build(fsdp, auto_wrap_policy=policy("transformer"), use_orig_params=True)
        for recurse in (True, False):
            with torch.no_grad(), cls.summon_full_params(model, writeback=False, recurse=recurse):
                if not recurse or fsdp is not real():  # FSDP1 can't on a CPU
                    found = model.module(inputs)
                    assert torch.equal(found, expected), (fsdp, recurse)
        loss = model(inputs).sum()
        loss.backward()  # its hooks are back
        assert all(p.grad is not None for p in model.parameters() if p.numel())
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def norms() -> list[dict[str, float]]:
    """Those of the parameters on the first rank, which alone has whole ones: what the others do isn't collective."""
    found = []
    for fsdp in (real(), shim()):
        model = build(fsdp, auto_wrap_policy=policy("transformer"), use_orig_params=True)
        with fsdp.FullyShardedDataParallel.summon_full_params(
            model, writeback=False, rank0_only=True, offload_to_cpu=True
        ):
            norm = {name: float(p.norm()) for name, p in model.named_parameters() if "first" in name}
        found.append({name.replace("_fsdp_wrapped_module.", ""): value for name, value in norm.items()})
    return found


@needs_fsdp1_to_gather
def test_on_other_ranks_it_is_their_shards(ranks: Ranks) -> None:
    (before, after), (_, other) = ranks.run(norms)
    assert after == before
    assert other.keys() == after.keys()
    assert other != after


@needs_fsdp1_to_gather
def test_a_model_computes_while_its_parameters_are_whole(ranks: Ranks) -> None:
    ranks.run(outputs)


def outputs_of_a_root_without_parameters() -> None:
    torch.manual_seed(0)
    net, inputs = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3)), torch.randn(3, 6)
    expected = net(inputs)
    cls = shim().FullyShardedDataParallel
    model = cls(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=CPU)
    with cls.summon_full_params(model, writeback=False):  # before any other forward
        assert torch.equal(model.module(inputs), expected)
    model(inputs).sum().backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())


def test_a_root_may_hold_none_of_them(ranks: Ranks) -> None:
    ranks.run(outputs_of_a_root_without_parameters)


def clipped_after_evaluations(strategy: str, summon: bool) -> None:
    """As of a critic whose weights are kept small: what is written to parameters behind an evaluation counts."""
    cls, small = shim().FullyShardedDataParallel, 0.05
    model = build(shim(), auto_wrap_policy=policy("transformer"), sharding_strategy=ShardingStrategy[strategy])
    torch.manual_seed(0)
    alone = Net()
    if summon:
        with cls.summon_full_params(model):
            pass
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, alone)]
    for seed in range(4):
        mine, *both = (batches(1, of)[0] for of in (2 * seed + dist.get_rank(), 2 * seed, 2 * seed + 1))
        nn.functional.cross_entropy(model(mine[0]), mine[1]).backward()
        for inputs, labels in both:
            (nn.functional.cross_entropy(alone(inputs), labels) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(both[0][0]), alone(both[0][0]))
            for parameter in (*model.parameters(), *alone.parameters()):
                parameter.clamp_(-small, small)
    with cls.summon_full_params(model):
        for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("summon", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_what_is_written_after_an_evaluation_stays(ranks: Ranks, strategy: str, summon: bool) -> None:
    ranks.run(clipped_after_evaluations, strategy, summon)


def swapped_after_a_loss() -> list[str]:
    """An average's shards take the place of the model's, which is gathered: a forward kept its graph."""
    model = build(shim(), auto_wrap_policy=policy("transformer"))
    average = [parameter.detach().clone() for parameter in model.parameters()]
    model(batches(1)[0][0])
    with torch.no_grad():
        first = next(model.parameters())  # the root's
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as caught:
            first.copy_(average[0])
        mixing.advise(caught.value)
        for unit in shim().FullyShardedDataParallel.fsdp_modules(model):
            unit.reshard()
        for parameter, kept in zip(model.parameters(), average, strict=True):
            parameter.copy_(kept)
    return caught.value.__notes__


def test_the_error_of_gathered_parameters_names_the_cure(ranks: Ranks) -> None:
    cure = "for unit in FSDP.fsdp_modules(model): unit.reshard()"
    assert [len(notes) == 1 and cure in notes[0] for notes in ranks.run(swapped_after_a_loss)] == [True, True]


def refusals() -> list[str]:
    """Of a model that is torch's FSDP1: asked as if it were the shim's."""
    cls, messages = shim().FullyShardedDataParallel, []
    model = build(real(), use_orig_params=True)
    for ask in (
        lambda: cls.summon_full_params(model).__enter__(),
        lambda: cls.optim_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1)),
        lambda: cls.get_state_dict_type(model),
    ):
        with pytest.raises(shim().Unsupported) as caught:
            ask()
        messages.append(str(caught.value))
    return messages


def test_a_model_of_fsdp1_is_refused(ranks: Ranks) -> None:
    for messages in ranks.run(refusals):
        assert all("is sharded by torch's FSDP1" in message for message in messages)
