"""Small programs as people write them for FSDP1, on FSDP1 and on the shim: the same to the last bit, or refused.

Each has found a difference that nothing else here shows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecision

from fsdp1_interface import Unsupported
from tests.harness import Ranks, same
from tests.migrate.fsdp1_models import OLD, Net, build, policy, real, shim, train


class Headless(Net):
    """A layer of the outermost unit that forward doesn't use, as the pooler of a pretrained model."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(8, 8)


class Deep(Net):
    """A unit fewer at each third call, as with stochastic depth."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x)
        for block in list(self.blocks)[: 3 - (self.calls % 3 == 0)]:
            x = block(x)
        return self.last(x)


def unused_layer(fsdp: Any, folder: str) -> Any:
    """Weight decay goes on in what isn't used, as it is in the same flat parameter as what is."""
    model = build(fsdp, Headless, auto_wrap_policy=policy("transformer"), use_orig_params=True)
    losses = train(model, torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.5), 3)
    with fsdp.FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return losses, model.pooler.weight.detach().clone()


def skipped_unit(fsdp: Any, folder: str) -> Any:
    """Momentum doesn't go on in a unit that didn't run."""
    model = build(fsdp, Deep, auto_wrap_policy=policy("transformer"))
    return train(model, torch.optim.SGD(model.parameters(), 0.5, momentum=0.9), 6)


def resumed_by_a_name_of_old(fsdp: Any, folder: str) -> Any:
    """load_sharded_optimizer_state_dict makes ShardedTensors."""
    cls = fsdp.FullyShardedDataParallel
    model = build(fsdp, auto_wrap_policy=policy("transformer"), use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = train(model, optimizer, 2)
    cls.set_state_dict_type(model, fsdp.StateDictType.SHARDED_STATE_DICT)
    where = f"{folder}/{fsdp.__name__}"
    dcp.save({"model": model.state_dict(), "optim": cls.optim_state_dict(model, optimizer)}, checkpoint_id=where)
    losses += train(model, optimizer, 2)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=where)
    model.load_state_dict(state["model"])
    loaded = load_sharded_optimizer_state_dict(state["model"], "optim", dcp.FileSystemReader(where))
    optimizer.load_state_dict(cls.optim_state_dict_to_load(model, optimizer, loaded["optim"]))
    return losses + train(model, optimizer, 2)


def what_it_was_given(fsdp: Any, folder: str) -> Any:
    """Attributes of the wrapper that programs read."""
    model = build(fsdp, auto_wrap_policy=policy("transformer"))
    return (
        model.mixed_precision,
        model.cpu_offload,
        model.backward_prefetch,
        model.forward_prefetch,
        model.limit_all_gathers,
        model.sharding_strategy,
    )


PROGRAMS: list[Callable[[Any, str], Any]] = [
    unused_layer,
    skipped_unit,
    resumed_by_a_name_of_old,
    what_it_was_given,
]
NEWER = ("unused_layer",)  # needs what fully_shard can from torch 2.15 on, or FSDP1 that gathers to a CPU


def both(folder: str) -> dict[str, bool]:
    logging.disable(logging.WARNING)
    chosen = [program for program in PROGRAMS if not (OLD and program.__name__ in NEWER)]
    return {program.__name__: same(program(real(), folder), program(shim(), folder)) for program in chosen}


def test_programs_do_what_they_did(ranks: Ranks, tmp_path: Path) -> None:
    for results in ranks.run(both, str(tmp_path)):
        assert len(results) >= 3
        assert [name for name, equal in results.items() if not equal] == []


def by_layer(model: Any) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:]}]


def by_dimension(model: Any) -> list[dict[str, Any]]:
    """With FSDP1 no parameter had two, so that nothing decayed."""
    wide = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": wide, "weight_decay": 0.3}, {"params": [p for p in model.parameters() if p.ndim < 2]}]


def some(model: Any) -> list[dict[str, Any]]:
    return [{"params": list(model.first.parameters())}]


def groups() -> None:
    for orig in (False, True):
        for split in (by_layer, by_dimension, some):
            model = build(shim(), auto_wrap_policy=policy("transformer"), use_orig_params=orig)
            optimizer = torch.optim.AdamW(split(model), 1e-2)
            if orig:
                train(model, optimizer, 1)
                continue
            with pytest.raises(Unsupported, match=r"AdamW has \d of the 4 parameters of a unit Net, or groups with"):
                train(model, optimizer, 1)
    model = build(shim(), auto_wrap_policy=policy("transformer"))
    blocks, rest = list(model.blocks.parameters()), [*model.first.parameters(), *model.last.parameters()]
    whole: list[dict[str, Any]] = [{"params": blocks, "lr": 0.1}, {"params": rest}]
    train(model, torch.optim.AdamW(whole), 1)
    net = Net()
    ignored = [net.last.bias]
    model = shim().FullyShardedDataParallel(net, ignored_states=ignored, auto_wrap_policy=policy("transformer"))
    train(model, torch.optim.AdamW([one for one in model.parameters() if one is not ignored[0]]), 1)  # a unit's whole


def test_an_optimizer_that_splits_a_flat_parameter_is_refused(ranks: Ranks) -> None:
    ranks.run(groups)


def attribute(model: Any, name: str) -> Any:
    try:
        return getattr(model, name)
    except AttributeError as error:
        return error


def surface() -> list[str]:
    """Names of a real unit for which the shim has something of another type, or an error without advice."""
    plain, found = set(dir(Net())), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
        with pytest.raises(Unsupported, match="FSDP_USE_FULL_PREC_IN_EVAL"):
            build(shim(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    for orig in (False, True):
        made = [build(fsdp, auto_wrap_policy=policy("transformer"), use_orig_params=orig) for fsdp in (real(), shim())]
        for model in made:
            train(model, torch.optim.SGD(model.parameters(), 0.1), 1)
        for name in sorted(set(dir(made[0])) - plain - {"__getitem__"}):  # which goes to the model
            theirs, ours = (attribute(model, name) for model in made)
            if isinstance(ours, AttributeError):
                if not isinstance(ours, Unsupported):
                    found.append(name)
            elif type(ours) is not type(theirs) and not isinstance(theirs, nn.Module):
                found.append(name)
    return found


def test_whatever_a_unit_has_is_there_or_refused(ranks: Ranks) -> None:
    assert ranks.run(surface) == [[], []]


def names() -> Iterator[str]:
    yield from ("_handle", "_is_root", "training_state", "_unshard", "_state_dict_type")


def asked() -> None:
    unit = build(shim(), auto_wrap_policy=policy("transformer")).blocks[0]
    assert unit.params == list(unit.parameters())
    for name in names():
        assert not hasattr(unit, name)
        with pytest.raises(Unsupported, match=rf"\.{name}\b.*inner part of FSDP1"):
            getattr(unit, name)
    with pytest.raises(AttributeError, match="no attribute 'weigth'"):
        _ = unit.weigth


def test_inner_parts_say_what_to_write(ranks: Ranks) -> None:
    ranks.run(asked)
