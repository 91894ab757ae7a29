"""`--checkpoint-every never`: a run that is measured leaves what was measured, and nothing that takes a disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdp2.config import Config, parse
from fsdp2.options.errors import ConfigError
from fsdp2.report.console import Console
from fsdp2.run.preflight import preflight
from fsdp2.run.process.runtime import World
from fsdp2.run.trained import open_run
from fsdp2.train import main
from tests.harness import Ranks, full_files, losses, of_kind, same, small
from tests.test_nonfinite import _overflows_by_itself

Events = list[tuple[str, dict[str, Any]]]
NEVER = "--checkpoint-every=never"
TWO = World(rank=0, world_size=2, local_rank=0, local_world_size=2)


def test_it_trains_alike_and_leaves_no_checkpoint(
    train: Callable[..., Events], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(run="whole", steps=4)
    for time in ("the first", "the second"):  # there is nothing to go on from, so the same command begins again
        events = train(NEVER, steps=4)
        assert losses(events) == losses(whole), time
        assert of_kind(events, "start"), time
        assert of_kind(events, "checkpoint") == []
        (end,) = of_kind(events, "end")
        assert (end["reason"], end["left"]) == ("finished", None)
        assert of_kind(events, "eval") == of_kind(whole, "eval")
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", "config.json", "metrics.jsonl"]
    Console(0, 1, 1)("end", end)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "no checkpoint and no model is written, as --checkpoint-every never asks"
    with (
        pytest.raises(ConfigError, match=r"has no full-model.pt, .*--checkpoint-every never left nothing"),
        open_run(tmp_path / "run"),
    ):
        pass

    # The model is written if it is asked for.
    (end,) = of_kind(train(NEVER, "--save-model", run="model", steps=4), "end")
    assert end["left"] == "full model"
    assert same(full_files(tmp_path / "model"), full_files(tmp_path / "whole"))
    assert not (tmp_path / "model" / "checkpoints").exists()

    # What a run that saves has left would be lost with it.
    run, newest = tmp_path / "whole", tmp_path / "whole" / "checkpoints" / "step-00000004"
    for resume in ("auto", "never", "4"):
        never = Config(run_dir=str(run), checkpoint_every="never", resume=resume)
        refusal = rf"--checkpoint-every never: .*with --resume {newest} to"
        with pytest.raises(ConfigError, match=refusal), preflight(never, TWO).hold:
            pass
    assert newest.exists()
    begun = train(NEVER, f"--resume={newest}", run="further", steps=6)
    assert losses(begun) == losses(train(run="whole"))


def _stopped(line: list[str]) -> Events:
    events: Events = []

    def on_event(kind: str, data: dict[str, Any]) -> None:
        events.append((kind, data))
        if kind == "train" and data["step"] == 2 and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    main(parse(line), on_event)
    return events


def test_a_stop_signal_is_told_that_nothing_is_saved(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = ranks.run(_stopped, small(tmp_path / "run", NEVER, "--max-steps=50"))[0]
    (end,) = of_kind(events, "end")
    assert (end["reason"], end["left"]) == ("SIGTERM", None)
    assert 2 < end["step"] < 50
    assert not (tmp_path / "run" / "checkpoints").exists()
    Console(0, 1, 1)("end", end)
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith(f"SIGTERM: stopped at step {end['step']} after ")
    assert first.endswith("; nothing is saved, as --checkpoint-every never asks")
    assert not any("next:" in line for line in others), "nothing is there to go on with"


def test_weights_that_the_last_update_breaks_end_it_all_the_same(ranks: Ranks, tmp_path: Path) -> None:
    line = small(tmp_path / "run", NEVER, "--save-model", "--max-steps=2")
    for message, _, _ in ranks.run(_overflows_by_itself, line):
        assert message.startswith("step 2: the weights hold NaN or infinity; nothing was saved after it; there is no ")
    assert not (tmp_path / "run" / "full_model").exists()


@pytest.mark.parametrize(
    "flag",
    [
        "--async-checkpoint",
        "--memory-checkpoint",
        "--keep=5",
        "--keep-every=9",
        "--keep-best",
        "--on-checkpoint-failure=continue",
    ],
)
def test_flags_about_checkpoints_are_refused_with_it(flag: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{flag.replace('=', ' ').replace(' 9', '')} with --checkpoint-every never: "
    ):
        parse([NEVER, flag])


def test_what_measures_saves_takes_none_away() -> None:
    from fsdp2_tools.compare.__main__ import main as compare

    with pytest.raises(ConfigError, match="--checkpoint-every never: a comparison measures saves"):
        compare([NEVER])
