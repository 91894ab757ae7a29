"""`fsdp2.train --doctor`: an examination before the run, which a bad finding keeps from starting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2.checkpoint.disk import bytes_of
from fsdp2.config import Config
from fsdp2.options.errors import ConfigError
from fsdp2.run.directory.host_memory import Sizes
from fsdp2.run.directory.room import checkpoints_at_once
from fsdp2_tools.doctor import examine
from tests.harness import Ranks, flip_a_bit, losses, main_in_ranks, small, small_mnist

Train = Callable[..., list[tuple[str, dict[str, Any]]]]


def test_a_fit_machine_trains_as_without(train: Train, tmp_path: Path) -> None:
    examined, plain = train("--doctor", steps=2), train(steps=2, run="plain")
    assert losses(examined) == losses(plain)
    assert not list(tmp_path.rglob(".doctor-*"))


def unfit(flags: list[str]) -> tuple[str, bool]:
    """The refusal, on each rank, if rank 1 runs another version; and whether a run was begun."""
    from fsdp2_tools.doctor import machine

    real = machine.measure

    def other(here: Any) -> Any:
        found = real(here)
        return found | {"same": found["same"] | ({"torch": "2.0"} if here.world.rank == 1 else {})}

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(examine.QUESTIONS, "machine", other)
        with pytest.raises(ConfigError) as refused:
            main_in_ranks(flags)
    return str(refused.value), any(Path(flags[-2].partition("=")[2]).rglob("config.json"))


def test_a_bad_finding_is_one_line_on_every_rank_and_nothing_is_begun(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(unfit, [*small(tmp_path / "run"), "--doctor"])
    assert first == second
    text, begun = first
    assert text.startswith("--doctor: torch: 2.0; expected: 2.")
    assert "rank 1 (" in text
    assert not begun


def with_other_data(folder: Path) -> str:
    root = folder / f"node{dist.get_rank()}"
    with pytest.raises(ConfigError) as refused:
        main_in_ranks(small(folder / "run", "--doctor", "--dataset=mnist", f"--data-root={root}"))
    return str(refused.value)


def test_data_that_differs_is_found_before_the_run(ranks: Ranks, tmp_path: Path) -> None:
    for node in range(2):
        file = small_mnist(tmp_path / f"node{node}")
    flip_a_bit(file)
    first, second = ranks.run(with_other_data, tmp_path)
    assert first == second
    assert first.startswith("--doctor: data: ")
    assert "rank 1 (" in first


def without_room(flags: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sizes, "saved", [torch.empty(10**17, device="meta")])
        with pytest.raises(ConfigError) as refused:
            main_in_ranks(flags)
    return str(refused.value)


def test_room_for_the_checkpoints_of_the_model_is_looked_for(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks.run(without_room, small(tmp_path / "run", "--doctor", "--max-steps=1")):
        assert "free space" in said
    weights, copies, kept = 4 * 1_006_090, 3, 4
    assert checkpoints_at_once(Config())[0] == kept
    assert bytes_of(Sizes(Config()).saved) == weights * copies
    head = 4 * (128 * 10 + 10)  # the only layer that has an optimizer's state
    frozen = Config(freeze=("[!h]*",))
    assert bytes_of(Sizes(frozen).saved) == weights + 2 * head
