"""Runs at a URL, as tests start them and look at what they leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp2.config import Config
from fsdp2.options.errors import ConfigError
from fsdp2.run.preflight import preflight
from fsdp2.run.process.runtime import World
from tests.remote.s3 import surroundings

Events = list[tuple[str, dict[str, Any]]]
Run = Callable[..., list[tuple[Events, str | None]]]

ONE = World(0, 1, 0, 1)


def main_at(environment: dict[str, str], folder: Path, flags: list[str]) -> tuple[Events, str | None]:
    """`fsdp2.train` in another environment and folder; this rank's events, and the error that ended it."""
    from fsdp2.config import parse
    from fsdp2.train import main
    from fsdp2_extra.remote import files as remote

    remote.FIRST_PAUSE_SECONDS = 0.05
    events: Events = []
    with surroundings(environment, folder):
        try:
            main(parse(flags), lambda kind, data: events.append((kind, data)))
        except (RuntimeError, ConfigError) as error:
            return events, f"{type(error).__name__}: {error}"
    return events, None


def good(results: list[tuple[Events, str | None]]) -> Events:
    """Rank 0's events of a run that went well on every rank."""
    assert [error for _, error in results] == [None] * len(results)
    return results[0][0]


def refusal(url: str, world: World = ONE, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight(Config(run_dir=url, model_size="tiny", **flags), world)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def folder_of(machine: Path) -> Path:
    (folder,) = (machine / "runs").iterdir()
    return folder


def steps_in(content: bytes) -> list[int]:
    records = [json.loads(line) for line in content.splitlines()]
    return [record["step"] for record in records if record["kind"] == "train"]


def other_lease(**more: Any) -> bytes:
    """What another process would have written as its lease."""
    return json.dumps({"id": "other", "host": "elsewhere", "pid": 7, "seconds": 0.5, "beat": 1, **more}).encode()
