"""What accelerate, Lightning and Composer write is found out and converted."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from fsdp2.checkpoint.sources.opening import opened
from migration.checkpoints.detect import look
from tests.harness import Ranks, same
from tests.migrate.checkpoints import writers
from tests.migrate.checkpoints.conftest import Cli
from tests.migrate.checkpoints.fsdp1 import STEPS, resume_fsdp2

WRITER = {"accelerate": "accelerate", "lightning": "Lightning", "fabric": "Lightning", "composer": "Composer"}
LEFT = {
    "accelerate-sharded": ["scheduler.bin: last_epoch, 1 entries", "random_states_0.pkl"],
    "accelerate-full": [],
    "accelerate-without-dcp": [],
    "lightning-sharded": ["meta.pt: hyper_parameters, 1 entries", "meta.pt: loops, 1 entries"],
    "lightning-full": ["hyper_parameters, 1 entries", "lr_schedulers, 1 entries"],
    "fabric-sharded": ["meta.pt: step, 1 entries"],
    "composer-sharded": ["state.timestamp, 2 entries", "state.schedulers, 1 entries", "rng, 1 entries"],
}


@pytest.fixture(scope="module")
def layouts(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("layouts")
    return folder, ranks.run(writers.save_layouts, folder)[0]


def content(place: Path) -> dict[str, object]:
    with opened(str(place)) as source:
        return {name: source.read(name) for name in (*source.tensors, *source.values) if not name.endswith(".params")}


@pytest.fixture(scope="module")
def reference() -> dict[str, object]:
    return {}


@pytest.mark.parametrize("name", writers.LAYOUTS)
def test_a_layout_is_found_out_and_converted(
    ranks: Ranks,
    layouts: tuple[Path, list[float]],
    reference: dict[str, object],
    cli: Cli,
    tmp_path: Path,
    name: str,
) -> None:
    folder, losses = layouts
    source = folder / name / "last.ckpt" if name == "lightning-full" else folder / name
    status, printed = cli(source, tmp_path / "out")
    assert status == 0, printed
    assert f" of {WRITER[name.split('-')[0]]}" in printed
    assert "32 tensors of a model, optimizer state of 32 parameters in 2 groups; step 3" in printed
    for line in LEFT[name]:
        assert f"left out: {line}" in printed
    converted = content(tmp_path / "out")
    if not reference:
        assert ranks.run(resume_fsdp2, str(tmp_path / "out"), 2)[0][0] == losses
        reference.update(converted)
    assert same(converted, reference)


def shape_of(place: Path) -> object:
    """Files, keys, shapes and dtypes."""
    with ExitStack() as stack:
        found = look(place, stack)
        return (
            found.writer,
            found.kind,
            {
                piece.label: {
                    path: None if e.meta is None else (e.meta.shape, e.meta.dtype) for path, e in piece.tree.items()
                }
                for piece in found.pieces
                if piece.label not in ("scheduler.bin",)
            },
        )


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate isn't installed")
@pytest.mark.parametrize("name", ["accelerate-sharded", "accelerate-without-dcp"])
def test_accelerates_own_code_writes_the_same(
    ranks: Ranks, layouts: tuple[Path, list[float]], reference: dict[str, object], cli: Cli, tmp_path: Path, name: str
) -> None:
    ranks.run(writers.by_accelerate, tmp_path)
    assert shape_of(tmp_path / name) == shape_of(layouts[0] / name)
    assert cli(tmp_path / name, tmp_path / "out")[0] == 0
    assert same(content(tmp_path / "out"), reference)


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning isn't installed")
def test_lightnings_own_code_writes_the_same(
    ranks: Ranks, layouts: tuple[Path, list[float]], reference: dict[str, object], cli: Cli, tmp_path: Path
) -> None:
    ranks.run(writers.by_lightning, tmp_path)
    assert shape_of(tmp_path / "fabric-sharded") == shape_of(layouts[0] / "fabric-sharded")
    assert torch.load(tmp_path / "fabric-sharded" / "meta.pt", weights_only=True) == {"step": STEPS}
    assert cli(tmp_path / "fabric-sharded", tmp_path / "out")[0] == 0
    assert same(content(tmp_path / "out"), reference)
