"""FSDP1's API on FSDP2: what it is, gathers, logs and refuses."""

from __future__ import annotations

import importlib
import logging
import math
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor.debug import CommDebugMode

from tests.harness import Ranks
from tests.migrate.fsdp1_cases import CASES
from tests.migrate.fsdp1_models import (
    CPU,
    Net,
    adam,
    batches,
    build,
    policy,
    real,
    shim,
    train,
)


def logged_code(case: str) -> str:
    from fsdp1_interface import explain

    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    explain.log.addHandler(handler)
    explain._said.clear()
    arguments = CASES[case]()
    arguments.pop("device_mesh", None)
    torch.manual_seed(0)
    build(shim(), **arguments)
    explain.log.removeHandler(handler)
    box = [texts[0] if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    return "\n".join(line.removeprefix("    ") for line in box[0].splitlines()[1:])


def logged_code_runs(case: str) -> tuple[list[float], list[float], str]:
    code = logged_code(case)
    arguments = CASES[case]()
    arguments.pop("device_mesh", None)
    torch.manual_seed(0)
    model = build(shim(), **arguments)
    expected = train(model, adam(model))
    torch.manual_seed(0)
    by_hand = CASES[case]().get("model", Net)()
    exec(code, {"model": by_hand})
    return expected, train(by_hand, adam(by_hand)), code


@pytest.mark.parametrize(
    "case",
    [
        "lambda",
        "always",
        "custom with arguments",
        "custom, one not sharded",
        "no prefetch",
        "forward prefetch",
        "layer norm left out",
        "inputs cast everywhere",
        "batch norm in bf16",
        "ignored parameters",
        "weights on the first rank",
    ],
)
def test_the_code_that_is_logged_trains_the_same(ranks: Ranks, case: str) -> None:
    for expected, got, code in ranks.run(logged_code_runs, case):
        assert got == expected, code
        assert "fully_shard(model, mesh=mesh" in code


def test_the_code_that_is_logged_says_what_is_not_in_it(ranks: Ranks) -> None:
    code = ranks.run(logged_code, "on meta")[0]
    assert "# First what is on the meta device gets memory and values" in code


def test_a_grad_scaler_is_made_before_the_process_group_too() -> None:
    assert not dist.is_initialized()
    assert shim().ShardedGradScaler("cpu", init_scale=8.0).get_scale() == 8.0


@pytest.mark.parametrize("method", ["optim_state_dict", "full_optim_state_dict", "sharded_optim_state_dict"])
def test_each_state_of_an_optimizer_logs_its_code(ranks: Ranks, method: str) -> None:
    assert f"{method}() is, in FSDP2:" in ranks.run(logged_of, method)[0]


def logged_of(method: str) -> str:
    from fsdp1_interface import explain

    model = build(shim())
    train(model, optimizer := adam(model))
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    explain.log.addHandler(handler)
    explain._said.clear()
    getattr(shim().FullyShardedDataParallel, method)(model, optimizer)
    explain.log.removeHandler(handler)
    return "".join(texts)


def logged(count: int) -> int:
    from fsdp1_interface import explain

    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    explain.log.addHandler(handler)
    explain._said.clear()
    for _ in range(count):
        build(shim())
    return len(texts)


def test_a_translation_is_logged_once_on_one_rank(ranks: Ranks) -> None:
    assert ranks.run(logged, 3) == [1, 0]


def collectives(strategy: str) -> tuple[dict[str, int], bool]:
    """What a step issues, by kind, and whether each rank has whole parameters."""
    model = build(shim(), auto_wrap_policy=policy("transformer"), sharding_strategy=ShardingStrategy[strategy])
    inputs, labels = batches(1)[0]
    with CommDebugMode() as mode:
        nn.functional.cross_entropy(model(inputs), labels).backward()
    found = {str(op).rpartition(".")[2].strip("_"): count for op, count in mode.get_comm_counts().items()}
    return found, all(p.to_local().shape == p.shape for p in model.parameters())


@pytest.mark.parametrize(
    ("strategy", "expected", "whole"),
    [
        ("FULL_SHARD", {"allgather_base": 4 + 3, "reduce_scatter_base": 4}, False),  # the root isn't gathered again
        ("SHARD_GRAD_OP", {"allgather_base": 4, "reduce_scatter_base": 4}, False),
        ("NO_SHARD", {"allreduce": 4}, True),
    ],
)
def test_a_strategy_shards_and_gathers_as_it_says(
    ranks: Ranks, strategy: str, expected: dict[str, int], whole: bool
) -> None:
    assert ranks.run(collectives, strategy) == [(expected, whole)] * 2


def gathered_before_backward(prefetch: BackwardPrefetch | None) -> list[int]:
    """How many all-gathers of backward have been issued when the last block, and the one before, compute theirs."""
    model = build(shim(), auto_wrap_policy=policy("transformer"), backward_prefetch=prefetch)
    inputs, labels = batches(1)[0]
    mode = CommDebugMode()
    issued: list[int] = []
    for block in (model.blocks[2], model.blocks[1]):
        block.norm.register_full_backward_pre_hook(lambda *_: issued.append(mode.get_total_counts()))
    loss = nn.functional.cross_entropy(model(inputs), labels)
    with mode:
        loss.backward()
    return issued


def test_backward_prefetch_gathers_one_unit_ahead_or_none(ranks: Ranks) -> None:
    # A unit's own, and the next one's; before the second there is one reduce-scatter.
    assert ranks.run(gathered_before_backward, BackwardPrefetch.BACKWARD_PRE) == [[2, 4], [2, 4]]
    assert ranks.run(gathered_before_backward, None) == [[1, 3], [1, 3]]
    assert ranks.run(gathered_before_backward, BackwardPrefetch.BACKWARD_POST) == [[1, 3], [1, 3]]


def structure() -> None:
    fsdp = shim()
    cls = fsdp.FullyShardedDataParallel
    model = build(fsdp, auto_wrap_policy=policy("transformer"))
    assert isinstance(model, cls)
    assert type(model).__mro__.index(Net)
    assert isinstance(model.blocks[0], cls)
    assert not isinstance(model.first, cls)
    assert cls.fsdp_modules(model) == [model, *model.blocks]
    assert cls.fsdp_modules(model, root_only=True) == [model]
    assert model.check_is_root()
    assert not model.blocks[0].check_is_root()
    assert model.module is model
    assert model._fsdp_wrapped_module is model
    assert model.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert (model.rank, model.world_size) == (dist.get_rank(), 2)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Net().named_parameters()]
    assert not hasattr(model, "no_such_thing")
    assert model.blocks[0].params == list(model.blocks[0].parameters())
    assert model.params == [*model.first.parameters(), *model.last.parameters()]
    for inner, advice in (
        ("_flat_param", "no flat parameter"),
        ("_handle", "unit.reshard()"),
        ("_streams", "own streams"),
    ):
        assert not hasattr(model, inner)
        with pytest.raises(fsdp.Unsupported, match=rf"^\.{inner} is an inner part of FSDP1.*{advice}"):
            getattr(model.blocks[0], inner)
    container = build(fsdp, lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3), nn.Linear(3, 5)))
    assert type(container[:2]) is nn.Sequential

    class Mine(cls):  # type: ignore[misc, valid-type]
        def __init__(self, module: nn.Module, **arguments: Any) -> None:
            super().__init__(module, **arguments)
            self.mine = 3

    mine = Mine(Net(), device_id=CPU)
    assert isinstance(mine, Mine)
    assert mine.mine == 3
    assert math.isfinite(train(mine, adam(mine), steps=1)[0])


