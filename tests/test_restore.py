"""What is restored beside the usual: frozen and unused parameters, a user's own objects, weights that fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.restore import restore
from fsdp2.checkpoint.state import AppState, RandomState
from fsdp2.checkpoint.store import Store
from fsdp2.config import Config, parse
from fsdp2.options.errors import ConfigError
from fsdp2.parallel.engine import Engine
from fsdp2.parallelize import parallelize
from fsdp2.train import main
from fsdp2_tools.checkpoint.import_ import import_
from tests.harness import (
    FROM_NOTHING,
    SMALL,
    Ranks,
    full_files,
    losses,
    make_engine,
    of_kind,
    one_step,
    same,
    save,
    small,
)

Events = list[tuple[str, dict[str, Any]]]
Train = Callable[..., Events]


class Partly(nn.Module):
    """A model of which one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def _partly() -> Engine:
    def set_weights(model: nn.Module) -> None:
        for number, parameter in enumerate(model.parameters()):
            nn.init.constant_(parameter, 0.1 * (number + 1))

    return parallelize(
        Config(),
        build=Partly,
        blocks_of=lambda model: list(model.children()),
        set_weights=set_weights,
        device=torch.device("cpu"),
        world_size=dist.get_world_size(),
    )


def _step(engine: Engine) -> None:
    engine.model(torch.ones(2, 4)).sum().backward()
    engine.step()


def _app(engine: Engine) -> AppState:
    return AppState(engine.model, engine.optimizer, {"rng": RandomState(dist.get_rank(), torch.device("cpu"))})


def _optimizer_state(engine: Engine) -> dict[str, dict[str, Tensor]]:
    """Local tensors by parameter name, read from the optimizer itself."""
    return {
        name: {
            key: (value.to_local() if hasattr(value, "to_local") else value).clone()
            for key, value in engine.optimizer.state[parameter].items()
        }
        for name, parameter in engine.model.named_parameters()
    }


def _frozen_and_unused(frozen_again: bool, folder: Path) -> tuple[Any, Any]:
    store = Store(LocalFiles(folder))
    engine = _partly()
    _step(engine)
    engine.model.get_parameter("first.weight").requires_grad_(False)  # in the middle, as in staged fine-tuning
    engine.model.get_parameter("first.bias").requires_grad_(False)
    _step(engine)
    save(store, _app(engine), 1)
    again = _partly()
    if frozen_again:
        again.model.get_parameter("first.weight").requires_grad_(False)
        again.model.get_parameter("first.bias").requires_grad_(False)
    restore(store.checkpoint(1), _app(again))
    assert again.model.get_parameter("first.weight").requires_grad is not frozen_again
    return _optimizer_state(engine), _optimizer_state(again)


@pytest.mark.parametrize("frozen_again", [True, False])
def test_optimizer_state_of_frozen_and_unused_parameters_is_restored(
    ranks: Ranks, tmp_path: Path, frozen_again: bool
) -> None:
    # https://github.com/pytorch/pytorch/issues/192202: torch drops it for what is frozen at load.
    for saved, restored in ranks.run(_frozen_and_unused, frozen_again, tmp_path):
        assert same(saved, restored)
        steps = {name: float(state["step"]) for name, state in saved.items()}
        assert steps["first.weight"] == 1, "frozen after a step"
        assert steps["second.weight"] == 2
        assert steps["unused.weight"] == 0
        assert saved["first.weight"]["exp_avg"].abs().sum() > 0


def _by_group(groups: list[tuple[list[str], float]]) -> AppState:
    engine = _partly()
    named = dict(engine.model.named_parameters())
    engine.optimizer.param_groups.clear()
    for names, decay in groups:
        engine.optimizer.add_param_group({"params": [named[name] for name in names], "weight_decay": decay})
    return _app(engine)


WEIGHTS, BIASES = ([f"{name}.{kind}" for name in ("first", "second", "unused")] for kind in ("weight", "bias"))


