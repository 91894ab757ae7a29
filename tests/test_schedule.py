"""Learning rates over a run, Adam's settings, and which parameters decay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from fsdp2.config import SCHEDULES, Config, parse
from fsdp2.options.errors import ConfigError
from fsdp2.run import schedule
from fsdp2.run.resuming import length_before
from fsdp2.run.schedule import Length, Schedule, course
from tests.harness import LEAVES_NOTHING, Ranks, full_files, losses, main_in_ranks, of_kind, same, small

Train = Callable[..., list[tuple[str, dict[str, Any]]]]


def place(samples: int, samples_per_step: int = 1, *, epoch: int = 0, position: int = 0) -> Any:
    """A place in the data, see `Batches`."""
    return SimpleNamespace(split=range(samples), global_batch=samples_per_step, epoch=epoch, position=position)


def factor(config: Config, step: int, steps_per_epoch: int) -> float:
    """Of a run that nothing interrupts."""
    whole = course(Length(config.epochs, config.max_steps, 1), place(steps_per_epoch), 0, 0)
    return schedule.factor(config, step, whole)


def rates(config: Config, steps: int, steps_per_epoch: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.lr)
    one, found = Schedule(config, optimizer, place(steps_per_epoch)), []
    one.go_on(0, None)
    for step in range(1, steps + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        one.after_step()
        if step % steps_per_epoch == 0:
            one.after_epoch()
    return found


def test_by_default_the_rate_falls_after_each_epoch() -> None:
    assert rates(Config(gamma=0.5, lr=1.0), 6, 2) == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


def test_each_schedule_warms_up_and_ends_at_its_floor() -> None:
    flags = {"warmup_steps": 4, "lr": 1.0, "max_steps": 12, "lr_floor": 0.1}
    assert {*SCHEDULES} == {"step", "cosine", "linear", "constant"}  # each below
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


def test_a_run_that_ends_within_its_warm_up_is_refused() -> None:
    assert rates(Config(warmup_steps=7, epochs=2, lr=8.0), 8, 4)[:8] == [1, 2, 3, 4, 5, 6, 7, 8 * 0.85]
    for flags in ({"epochs": 2}, {"epochs": 9, "max_steps": 8}):
        with pytest.raises(ConfigError, match="--warmup-steps 8: the run ends after step 8, before its learning rate"):
            rates(Config(warmup_steps=8, lr=1.0, **flags), 8, 4)  # type: ignore[arg-type]
    # On more ranks a run that is past its warm-up has fewer steps in all.
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    later = Schedule(Config(warmup_steps=8, epochs=4, lr=1.0), optimizer, place(8, 4, epoch=3))
    later.scheduler.last_epoch = 12
    later.go_on(12, None)


def test_epochs_say_how_long_the_run_is_where_no_steps_do() -> None:
    config = Config(schedule="linear", epochs=2, lr=1.0)
    assert rates(config, 8, 4) == pytest.approx([1 - step / 8 for step in range(8)])


def _whole(flags: list[str], steps: int, decays: Callable[[nn.Parameter], bool]) -> dict[str, torch.Tensor]:
    """The same training by torch's own AdamW on the whole model, in this process."""
    from fsdp2.models.initial import reset_parameters
    from fsdp2.run.dataset import load_data, training_batches
    from fsdp2.run.process.runtime import World

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
    batches = training_batches(config, load_data(config, world), world, torch.device("cpu"))
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
    ddp = train(*flags, "--max-steps=6", "--strategy=ddp", *LEAVES_NOTHING, run="ddp")
    assert losses(ddp) == losses(straight)
    lr = [event["lr"] for event in of_kind(straight, "train")]
    assert lr == [factor(parse([*flags, "--max-steps=6"]), step, 100) * 1e-3 for step in range(6)]
    # Stopped after its third step by what is no end of the schedule, and gone on with.
    train(*flags, "--max-steps=6", "--checkpoint-every=3", "--no-save-model", run="whole")
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


def _rates(events: list[tuple[str, dict[str, Any]]]) -> list[float]:
    return [event["lr"] for event in of_kind(events, "train")]


# The digits are 1437 samples for training: three steps of up to 480 an epoch.
@pytest.mark.parametrize(
    ("flags", "first", "longer", "line"),
    [
        ("--schedule=cosine", "--max-steps=2", "--max-steps=5", "this run ends at step 5, and was to end at step 2"),
        ("--schedule=linear --lr-floor=0.1", "--max-steps=3", "--max-steps=5", "step 5, and was to end at step 3"),
        ("--schedule=cosine --warmup-steps=3", "--max-steps=4", "--max-steps=6", "step 6, and was to end at step 4"),
        ("--schedule=cosine", "--epochs=1", "--epochs=2", "this run ends at step 6, and was to end at step 3"),
        ("--schedule=constant --warmup-steps=3", "--max-steps=4", "--max-steps=5", None),
        ("--schedule=constant --warmup-steps=0.5", "--max-steps=2", "--max-steps=5", "5, and was to end at step 2"),
        ("--schedule=step --gamma=0.5", "--epochs=1", "--epochs=2", None),
        ("--schedule=step --gamma=0.5 --warmup-steps=1", "--epochs=1", "--epochs=2", None),
    ],
)
def test_a_run_made_longer_has_the_rates_of_an_uninterrupted_one(
    train: Train, flags: str, first: str, longer: str, line: str | None
) -> None:
    always = [*flags.split(), "--global-batch-size=480", "--no-save-model"]
    whole = train(*always, longer, "--checkpoint-every=never", run="whole", n=1, steps=None)
    done = len(_rates(train(*always, first, run="cut", n=1, steps=None)))
    rest = train(*always, longer, run="cut", n=1, steps=None)
    assert _rates(rest) == _rates(whole)[done:]
    (resumed,) = of_kind(rest, "resume")
    assert line is None or line in str(resumed["note"])
    if line is None:  # nothing but the length of the run has changed, and the rates don't follow from it
        assert resumed["note"] in (None, "from here on --epochs 2 (before: 1)")


