"""What a plan stands on that torch may move, and what fake tensors can't do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2_tools.plan import fake
from fsdp2_tools.plan.execute import run


def test_a_fake_rank_is_the_rank_it_says_and_sends_nothing() -> None:
    with fake.fake_group(5, 4096):
        assert (dist.get_rank(), dist.get_world_size()) == (5, 4096)
        dist.all_reduce(torch.ones(3))
    assert not dist.is_initialized()


def test_shapes_of_split_tensors_are_learned_while_somebody_is_told() -> None:
    told: list[bool] = []
    with fake.fake_group(1, 4), fake.propagation_told(told.append):
        mesh = init_device_mesh("cpu", (4,))
        whole = DTensor.from_local(torch.ones(3, 5), mesh, [Shard(0)], run_check=False)
        assert (whole * 7).shape == (12, 5)
    assert told == [True, False]


def test_fake_tensors_have_no_memory() -> None:
    with fake.fake_mode():
        huge = torch.empty(1 << 40)
        assert (huge + 1).nbytes == 4 << 40
        with pytest.raises(fake.data_dependent()):
            bool(huge[0] > 0)


def test_values_are_answered_outside_of_a_model_alone() -> None:
    inside = False
    with fake.fake_mode(), fake.Values(lambda: inside):
        tensor = torch.empty(2)
        assert not tensor.isnan().any()
        assert tensor.sum().item() == 1
        inside = True
        with pytest.raises(fake.data_dependent()):
            tensor.sum().item()


def test_a_model_that_reads_values_is_refused_by_name() -> None:
    config = parse(["--model=tests.plan.models:deciding", "--dataset=digits", "--batch-size=4"])
    with pytest.raises(ConfigError, match=r"deciding: can't be planned, since .* reads values"):
        run(config, 2, 0, gloo=True)


def test_a_model_whose_operator_needs_values_is_refused_by_name() -> None:
    config = parse(["--model=tests.plan.models:opaque", "--dataset=digits", "--batch-size=4"])
    with pytest.raises(
        ConfigError, match=r"opaque: can't be planned, .* forward fails .*tests_plan::doubled.*measure it"
    ):
        run(config, 2, 0, gloo=True)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1"])
def test_a_strategy_that_cannot_be_planned_is_refused(strategy: str) -> None:
    with pytest.raises(ConfigError, match=f"--strategy {strategy}: .*compare"):
        run(parse([f"--strategy={strategy}"]), 2, 0, gloo=True)


def test_float8_is_refused_since_a_plan_would_count_its_emulation() -> None:
    with pytest.raises(ConfigError, match=r"--float8 rowwise: .*; plan without it"):
        run(parse(["--float8=rowwise", "--mixed-precision"]), 2, 0, gloo=True)


def test_a_device_is_answered_without_asking_torch() -> None:
    """torch asks for it as often as it computes; elsewhere the answer is the same and takes longer."""
    with fake.fake_mode():
        tensor = torch.empty(2, device="cpu")
    assert fake.device_asked(fake.DEVICE, (tensor,)) == torch.device("cpu")
    assert fake.device_asked(torch.ops.aten.neg.default, (tensor,)) is None
    assert fake.device_asked(fake.DEVICE, (torch.empty(2),)) is None
