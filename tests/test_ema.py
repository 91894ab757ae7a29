"""The average of the weights: what it is, sharded or not, in checkpoints and in what is exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2.checkpoint.sources.opening import opened
from fsdp2.config import Config, parse
from fsdp2.options.errors import ConfigError
from fsdp2.train import main
from fsdp2_tools.checkpoint.__main__ import main as checkpoint_command
from tests.harness import full_files, losses, same, small

Train = Callable[..., list[tuple[str, dict[str, Any]]]]

DECAY = 0.9


def exported(run: Path, out: Path, *flags: str) -> dict[str, Tensor]:
    assert checkpoint_command(["export", str(run), str(out), "--format=pt", *flags]) == 0
    state: dict[str, Tensor] = torch.load(out, weights_only=True)
    return state


@pytest.mark.parametrize(
    ("n", "way"), [(3, []), (2, ["--strategy=ddp"]), (2, ["--replicas=2"]), (2, ["--cpu-offload"])]
)
def test_it_is_the_average_of_the_weights_of_each_step(train: Train, tmp_path: Path, n: int, way: list[str]) -> None:
    # On three ranks, shards are uneven. A step's weights are those that a checkpoint after it holds.
    train(f"--ema={DECAY}", *way, "--checkpoint-every=1", "--keep=9", n=n, steps=4)
    run = tmp_path / "run"
    with opened(str(run / "checkpoints" / "step-00000001")) as source:
        names = [name.removeprefix("app.model.") for name in source.tensors if name.startswith("app.model.")]
        first = {name: source.read(f"app.ema.{name}") for name in names}
        # The average began with the initial weights, one step before.
        weights = {name: source.read(f"app.model.{name}") for name in names}
    assert not same(first, weights)
    expected = first
    for step in (2, 3, 4):
        with opened(str(run / "checkpoints" / f"step-{step:08d}")) as source:
            expected = {
                name: average.lerp(source.read(f"app.model.{name}"), 1 - DECAY) for name, average in expected.items()
            }
    assert same(exported(run, tmp_path / "ema.pt", "--ema"), expected)
    assert same(exported(run, tmp_path / "plain.pt"), full_files(run)[0])


def test_it_changes_no_loss_and_goes_on_as_if_nothing_had_happened(train: Train, tmp_path: Path) -> None:
    plain = train(run="plain", steps=4)
    whole = train(f"--ema={DECAY}", run="whole", steps=4)
    assert losses(whole) == losses(plain)
    train(f"--ema={DECAY}", run="cut", steps=2)
    train(f"--ema={DECAY}", run="cut", steps=4)
    states = [exported(tmp_path / name, tmp_path / f"{name}.pt", "--ema") for name in ("whole", "cut")]
    assert same(*states)


@pytest.mark.parametrize("of", ["run", "weights"])
def test_it_begins_with_the_weights_of_an_import(train: Train, tmp_path: Path, of: str) -> None:
    # In the one checkpoint there is an optimizer beside the weights, in the other none.
    train(run="old", steps=2)
    exported(tmp_path / "old", tmp_path / "weights.pt")
    place = tmp_path / ("old" if of == "run" else "weights.pt")
    assert checkpoint_command(["import", str(place), str(tmp_path / "imported")]) == 0
    train(f"--ema={DECAY}", f"--resume={tmp_path / 'imported'}", run="new", steps=1)
    begun, after = torch.load(tmp_path / "weights.pt"), exported(tmp_path / "new", tmp_path / "plain.pt")
    expected = {name: average.lerp(after[name], 1 - DECAY) for name, average in begun.items()}
    assert same(exported(tmp_path / "new", tmp_path / "ema.pt", "--ema"), expected)


def test_what_has_none_cannot_give_one(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(steps=1)
    assert checkpoint_command(["export", str(tmp_path / "run"), str(tmp_path / "x.pt"), "--format=pt", "--ema"]) == 2
    assert "holds no average of the weights" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"--ema 0\.9: .* or end there"):
        main(parse(small(tmp_path / "run", "--ema=0.9")))


def test_where_there_can_be_none() -> None:
    with pytest.raises(ConfigError, match="--ema with --strategy zero3"):
        Config(strategy="zero3", ema=0.9)
    with pytest.raises(ConfigError, match=r"--ema 1\.0: "):
        Config(ema=1.0)