def test_a_run_that_goes_on_unchanged_says_nothing_of_its_length(train: Train) -> None:
    always = ["--schedule=cosine", "--no-save-model", "--max-steps=4", "--checkpoint-every=2"]
    train(*always, run="run", n=1, steps=None)
    rest = train(*always, "--resume=2", run="run", n=1, steps=None)
    assert "ends at" not in str(of_kind(rest, "resume")[0]["note"])


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_with_another_batch_a_schedule_ends_with_the_run(train: Train, name: str) -> None:
    always = [f"--schedule={name}", "--no-save-model", "--epochs=2"]
    train(*always, "--global-batch-size=480", "--checkpoint-every=1", "--max-steps=2", run="run", n=1, steps=None)
    rest = train(*always, "--batch-size=120", run="run", n=2, steps=None)
    # 960 of 1437 samples are done. Two steps of up to 240 end the epoch, and the next one has six.
    whole = parse([f"--schedule={name}", "--max-steps=10"])
    assert _rates(rest) == [1e-3 * factor(whole, step, 100) for step in range(2, 10)]
    note = of_kind(rest, "resume")[0]["note"]
    assert "240 samples a step from here on, and 480 before" in note
    assert f"--schedule {name}: this run ends at step 10, and was to end at step 2; from here on it has" in note


def test_gamma_counts_epochs_where_a_step_has_become_smaller() -> None:
    config = Config(gamma=0.5, warmup_steps=1, epochs=4)
    # Of 12 samples an epoch: one epoch of 3 steps and a step of 4 samples are done, and the rest are of 2.
    after = course(Length(4, None, 2), place(12, 2, epoch=1, position=4), 4, 4)
    assert [schedule.factor(config, step, after) for step in range(4, 15)] == [0.5] * 4 + [0.25] * 6 + [0.125]
    assert after.total == 4 + 4 + 6 + 6
    # Stopped when the epoch's last sample was done, before the next one began.
    ended = course(Length(4, None, 2), place(12, 2, epoch=1, position=12), 6, 6)
    assert [schedule.factor(config, step, ended) for step in (6, 11, 12)] == [0.25, 0.25, 0.125]


def test_a_rate_or_a_count_that_is_not_of_the_schedule_is_told() -> None:
    """What a checkpoint says of them, others may have written."""

    def restored(config: Config, **state: Any) -> Schedule:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.lr)
        one = Schedule(config, optimizer, place(4, epoch=2))
        one.scheduler.last_epoch = state["last_epoch"]
        optimizer.param_groups[0]["lr"] = state.get("lr", config.lr)
        return one

    config, before = Config(gamma=0.7, lr=1.0, epochs=4), Length(4, None, 1)
    assert restored(config, last_epoch=3, lr=1.0 * 0.7 * 0.7 * 0.7).go_on(12, before) is None
    said = restored(config, last_epoch=3, lr=300.0).go_on(12, before)
    assert said == "--schedule step goes on from the checkpoint's learning rate 300; another begins with --lr"
    several = restored(config, last_epoch=0)
    several.scheduler.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.3})
    several.scheduler.base_lrs.append(config.lr)
    assert str(several.go_on(0, before)).startswith(
        "--schedule step goes on from the checkpoint's learning rate 0.3, 1;"
    )
    cosine = Config(schedule="cosine", epochs=4)
    assert restored(cosine, last_epoch=8).go_on(8, before) is None
    assert restored(cosine, last_epoch=0).go_on(8, before) == (
        "--schedule cosine: it counts 0 of the 8 steps that are done"
    )
    with pytest.raises(ConfigError, match="schedule counts 4611686018427387904 steps, and its run has done 8"):
        restored(cosine, last_epoch=2**62).go_on(8, before)


@pytest.mark.parametrize(
    "flags", [{}, {"epochs": 2, "batch-size": "x", "grad-accumulation": 1}, {"epochs": 0, "global-batch-size": 4}]
)
def test_a_marker_that_says_no_length_is_not_asked_for_one(flags: dict[str, Any]) -> None:
    assert length_before({"config": flags, "world_size": 2}) is None
    assert length_before({"config": {**flags, "epochs": 3, "global-batch-size": 4}}) == (3, None, 4)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--betas=0.9", "must be two numbers"),
        ("--betas=0.9,1.0", "must both be below 1"),
        ("--betas=0.9,0.95 --optimizer=sgd", "has no betas"),
        ("--weight-decay=0.1", "use --optimizer adamw"),
        ("--weight-decay=0.1 --optimizer=adamw --strategy=fsdp1", "use --strategy fsdp2 or drop --weight-decay"),
        ("--lr-floor=0.1", "use cosine or linear"),
        ("--warmup-steps=5 --max-steps=5", "the run ends after step 5, before its learning rate is reached"),
        ("--schedule=cosin", "did you mean cosine"),
    ],
)
def test_bad_input_is_one_line(flags: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        parse(flags.split())
