"""Learning rates over a run, Adam's settings, and which parameters decay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from fsdp2.config import Config, parse
from fsdp2.options.errors import ConfigError
from fsdp2.run.schedule import Schedule, factor
from tests.harness import Ranks, full_files, losses, main_in_ranks, of_kind, same, small

Train = Callable[..., list[tuple[str, dict[str, Any]]]]


def rates(config: Config, steps: int, steps_per_epoch: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.lr)
    schedule, found = Schedule(config, optimizer, steps_per_epoch), []
    for step in range(1, steps + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.after_step()
        if step % steps_per_epoch == 0:
            schedule.after_epoch()
    return found


def test_by_default_the_rate_falls_after_each_epoch() -> None:
    assert rates(Config(gamma=0.5, lr=1.0), 6, 2) == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


def test_each_schedule_warms_up_and_ends_at_its_floor() -> None:
    flags = {"warmup_steps": 4, "lr": 1.0, "max_steps": 12, "lr_floor": 0.1}
    for name in ("cosine", "linear"):
        config = Config(schedule=name, **flags)  # type: ignore[arg-type]
        found = rates(config, 12, 100)
        assert found[:4] == [0.2, 0.4, 0.6, 0.8]
        assert found[4] == 1.0
        assert found[4:] == sorted(found[4:], reverse=True)
        assert factor(config, 12, 100) == pytest.approx(0.1)
        assert factor(config, 8, 100) == pytest.approx(0.55)  # half-way both are in the middle
        assert factor(config, 50, 100) == pytest.approx(0.1)
    constant = Config(schedule="constant", warmup_steps=4, lr=1.0)
    assert rates(constant, 7, 2) == [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0]
    assert rates(Config(warmup_steps=1, lr=1.0, gamma=0.5), 5, 2) == [0.5, 1.0, 0.5, 0.5, 0.25]


def test_epochs_say_how_long_the_run_is_where_no_steps_do() -> None:
    config = Config(schedule="linear", epochs=2, lr=1.0)
    assert rates(config, 8, 4) == pytest.approx([1 - step / 8 for step in range(8)])


def _whole(flags: list[str], steps: int, decays: Callable[[nn.Parameter], bool]) -> dict[str, torch.Tensor]:
    """The same training by torch's own AdamW on the whole model, in this process."""
    from fsdp2.models.initial import reset_parameters
    from fsdp2.run import start
    from fsdp2.run.runtime import World

    config = parse(flags)
    torch.set_num_threads(1)
    model = config.spec.build(config.model_size)
    reset_parameters(model, config.spec.initial_values, config.seed)
    groups = [
        {"params": [p for p in model.parameters() if decays(p)], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if not decays(p)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.8, 0.95), foreach=True)
    warm = LinearLR(optimizer, 1 / 3, 1.0, 2)
    world = World(0, 1, 0, 1)
    batches = start.training_batches(config, start.load_data(config, config.spec, world), world, torch.device("cpu"))
    for _, (batch,) in zip(range(steps), batches, strict=False):
        (config.spec.loss(model(batch.inputs), batch.targets) / batch.target_count).backward()
        optimizer.step()
        warm.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


ADAMW = ["--optimizer=adamw", "--weight-decay=0.3", "--betas=0.8,0.95", "--warmup-steps=2", "--schedule=constant"]


def test_norms_and_biases_do_not_decay(ranks: Ranks, tmp_path: Path) -> None:
    flags = small(tmp_path / "run", *ADAMW, "--max-steps=3", "--strategy=none", "--save-model")
    ranks.run(main_in_ranks, flags, ranks=1)
    (expected,) = ranks.run(_whole_of_ours, flags, ranks=1)
    model = full_files(tmp_path / "run")[0]
    # Rates that torch multiplies up from step to step differ in their last bits from those that are computed.
    assert all(torch.allclose(model[name], tensor, rtol=1e-6, atol=1e-7) for name, tensor in expected.items())


def _whole_of_ours(flags: list[str]) -> dict[str, torch.Tensor]:
    return _whole(flags, 3, lambda parameter: parameter.dim() > 1)


def test_strategies_agree_and_a_resume_on_other_ranks_goes_on(train: Train, tmp_path: Path) -> None:
    flags = [*ADAMW[:3], "--schedule=cosine", "--warmup-steps=2", "--global-batch-size=24"]
    straight = train(*flags, "--max-steps=6", run="straight")
    assert losses(train(*flags, "--max-steps=6", "--strategy=ddp", run="ddp")) == losses(straight)
    lr = [event["lr"] for event in of_kind(straight, "train")]
    assert lr == [factor(parse([*flags, "--max-steps=6"]), step, 100) * 1e-3 for step in range(6)]
    # Stopped after its third step by what is no end of the schedule, and gone on with.
    train(*flags, "--max-steps=6", "--checkpoint-every=3", run="whole")
    again = train(
        *flags, "--max-steps=6", f"--resume={tmp_path / 'whole' / 'checkpoints' / 'step-00000003'}", run="rest"
    )
    assert losses(again) == losses(straight)[3:]
    assert [event["lr"] for event in of_kind(again, "train")] == lr[3:]
    assert same(full_files(tmp_path / "rest"), full_files(tmp_path / "straight"))
    wider = train(
        *flags, "--max-steps=6", f"--resume={tmp_path / 'whole' / 'checkpoints' / 'step-00000003'}", n=3, run="3"
    )
    assert [event["lr"] for event in of_kind(wider, "train")] == lr[3:]


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--betas=0.9", "must be two numbers"),
        ("--betas=0.9,1.0", "must both be below 1"),
        ("--betas=0.9,0.95 --optimizer=sgd", "has no betas"),
        ("--weight-decay=0.1", "use --optimizer adamw"),
        ("--weight-decay=0.1 --optimizer=adamw --strategy=fsdp1", "use --strategy fsdp2 or drop --weight-decay"),
        ("--lr-floor=0.1", "use cosine or linear"),
        ("--warmup-steps=5 --max-steps=5", "lower the one or raise the other"),
        ("--schedule=cosin", "did you mean cosine"),
    ],
)
def test_bad_input_is_one_line(flags: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        parse(flags.split())