def test_a_sharded_model_is_of_both_classes_and_has_plain_names(ranks: Ranks) -> None:
    ranks.run(structure)


def questions() -> list[dict[str, Any]]:
    """What programs ask, by a string or a private name, to know whether a model is FSDP1's."""
    found = []
    for fsdp in (real(), shim()):
        mine = type("Mine", (fsdp.FullyShardedDataParallel,), {"__module__": "mine"})
        for own in (False, True):
            model = build(fsdp, auto_wrap_policy=policy("transformer"), use_orig_params=own)
            of = type(model)
            unit = model.module.blocks[0]
            names = (
                of.__name__,
                of.__qualname__,
                of.__module__,
                model.__class__.__name__,
                type(unit).__name__,
                str(of),
            )
            flattened = {hasattr(p, "_fsdp_flattened") for p in model.parameters()}
            derived = type(mine(nn.Linear(2, 2), device_id=CPU))
            plain = fsdp.FullyShardedDataParallel(nn.Linear(2, 2), device_id=CPU)
            found.append({"names": names, "parameters": flattened, "derived": (derived.__name__, derived.__module__),
                          "printed": str(plain), "whole": str(model).split("\n")[:2]})  # fmt: skip
    return found


def test_questions_by_name_are_answered_as_fsdp1_does(ranks: Ranks) -> None:
    for answers in ranks.run(questions):
        assert answers[:2] == answers[2:]
        assert answers[2]["names"][0] == "FullyShardedDataParallel"


