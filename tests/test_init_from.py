"""Weights from a file: in another dtype, of another kind, vouched for or not, and with values that are no numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2 import models
from fsdp2.checkpoint import full_dcp, full_dtensor
from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.run.preflight import preflight
from fsdp2.run.process.runtime import World
from fsdp2_tools.checkpoint.export import export
from tests.harness import Ranks, flip_a_bit, losses, main_in_ranks, make_engine, of_kind, same, small

Train = Callable[..., list[tuple[str, dict[str, Any]]]]
APIS = {"dtensor": full_dtensor, "dcp": full_dcp}


def _loaded(file: Path, flags: str = "") -> list[Any]:
    """What each API makes of a file: the full model on rank 0, or why it was refused."""
    results: list[Any] = []
    for api in APIS.values():
        engine = make_engine(flags)
        try:
            api.load_full_model_state(engine.model, file)
            results.append(api.full_model_state(engine.model))
        except ValueError as error:
            results.append(str(error))
    return results


@pytest.mark.parametrize("flags", ["", "--strategy=ddp"])
def test_another_dtype_is_cast_before_it_is_sent(train: Train, ranks: Ranks, tmp_path: Path, flags: str) -> None:
    train("--no-save-model", *flags.split(), steps=2)
    for dtype in ("bf16", "fp16", "double"):
        file = tmp_path / f"{dtype}.pt"
        export(str(tmp_path / "run"), str(file), "pt", dtype=None if dtype == "double" else dtype)
        state = torch.load(file, weights_only=True)
        if dtype == "double":
            torch.save({name: value.double() for name, value in state.items()}, file)
        for loaded in ranks.run(_loaded, file, flags)[0]:
            assert same(loaded, {name: value.float() for name, value in state.items()})


def test_weights_to_start_from_beside_a_checkpoint_are_said_to_be_unread(train: Train, tmp_path: Path) -> None:
    train("--save-model", run="first", steps=1)
    file = tmp_path / "first" / "full_model" / "full-model.pt"
    train(f"--init-from={file}", run="second", steps=1)
    events = train(f"--init-from={file}", run="second", steps=2)
    assert f"--init-from {file}: isn't read, since the run goes on from " in str(events)


@pytest.mark.parametrize("api", ["", "--dcp-api"])
def test_a_run_starts_from_what_a_run_exported(train: Train, tmp_path: Path, api: str) -> None:
    train("--no-save-model", run="first", steps=2)
    export(str(tmp_path / "first"), str(tmp_path / "low.pt"), "pt", dtype="bf16")
    low = torch.load(tmp_path / "low.pt", weights_only=True)
    torch.save({name: value.float() for name, value in low.items()}, tmp_path / "cast.pt")
    trained = [
        losses(train(f"--init-from={tmp_path / file}", "--no-save-model", *api.split(), run=f"of-{file}", steps=2))
        for file in ("low.pt", "cast.pt")
    ]
    assert trained[0] == trained[1]


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.complex64])
def test_another_kind_of_numbers_is_refused_on_every_rank(ranks: Ranks, tmp_path: Path, kind: torch.dtype) -> None:
    state = models.get("vit").build("tiny").state_dict()
    torch.save({**state, "class_token": state["class_token"].to(kind)}, tmp_path / "full.pt")
    for messages in ranks.run(_loaded, tmp_path / "full.pt"):
        assert all(f"class_token: {kind} in the file, torch.float32 in the model" in text for text in messages)
    with pytest.raises(ConfigError, match=rf"--init-from .*class_token: {kind} in the file"):
        preflight(parse(small(tmp_path / "run", f"--init-from={tmp_path / 'full.pt'}")), World(0, 1, 0, 1))


def test_a_file_that_only_rank_0_finds_unreadable_ends_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "full.pt").write_bytes(b"no state dict")
    for messages in ranks.run(_loaded, tmp_path / "full.pt"):
        assert all("full.pt can't be read" in text for text in messages)


def test_what_vouches_for_the_file_is_said(train: Train, tmp_path: Path) -> None:
    train(run="first", steps=2)
    file = tmp_path / "first" / "full_model" / "full-model.pt"
    (tmp_path / "copy.pt").write_bytes(file.read_bytes())
    for path, verdict in ((file, "verified, step 2"), (tmp_path / "copy.pt", "unverified, since no marker")):
        note = of_kind(train(f"--init-from={path}", run=verdict[:4], steps=1), "start")[0]["note"]
        assert note.startswith(f"--init-from {path}: {verdict}")
    flip_a_bit(file)
    with pytest.raises(ConfigError, match=r"--init-from .* is damaged: .*full-model\.pt differs from what was"):
        preflight(parse(small(tmp_path / "run", f"--init-from={file}")), World(0, 1, 0, 1))


@pytest.mark.parametrize(("api", "value", "word"), [("", math.nan, "NaN"), ("--dcp-api", -math.inf, "infinity")])
def test_weights_that_are_no_numbers_are_called_so(
    ranks: Ranks, tmp_path: Path, api: str, value: float, word: str
) -> None:
    state = models.get("vit").build("tiny").state_dict()
    for name in ("class_token", "heads.head.bias"):
        state[name].view(-1)[-1] = value  # in the last rank's shard
    torch.save(state, tmp_path / "full.pt")
    line = small(tmp_path / "run", f"--init-from={tmp_path / 'full.pt'}", *api.split())
    for message in ranks.run(refusal, line):
        assert f"full.pt: holds {word}: 2 of {len(state)} tensors (class_token, heads.head.bias)" in message


def refusal(flags: list[str]) -> str:
    try:
        main_in_ranks(flags)
    except ConfigError as error:
        return str(error)
    return "not refused"