def _grouped_again(folder: Path, *groups: tuple[list[str], float]) -> Any:
    """The weight decays after a restore into an optimizer with other groups, and what is refused."""
    store = Store(LocalFiles(folder))
    save(store, _by_group([(WEIGHTS, 0.1), (BIASES, 0.0)]), 1)
    app = _by_group(list(groups))
    try:
        restore(store.checkpoint(1), app)
    except ValueError as error:
        return str(error)
    return [group["weight_decay"] for group in app.optimizer.param_groups]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([(BIASES, 0.5), (WEIGHTS, 0.5)], [0.0, 0.1]),
        # Torch would give the first group the decay of either.
        ([([*WEIGHTS[:2], BIASES[2]], 0.5), ([*BIASES[:2], WEIGHTS[2]], 0.5)], "in one group"),
        ([([*WEIGHTS, BIASES[0]], 0.5), (BIASES[1:], 0.5)], "in one group"),
    ],
)
def test_an_optimizers_settings_go_with_their_parameters(
    ranks: Ranks, tmp_path: Path, groups: Any, expected: Any
) -> None:
    for found in ranks.run(_grouped_again, tmp_path, *groups):
        assert found == expected or (isinstance(expected, str) and expected in found)


class Average:
    """A user's own object: a running average of the loss, and how often it was updated."""

    def __init__(self) -> None:
        self.value, self.count = torch.zeros(()), 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.count = state["value"], state["count"]


def _with_average(line: list[str], name: str) -> Any:
    average = Average()

    def on_event(kind: str, data: dict[str, Any]) -> None:
        if kind == "train":
            average.value = 0.9 * average.value + 0.1 * data["loss"]
            average.count += 1

    try:
        main(parse(line), on_event, {name: average})
    except (ValueError, ConfigError) as error:
        return str(error)
    return float(average.value), average.count


def test_a_users_own_object_is_saved_and_restored(ranks: Ranks, train: Train, tmp_path: Path) -> None:
    flags = SMALL
    run, whole = f"--run-dir={tmp_path / 'run'}", f"--run-dir={tmp_path / 'whole'}"
    expected = ranks.run(_with_average, [*flags, whole, "--max-steps=6"], "average")
    ranks.run(_with_average, [*flags, run, "--max-steps=3"], "average")
    assert ranks.run(_with_average, [*flags, run, "--max-steps=6"], "average") == expected
    assert expected[0][1] == 6
    # A run that doesn't know it would lose it.
    forgotten = ranks.run(_with_average, [*flags, run, "--max-steps=7"], "other")[0]
    assert "app.average.count: in the checkpoint, and nothing to load it into" in forgotten
    assert "app.other.count: not in the checkpoint" in forgotten
    taken = ranks.run(_with_average, [*flags, run, "--max-steps=7"], "scheduler")[0]
    assert "scheduler is a part of each checkpoint already" in taken


def test_a_partial_resume_takes_weights_and_says_what_it_left(train: Train, tmp_path: Path) -> None:
    train(run="first", steps=4)
    checkpoint = tmp_path / "first" / "checkpoints" / "step-00000004"
    # Another optimizer and seed than a strict resume allows; the weights are as --init-from would give them.
    flags = ["--optimizer=sgd", "--seed=5", *FROM_NOTHING]
    events = train(*flags, f"--resume={checkpoint}", "--resume-partial", run="second", steps=3)
    file = tmp_path / "first" / "full_model" / "full-model.pt"
    assert losses(events) == losses(train(*flags, f"--init-from={file}", run="third", steps=3))
    start = of_kind(events, "start")[0]
    assert start["loaded"] == len(full_files(tmp_path / "first")[0])
    parts = [line.split(":")[0] for line in start["left_out"]]
    assert parts == ["batches", "optim", "progress", "rng", "scheduler"]


def test_a_partial_resume_of_another_model_names_each_tensor(train: Train, tmp_path: Path) -> None:
    train(run="first", steps=2)
    start = of_kind(
        train(
            f"--resume={tmp_path / 'first'}",
            "--resume-partial",
            "--model-size=seed",
            "--batch-size=4",
            steps=1,
            run="2",
        ),
        "start",
    )[0]
    left = "\n".join(start["left_out"])
    assert start["loaded"] >= 1, "biases of the classifier have the same shape"
    assert "class_token: torch.float32 (1, 1, 32) in the checkpoint, torch.float32 (1, 1, 128) here" in left
    assert ": not in the checkpoint" in left


def test_a_partial_resume_of_which_nothing_fits_is_refused(ranks: Ranks, train: Train, tmp_path: Path) -> None:
    train("--model=cnn", run="first", steps=1)
    line = small(tmp_path / "second", "--max-steps=1")
    for message in ranks.run(_refusal, [*line, f"--resume={tmp_path / 'first'}", "--resume-partial"]):
        assert message.startswith("--resume-partial: no tensor of")


