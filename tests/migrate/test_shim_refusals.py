"""Refusals of FSDP1's interface on FSDP2: each names itself, and leaves the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from tests.harness import Ranks
from tests.migrate.fsdp1_cases import BF16, COARSE, PRECISION
from tests.migrate.fsdp1_models import (
    CPU,
    Net,
    adam,
    build,
    policy,
    shim,
    train,
)


def build_refused(case: str) -> str:
    arguments, expected = REFUSED[case]
    model = Net()
    given = arguments()
    dist.barrier()  # a group that was made for it is connected on both ranks before one of them ends
    try:
        shim().FullyShardedDataParallel(model, device_id=CPU, **given)
    except expected as error:
        assert type(model) is Net, "the model isn't what it was"
        return str(error)
    return "nothing was raised"


def answers_three(module: nn.Module) -> Any:
    return 3


REFUSED: dict[str, Any] = {
    "keep_low_precision_grads": (
        lambda: {"mixed_precision": MixedPrecision(BF16, keep_low_precision_grads=True)},
        ValueError,
    ),
    "ignored_states": (lambda: {"ignored_modules": [], "ignored_states": []}, ValueError),
    "process_group and device_mesh": (
        lambda: {"process_group": dist.group.WORLD, "device_mesh": init_device_mesh("cpu", (2,))},
        ValueError,
    ),
    "sharding_strategy": (lambda: {"sharding_strategy": "FULL_SHARD"}, TypeError),
    "HYBRID_SHARD": (
        lambda: {
            "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
            "device_mesh": init_device_mesh("cpu", (2,)),
        },
        ValueError,
    ),
    "give a pair": (
        lambda: {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": dist.group.WORLD},
        ValueError,
    ),
    "CustomPolicy": (lambda: {"auto_wrap_policy": CustomPolicy(answers_three)}, ValueError),
    "arguments that FSDP doesn't have": (
        lambda: {"auto_wrap_policy": CustomPolicy(lambda module: {"shard": 1})},
        ValueError,
    ),
    "give parameters or modules": (lambda: {"ignored_states": ["blocks"]}, TypeError),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_names_itself_and_leaves_the_model_alone(ranks: Ranks, case: str) -> None:
    for message in ranks.run(build_refused, case):
        assert case in message


def other_refusals() -> list[str]:
    messages = []

    def refused(call: Any) -> None:
        try:
            call()
        except (ValueError, TypeError, RuntimeError) as error:
            messages.append(str(error))
        else:
            messages.append("nothing was raised")

    fsdp = shim()
    model = build(fsdp, auto_wrap_policy=policy("transformer"))
    refused(lambda: fsdp.FullyShardedDataParallel(3))
    refused(lambda: fsdp.FullyShardedDataParallel(model))
    refused(
        lambda: fsdp.FullyShardedDataParallel(nn.Sequential(model), auto_wrap_policy=policy("lambda"), device_id=CPU)
    )
    refused(lambda: model.register_comm_hook(None, print))
    refused(lambda: model.blocks[0].clip_grad_norm_(1.0))
    refused(lambda: model.set_state_dict_type(model, fsdp.StateDictType.LOCAL_STATE_DICT))
    refused(lambda: model.set_state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT, fsdp.ShardedStateDictConfig()))
    refused(lambda: model.rekey_optim_state_dict({}, fsdp.OptimStateKeyType.PARAM_ID, model))
    refused(lambda: fsdp.FullyShardedDataParallel(HasModule(), device_id=CPU))
    with torch.device("meta"):
        unready = nn.Sequential(NoReset())
    refused(lambda: fsdp.FullyShardedDataParallel(unready, device_id=CPU))
    early = Net()
    optimizer = adam(early)
    sharded = fsdp.FullyShardedDataParallel(early, device_id=CPU)
    refused(lambda: train(sharded, optimizer, steps=1))
    coarse = build(fsdp, mixed_precision=PRECISION[COARSE])
    refused(lambda: train(coarse, adam(coarse), accumulate=2))
    return messages


class HasModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))


def test_other_refusals(ranks: Ranks) -> None:
    wanted = [
        "FSDP shards modules; int given",
        "Net is sharded already",
        "a module in this model is sharded already",
        "register_comm_hook(): FSDP2 has no such hook",
        "clip_grad_norm_(): call it on the outermost",
        "LOCAL_STATE_DICT: it holds flat shards",
        "FULL_STATE_DICT takes a FullStateDictConfig",
        "rekey_optim_state_dict(): the state of an optimizer has names",
        "HasModule.module: FSDP1's wrapper has this name too",
        "NoReset is on the meta device and has no reset_parameters()",
        "Adam was made before FSDP",
        "no_sync() with MixedPrecision(reduce_dtype=torch.bfloat16)",
    ]
    for messages in ranks.run(other_refusals):
        assert [want for want, got in zip(wanted, messages, strict=True) if want not in got] == [], messages


def moments_of_one_memory() -> list[str]:
    """As FSDP1 saves them on a CPU. Only rank 0 has the file, so that only there the memory tells."""
    cls, model = shim().FullyShardedDataParallel, build(shim(), use_orig_params=True)
    optimizer, messages = adam(model), []
    train(model, optimizer)
    state = cls.full_optim_state_dict(model, optimizer, rank0_only=False)
    state["state"]["last.bias"].update(dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.ones(2)))
    mine = state if dist.get_rank() == 0 else None
    for load in (
        lambda: cls.optim_state_dict_to_load(model, optimizer, state),
        lambda: cls.scatter_full_optim_state_dict(mine, model, optim=optimizer),
    ):
        with pytest.raises(ValueError, match=r"exp_avg and exp_avg_sq of last\.bias are the same memory") as caught:
            load()
        messages.append(str(caught.value))
    return messages


def test_all_ranks_refuse_moments_that_share_memory_on_rank_0(ranks: Ranks) -> None:
    assert [len(messages) for messages in ranks.run(moments_of_one_memory)] == [2, 2]
