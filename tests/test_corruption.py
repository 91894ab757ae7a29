"""Damage to a committed checkpoint is found and named, whatever it is, and sound ones raise no alarm."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from fsdp2.checkpoint.files import Files, LocalFiles
from fsdp2.checkpoint.state import AppState
from fsdp2.checkpoint.store import MARKER, DamagedCheckpoint, Store, verify
from tests.faults import MemoryFiles
from tests.harness import Ranks, loss_of, make_engine, save

DAMAGES = 2400

Tree = dict[str, bytes]


def _two_checkpoints(folder: str) -> None:
    engine = make_engine()
    app = AppState(engine.model, engine.optimizer, {})
    for step in (1, 2):
        engine.backward(loss_of(engine), last_microbatch=True)
        engine.step()
        save(Store(LocalFiles(folder)), app, step, info={"rank": dist.get_rank()}, keep=2)


@pytest.fixture(scope="module")
def checkpoints(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tree, Tree]:
    folder = tmp_path_factory.mktemp("corruption")
    ranks.run(_two_checkpoints, str(folder))
    one, two = (
        {path.name: path.read_bytes() for path in (folder / f"step-0000000{step}").iterdir()} for step in (1, 2)
    )
    return one, two


def _flip_a_bit(tree: Tree, other: Tree, name: str, generator: random.Random) -> list[str]:
    content = bytearray(tree[name])
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    tree[name] = bytes(content)
    return [name]


def _cut(tree: Tree, other: Tree, name: str, generator: random.Random) -> list[str]:
    tree[name] = tree[name][: generator.randrange(len(tree[name]))]
    return [name]


def _grow(tree: Tree, other: Tree, name: str, generator: random.Random) -> list[str]:
    tree[name] += generator.randbytes(generator.randint(1, 5000))
    return [name]


def _zero_a_page(tree: Tree, other: Tree, name: str, generator: random.Random) -> list[str]:
    content = tree[name]
    while True:
        start = generator.randrange(0, len(content), 512)
        zeroed = content[:start] + bytes(min(4096, len(content) - start)) + content[start + 4096 :]
        if zeroed != content:  # a page of zeros is no damage
            tree[name] = zeroed
            return [name]


def _swap_the_shards(tree: Tree, other: Tree, name: str, generator: random.Random) -> list[str]:
    tree["__0_0.distcp"], tree["__1_0.distcp"] = tree["__1_0.distcp"], tree["__0_0.distcp"]
    return ["__0_0.distcp", "__1_0.distcp"]


def _take_from_another_step(tree: Tree, other: Tree, name: str, generator: random.Random) -> list[str]:
    tree[name] = other[name]
    return [name]


def _lose(tree: Tree, other: Tree, name: str, generator: random.Random) -> list[str]:
    del tree[name]
    return [name]


def _mix_ranges(tree: Tree, other: Tree, name: str, generator: random.Random) -> list[str]:
    """Part of a file from the other step, as a torn overwrite leaves it."""
    length = min(len(tree[name]), len(other[name]))
    while True:
        start = generator.randrange(length)
        mixed = tree[name][:start] + other[name][start:length] + tree[name][length:]
        if mixed != tree[name]:
            tree[name] = mixed
            return [name]


Damage = Callable[[Tree, Tree, str, random.Random], list[str]]
KINDS: list[Damage] = [
    _flip_a_bit,
    _cut,
    _grow,
    _zero_a_page,
    _swap_the_shards,
    _take_from_another_step,
    _lose,
    _mix_ranges,
]


def _problem(tree: Tree, step: int) -> str:
    root: dict[str, Any] = {f"step-{step:08d}": tree}
    try:
        verify(Store(cast(Files, MemoryFiles(root))).checkpoint(step))
    except DamagedCheckpoint as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_damage_is_found_and_named(checkpoints: tuple[Tree, Tree], kind: Damage) -> None:
    generator = random.Random(kind.__name__)
    for _ in range(DAMAGES // len(KINDS)):
        step = generator.randint(1, 2)
        sound, other = checkpoints[step - 1], checkpoints[2 - step]
        tree = dict(sound)
        damaged = kind(tree, other, generator.choice(sorted(tree)), generator)
        if MARKER in damaged and MARKER not in tree:
            continue  # a dead save, which `tests/test_store.py` has
        problem = _problem(tree, step)
        assert problem, f"{kind.__name__} of {damaged} was not noticed"
        assert any(name in problem for name in damaged), problem
        assert all(name not in problem for name in set(sound) - set(damaged) - {MARKER}), problem


def test_a_whole_checkpoint_under_another_steps_name_is_found(checkpoints: tuple[Tree, Tree]) -> None:
    assert "it is of step 1" in _problem(checkpoints[0], 2)


def test_sound_checkpoints_raise_no_alarm(checkpoints: tuple[Tree, Tree], tmp_path: Path) -> None:
    for step, tree in enumerate(checkpoints, 1):
        for _ in range(50):
            assert _problem(dict(tree), step) == ""
        # Also where they were copied to, under another name.
        (tmp_path / f"copy{step}").mkdir()
        for name, content in tree.items():
            (tmp_path / f"copy{step}" / name).write_bytes(content)
        verify(LocalFiles(tmp_path / f"copy{step}"))
