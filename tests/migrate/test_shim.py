"""FSDP1's API on FSDP2, beside FSDP1: the same losses, bit for bit, on 2 ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from tests.harness import Ranks
from tests.migrate.fsdp1_cases import BF16, CASES, COARSE, FINE, PRECISION, ignoring
from tests.migrate.fsdp1_models import (
    CPU,
    Net,
    adam,
    batches,
    build,
    fsdp1_broadcasts_on_a_cpu,
    policy,
    real,
    recompute,
    shim,
    train,
)


def differing(strategy: str, policy_name: str) -> list[str]:
    """The combinations of the other options whose losses aren't FSDP1's."""
    found = []
    for precision, accumulate in itertools.product(PRECISION, (1, 2)):
        if precision == COARSE and accumulate == 2:
            continue  # refused
        sides = []
        for fsdp, orig in ((real(), False), (real(), True), (shim(), False)):
            model = build(
                fsdp,
                sharding_strategy=ShardingStrategy[strategy],
                auto_wrap_policy=policy(policy_name),
                mixed_precision=PRECISION[precision],
                use_orig_params=orig,
            )
            # Not Adam, whose first steps are as long whatever the gradient is.
            optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
            sides.append(train(model, optimizer, 3, accumulate=accumulate))
        assert sides[0] == sides[1], "FSDP1's own losses depend on use_orig_params"
        if accumulate == 2 and precision == FINE:
            # FSDP1 adds microbatches up in param_dtype, FSDP2 in reduce_dtype: other sums, and the finer ones.
            assert sides[2] == pytest.approx(sides[0], rel=1e-2)
        elif sides[0] != sides[2]:
            found.append(f"{precision}, {accumulate} microbatches: {sides}")
    return found


@pytest.mark.parametrize("policy_name", ["none", "transformer"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_losses_are_bit_equal_to_fsdp1(ranks: Ranks, strategy: str, policy_name: str) -> None:
    assert ranks.run(differing, strategy, policy_name) == [[], []]


def both(case: str) -> tuple[Any, Any]:
    with fsdp1_broadcasts_on_a_cpu():
        expected = run_case(case, real())
    return expected, run_case(case, shim())


def run_case(case: str, fsdp: Any) -> list[float]:
    arguments = {"use_orig_params": True, **CASES[case]()}
    if fsdp is real():  # which has them no more
        renamed = {"fsdp_auto_wrap_policy": "auto_wrap_policy", "ignored_params": "ignored_states"}
        arguments = {renamed.get(name, name): value for name, value in arguments.items()}
    model = build(fsdp, **arguments)
    if case == "activation checkpointing":
        recompute(model)
    return train(model, adam(model), steps=5)


@pytest.mark.parametrize("case", CASES)
def test_each_option_gives_the_losses_of_fsdp1(ranks: Ranks, case: str) -> None:
    for expected, got in ranks.run(both, case):
        assert got == expected
        assert all(math.isfinite(loss) for loss in got)


def on_four(case: str) -> tuple[Any, Any]:
    shape = (2, 2)
    sides = []
    for fsdp in (real(), shim()):
        arguments: dict[str, Any] = {
            "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
            "auto_wrap_policy": policy("transformer"),
        }
        if case == "mesh":
            arguments["device_mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        else:
            rank = dist.get_rank()
            shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
            arguments["process_group"] = (shards[rank // 2], replicas[rank % 2])
        model = build(fsdp, **arguments)
        sides.append(train(model, adam(model)))
    return sides[0], sides[1]


@pytest.mark.parametrize("case", ["mesh", "pair of groups"])
def test_hybrid_sharding_on_four_ranks(ranks: Ranks, case: str) -> None:
    for expected, got in ranks.run(on_four, case, ranks=4):
        # Four numbers are summed in another order: rounding, in the first steps.
        assert got == pytest.approx(expected, rel=1e-5)


def clipped(strategy: str) -> tuple[list[float], list[float]]:
    sides = []
    for fsdp in (real(), shim()):
        model = build(
            fsdp,
            auto_wrap_policy=policy("transformer"),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=True,
        )
        sides.append(train(model, torch.optim.SGD(model.parameters(), 0.1), steps=10, clip=0.5))
    return sides[0], sides[1]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_clipping(ranks: Ranks, strategy: str) -> None:
    for expected, got in ranks.run(clipped, strategy):
        # FSDP1 sums the squares of a rank's flat gradients, FSDP2 those of each parameter: rounding.
        assert got == pytest.approx(expected, rel=1e-6)
        assert max(expected[1::2]) > 0.5, "nothing was clipped"


def clipped_in_part() -> tuple[list[float], list[float], float]:
    sides = []
    for fsdp in (real(), shim()):
        model = build(fsdp, **ignoring("ignored_modules"), use_orig_params=True)
        # The same data everywhere: gradients of what is ignored aren't reduced, so that ranks would clip otherwise,
        # and which elements a rank has isn't the same in FSDP1.
        sides.append(train(model, torch.optim.SGD(model.parameters(), 0.1), steps=4, clip=0.5, seed=7))
    with_inf = build(shim())
    loss = nn.functional.cross_entropy(with_inf(batches(1)[0][0]), batches(1)[0][1])
    loss.backward()
    largest = max(float(p.grad.full_tensor().abs().max()) for p in with_inf.parameters())
    assert float(with_inf.clip_grad_norm_(1e9, math.inf)) == largest
    return sides[0], sides[1], largest


def test_clipping_counts_ignored_parameters_once(ranks: Ranks) -> None:
    for expected, got, _ in ranks.run(clipped_in_part):
        assert got == pytest.approx(expected, rel=1e-6)


def nested_by_hand(fsdp: Any) -> list[float]:
    from torch.distributed.fsdp.wrap import enable_wrap, wrap

    torch.manual_seed(0)
    precision = MixedPrecision(param_dtype=BF16)
    with enable_wrap(wrapper_cls=fsdp.FullyShardedDataParallel, device_id=CPU, mixed_precision=precision):
        model: Any = Net()
        model.blocks[0] = wrap(model.blocks[0])
        model.blocks[1] = wrap(model.blocks[1], sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        model = wrap(model)
    return train(model, adam(model))


def test_wrapping_by_hand(ranks: Ranks) -> None:
    """The inner ones were outermost when they were made: only the last may cast its inputs."""
    for expected, got in ranks.run(both_nested):
        assert got == expected


def both_nested() -> tuple[list[float], list[float]]:
    return nested_by_hand(real()), nested_by_hand(shim())
