"""How long a rank waits for another: in a step as --timeout says, and long at the start, in a save and at the end."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdp2.config import parse
from fsdp2.run import patience
from fsdp2.run.runtime import exit_status
from fsdp2.train import main
from tests.harness import Ranks, small

SECONDS = 3.0  # that rank 1 takes by itself, where --timeout is 2


class Slow:
    """A part of the state that rank 1 takes long to give, the first time."""

    def __init__(self) -> None:
        self.seconds = SECONDS

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            time.sleep(self.seconds)
        self.seconds = 0.0
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing is resumed here")


def _late(line: list[str], step: int, saving: bool) -> str:
    """How a run ends in which rank 1 comes late to a step, counted from 1, and perhaps to its save."""
    begun = time.monotonic()

    def on_event(kind: str, data: dict[str, Any]) -> None:
        # The record of a step comes one step late, so the one of step - 2 comes before the step begins.
        before_first = step == 1 and kind == "start"
        if dist.get_rank() == 1 and (before_first or (kind == "train" and data["step"] == step - 2)):
            time.sleep(SECONDS)

    try:
        end = main(parse(line), on_event, {"slow": Slow()} if saving else None)
    except RuntimeError as error:
        return str(error)
    assert time.monotonic() - begun > SECONDS
    return str(end["reason"])


def test_a_rank_that_is_late_in_a_step_ends_the_run(ranks: Ranks, tmp_path: Path) -> None:
    first, _ = ranks.run(_late, small(tmp_path / "run", "--timeout=2", "--max-steps=6", "--no-save-model"), 4, False)
    assert "Timed out waiting 2000ms" in first


def test_the_first_step_and_a_save_may_take_their_time(ranks: Ranks, tmp_path: Path) -> None:
    line = small(tmp_path / "run", "--timeout=2", "--max-steps=3", "--checkpoint-every=2")
    for reason in ranks.run(_late, line, 1, True):
        assert reason == "finished"


def test_what_a_user_sees_of_it(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(BaseException):
        pass

    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr("os._exit", end)
    with pytest.raises(Ended, match="1"), exit_status():
        raise RuntimeError("[unbound_buffer.cc:81] Timed out waiting 2000ms for recv operation to complete")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("fsdp2: rank 0 stopped because another rank kept it waiting")
    assert "--timeout" in line


def _seconds_in_vain() -> float:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    group = mesh.get_group("replicate")
    patience.set_timeout(timedelta(seconds=2), group)
    if dist.get_rank() == 1:
        time.sleep(SECONDS)
        return 0.0
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="Timed out waiting 2000ms"):
        dist.barrier(group)
    return time.monotonic() - begun


def test_torch_changes_the_timeout_of_a_group_that_exists(ranks: Ranks) -> None:
    assert ranks.run(_seconds_in_vain)[0] > 1.9