def by_hand(kind: str) -> list[str]:
    model = build(shim())
    train(model, adam(model), steps=1)
    parameter = next(iter(model.parameters()))
    plain, other = (torch.zeros(()), parameter.norm()) if kind == "norm" else (torch.zeros(8, 6), parameter.detach())
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        plain.add_(other)
    sys.excepthook(caught.type, caught.value, caught.tb)
    return list(caught.value.__notes__)


@pytest.mark.parametrize("kind", ["norm", "average"])
def test_a_plain_tensor_beside_a_shard_says_what_to_call(ranks: Ranks, kind: str) -> None:
    for notes in ranks.run(by_hand, kind):
        assert len(notes) == 1
        assert "model.clip_grad_norm_(max_norm)" in notes[0]
        assert "p.to_local()" in notes[0]


def dimensions() -> list[tuple[int, int]]:
    models = [build(fsdp, use_orig_params=True) for fsdp in (real(), shim())]
    return [(a.ndim, b.ndim) for a, b in zip(*(model.parameters() for model in models), strict=True)]


def test_parameters_have_their_shapes_which_fsdp1_flattens(ranks: Ranks) -> None:
    """Said in the docs: what decides by `p.ndim` decides otherwise."""
    expected = [(1, parameter.ndim) for parameter in Net().parameters()]
    assert ranks.run(dimensions) == [expected, expected]


def synchronized() -> tuple[list[float], list[float]]:
    torch.manual_seed(dist.get_rank())
    model = Net()
    model.get_buffer("blocks.0.scale").add_(dist.get_rank())
    sharded = shim().FullyShardedDataParallel(
        model, device_id=CPU, sync_module_states=True, auto_wrap_policy=policy("transformer")
    )
    torch.manual_seed(0)
    expected = Net().state_dict()
    got = sharded.state_dict()
    return [float(v.sum()) for v in expected.values()], [float(v.sum()) for v in got.values()]


def test_sync_module_states_gives_every_rank_the_first_ones_values(ranks: Ranks) -> None:
    for expected, got in ranks.run(synchronized):
        assert got == expected


def test_the_function_of_a_custom_policy_can_be_read() -> None:
    """It is private in torch; where it moves, this fails."""
    from fsdp1_interface.units import custom_decision

    def decide(module: nn.Module) -> bool:
        return True

    assert custom_decision(CustomPolicy(decide)) is decide


def test_every_import_of_fsdp1_works_from_the_package() -> None:
    """With fsdp2.migrate in the place of torch.distributed.fsdp, second names and private policies included."""
    names: dict[str, Any] = {}
    exec(
        "from fsdp2.migrate import *\n"
        "import fsdp2.migrate as fsdp\n"
        "from fsdp2.migrate import wrap, api\n"
        "from fsdp2.migrate.wrap import _or_policy, wrap as wrap_one, enable_wrap\n"
        "from fsdp2.migrate.api import MixedPrecision as Precision\n"
        "from fsdp2.migrate.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP, StateDictType\n"
        "from fsdp2.migrate.sharded_grad_scaler import ShardedGradScaler as Scaler\n"
        "from fsdp2.migrate import fully_shard, MixedPrecisionPolicy\n",
        names,
    )
    assert {*torch.distributed.fsdp.__all__} < names.keys()
    assert names["FSDP"] is names["FullyShardedDataParallel"] is names["fsdp"].FullyShardedDataParallel
    assert names["FSDP"] is shim().FullyShardedDataParallel
    assert names["fsdp"].wrap.transformer_auto_wrap_policy is shim().transformer_auto_wrap_policy
    assert names["wrap"].wrap is names["wrap_one"]
    assert names["fully_shard"] is torch.distributed.fsdp.fully_shard


def test_a_name_that_is_gone_says_so_at_the_import() -> None:
    with pytest.raises(ImportError, match=r"no FlatParameter: .* a DTensor of its own shape"):
        exec("from fsdp2.migrate import FlatParameter")
    assert not hasattr(importlib.import_module("fsdp2.migrate"), "of_another_program")


def test_offload_on_a_cpu_trains_as_without(ranks: Ranks) -> None:
    """FSDP1 has no CPUOffload without a GPU, so it is compared with the shim's own."""
    for plain_losses, offloaded in ranks.run(offloading):
        assert plain_losses == offloaded


def offloading() -> tuple[list[float], list[float]]:
    sides = []
    for offload in (None, CPUOffload(offload_params=True)):
        model = build(shim(), cpu_offload=offload)
        sides.append(train(model, adam(model)))
    return sides[0], sides[1]