def _refusal(line: list[str]) -> str:
    try:
        main(parse(line))
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_a_partial_resume_of_an_own_step_begins_anew(train: Train, tmp_path: Path) -> None:
    train(steps=4)
    events = train("--resume=4", "--resume-partial", "--lr=0.01", steps=2)
    assert [step["step"] for step in of_kind(events, "train")] == [1, 2]
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000002", "superseded-1-step-00000004"]


def test_keep_every_keeps_the_multiples_too(train: Train, tmp_path: Path) -> None:
    train("--checkpoint-every=1", "--keep=2", "--keep-every=3", steps=8)
    assert Store(LocalFiles(tmp_path / "run" / "checkpoints")).committed() == [3, 6, 7, 8]


@pytest.mark.parametrize("how", ["", "--async-checkpoint"])
def test_keep_best_keeps_that_of_the_lowest_loss(train: Train, tmp_path: Path, how: str) -> None:
    flags = ["--checkpoint-every=1", "--eval-every=1", "--keep=1", "--keep-best", "--lr=0.3", *how.split()]
    losses = {one["step"]: one["loss"] for one in of_kind(train(*flags, steps=4), "eval")}
    losses |= {one["step"]: one["loss"] for one in of_kind(train(*flags, steps=6), "eval")}
    best = min(losses, key=lambda step: losses[step])
    assert best < 6, "the rate is too low for this test"
    assert Store(LocalFiles(tmp_path / "run" / "checkpoints")).committed() == [best, 6]


def _load_right_after_saving(flags: str, folder: Path) -> dict[str, bool]:
    """Save, train on, load in the same process, and in a fresh engine; the gradient scaler included."""
    engine = make_engine(flags)
    parts: dict[str, Any] = {"rng": RandomState(dist.get_rank(), torch.device("cpu")), "scaler": engine.scaler}
    app = AppState(engine.model, engine.optimizer, parts)
    store = Store(LocalFiles(folder))

    one_step(engine)
    engine.scaler.update(4096.0 if engine.scaler.is_enabled() else None)  # as after overflows
    save(store, app, 1)
    scale = engine.scaler.state_dict()
    expected = [one_step(engine) for _ in range(2)]
    restore(store.checkpoint(1), app)
    same_scale = engine.scaler.state_dict() == scale
    again = [one_step(engine) for _ in range(2)]
    fresh = make_engine(flags)
    restore(store.checkpoint(1), AppState(fresh.model, fresh.optimizer, {**parts, "scaler": fresh.scaler}))
    fresh_scale = fresh.scaler.state_dict() == scale
    return {
        "same losses": again == expected,
        "same scale": same_scale,
        "fresh losses": [one_step(fresh) for _ in range(2)] == expected,
        "fresh scale": fresh_scale,
    }


@pytest.mark.parametrize(
    "flags", ["", "--mixed-precision=fp16", "--strategy=fsdp1", "--strategy=fsdp1 --mixed-precision=fp16"]
)
def test_loading_right_after_saving(ranks: Ranks, tmp_path: Path, flags: str) -> None:
    # https://github.com/huggingface/accelerate/issues/3896: it fails in the session that has saved.
    # https://github.com/huggingface/accelerate/pull/4290: the gradient scaler comes back with another scale.
    for result in ranks.run(_load_right_after_saving, flags, tmp_path):
        assert result == dict.fromkeys(result, True)


class _Elsewhere:
    """As ZeRO keeps a state: the model that checkpoints see is another one, with values only while it is asked for."""

    def __init__(self, trained: nn.Module, seen: nn.Module) -> None:
        self.trained, self.seen = trained, seen

    def gather_state(self) -> None:
        self.seen.load_state_dict(self.trained.state_dict())

    def scatter_state(self) -> None:
        self.trained.load_state_dict(self.seen.state_dict())

    def release_state(self) -> None: ...


def _imported_into_another_form(place: str) -> Any:
    trained, seen = Partly(), Partly()
    app = AppState(seen, torch.optim.SGD(seen.parameters()), {}, _Elsewhere(trained, seen))
    restore(LocalFiles(Path(place)), app)
    return trained.state_dict()


def test_weights_alone_come_to_a_strategy_that_keeps_them_in_another_form(ranks: Ranks, tmp_path: Path) -> None:
    weights = Partly().state_dict()
    torch.save(weights, tmp_path / "weights.pt")
    import_(str(tmp_path / "weights.pt"), str(tmp_path / "imported"))
    for found in ranks.run(_imported_into_another_form, str(tmp_path / "imported"), ranks=1):
        assert all(torch.equal(found[name], weights[name]) for name in weights)
