"""Markers and folders that no save made: refused with the reason, nothing hangs, and nothing is deleted."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp2.checkpoint.files import LocalFiles, NotAFile
from fsdp2.checkpoint.refusal import LONGEST_REFUSAL
from fsdp2.checkpoint.sources.safetensors_files import INDEX
from fsdp2.checkpoint.store import HASH, MARKER, Store, _marker_bytes, read_marker
from fsdp2.config import Config
from fsdp2.infer import main as infer
from fsdp2.options.errors import ConfigError
from fsdp2.run.preflight import preflight
from fsdp2.run.process.runtime import World
from fsdp2.run.resuming import changed_batch, length_before
from tests.commands.common import Cli, change_metadata, flip
from tests.commands.conftest import cli as cli
from tests.hostile.common import checkpoint_of, vouch

pytestmark = pytest.mark.usefixtures("soon")


def refusal(run: Path, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight(Config(run_dir=str(run), model_size="tiny", max_steps=2, **flags), World(0, 2, 0, 2))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file below, and None for what is none."""
    found = {}
    for path in sorted(folder.rglob("*")):
        is_file = path.is_file() and not path.is_symlink() and path.name != ".lock"
        found[str(path.relative_to(folder))] = path.read_bytes() if is_file else None
    return {name: content for name, content in found.items() if name != ".lock"}


# --- what the marker is ------------------------------------------------------------------------------------


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the address of a socket is short
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(here)


def _large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 27)


def _rather_deep(path: Path) -> None:
    """What Python's json reads, and can't write."""
    marker: dict[str, Any] = {"step": 1, "files": {"a": {"size": 1, HASH: ""}}, HASH: ""}
    path.write_text(json.dumps(marker)[:-1] + ', "deep": ' + "[" * 700 + "]" * 700 + "}")


IN_ITS_PLACE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a folder": (Path.mkdir, "is a folder and no file"),
    "a pipe": (os.mkfifo, "is a pipe and no file"),
    "a socket": (_socket, "is a socket and no file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is a device and no file"),
    "a loop": (lambda path: path.symlink_to(path.name), "is a link that leads to itself"),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), "is a link to nothing"),
    "deep": (lambda path: path.write_text("[" * 100_000 + "]" * 100_000), "it is not JSON, 200000 bytes"),
    "rather deep": (_rather_deep, "COMMIT.json can't be read ("),
    "large": (_large, "it has 134217728 bytes, and no marker has more"),
}


@pytest.mark.parametrize("kind", IN_ITS_PLACE)
def test_a_marker_that_is_none_is_damage_and_nothing_waits(run: Path, cli: Cli, kind: str) -> None:
    make, reason = IN_ITS_PLACE[kind]
    marker = checkpoint_of(run).root / MARKER
    marker.unlink()
    make(marker)
    before = contents(run)
    for flags in ({}, {"resume": "1"}):
        message = refusal(run, **flags)
        assert message.startswith("--resume: the checkpoint is damaged: ")
        assert reason in message
    assert reason in refusal(run.with_name("new"), resume=str(run))
    for place in (run, checkpoint_of(run)):
        status, _, errors = cli("verify", place)
        assert (status, reason in errors) == (1, True)
        for line in (("show", place), ("diff", place, place), ("export", place, run / "out", "--format=pt")):
            status, out, errors = cli(*line)
            assert (status, out, reason in errors) == (2, "", True)
    assert reason in cli("list", run)[1]
    assert contents(run) == before


WRITTEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "null step": (lambda m: m.update(step=None), "its step is not as it was written"),
    "a step that is true": (lambda m: m.update(step=True), "its step is not as it was written"),
    "no step": (lambda m: m.pop("step"), "its step is missing"),
    "no ranks": (lambda m: m.pop("world_size"), "has no world_size"),
    "null model": (lambda m: m.update(model=None), "its model is not as it was written"),
    "null config": (lambda m: m.update(config=None), "its config is not as it was written"),
    "null files": (lambda m: m.update(files=None), "its files is not as it was written"),
    "no files": (lambda m: m.update(files={}), "it lists no files"),
    "a null file": (lambda m: m["files"].update(a=None), "a has no size or no hash"),
    "no metadata": (lambda m: m["files"].pop(".metadata"), "lists no .metadata"),
    "an endless step": (lambda m: m.update(step=10**4000), "it holds a number of 4001 digits"),
    "an endless setting": (lambda m: m["config"].update({"batch-size": 10**400}), "it holds a number of 401 digits"),
    "a setting that is no text": (lambda m: m["config"].update({"lr": "\ud800"}), "it holds a lone surrogate"),
    "a tensor that is no text": (lambda m: m["model"].update({"\ud800": [1]}), "it holds a lone surrogate"),
    "an import that is a table": (lambda m: m.update(imported={}), "its imported is not as it was written"),
    "a source that is a list": (lambda m: m.update(source=["x"]), "its source is not as it was written"),
    "a tokenizer that is a list": (lambda m: m.update(tokenizer=[1]), "its tokenizer is not as it was written"),
    "settings of its beginning that are a number": (lambda m: m.update(began=5), "its began is not as it was written"),
    "finite text": (lambda m: m.update(finite="x"), "its finite is not as it was written"),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_marker_with_parts_missing_is_damage(run: Path, cli: Cli, kind: str) -> None:
    change, reason = WRITTEN[kind]
    checkpoint = checkpoint_of(run)
    marker = {key: value for key, value in read_marker(checkpoint).items() if key != HASH}
    change(marker)
    checkpoint.write(MARKER, _marker_bytes(marker))
    assert reason in refusal(run)
    if kind != "no ranks":  # which only a resume asks for
        assert cli("verify", checkpoint)[0] == 1
        assert cli("show", checkpoint)[0] == 2


NO_NAMES = {
    "a lone surrogate": ("a\ud800", "it holds a lone surrogate, which is no text"),
    "5,000 characters": ("a" * 5000, "aaa' can't be the name of a file in its folder"),
    "256 bytes in 128 characters": ("é" * 128, "éé' can't be the name of a file in its folder"),
    "a folder": ("sub/a", "'sub/a' can't be the name of a file in its folder"),
    "below a file": ("__0_0.distcp/a", "'__0_0.distcp/a' can't be the name of a file in its folder"),
    "itself": (".", "'.' can't be the name of a file in its folder"),
    "nothing": ("", "'' can't be the name of a file in its folder"),
    "a new line": ("a\nb", "can't be the name of a file in its folder"),
    "a colour": ("\x1b[31ma", "can't be the name of a file in its folder"),
    "the other direction": ("a\u202eb", "can't be the name of a file in its folder"),
    "elsewhere": ("../a", "'../a' leads out of the checkpoint"),
}


@pytest.mark.parametrize("kind", NO_NAMES)
def test_a_name_that_no_file_has_is_one_line_that_names_the_checkpoint(run: Path, cli: Cli, kind: str) -> None:
    name, reason = NO_NAMES[kind]
    checkpoint = checkpoint_of(run)
    marker = {key: value for key, value in read_marker(checkpoint).items() if key != HASH}
    marker["files"][name] = {"size": 1, HASH: "0"}
    checkpoint.write(MARKER, _marker_bytes(marker))
    lines = [refusal(run), refusal(run.with_name("new"), resume=str(run))]
    lines.append(refusal(run.with_name("new"), resume=str(run), resume_partial=True))
    lines.append(refusal(run.with_name("new"), init_from=str(checkpoint)))
    commands: list[tuple[Any, ...]] = [("show", run), ("diff", run, run), ("export", run, run / "out", "--format=pt")]
    for command in (*commands, ("import", run, run / "out"), ("verify", checkpoint)):
        status, out, line = cli(*command)
        assert (status, out, line.count("\n")) == (1 if command[0] == "verify" else 2, "", 1)
        lines.append(line)
    for line in lines:
        assert f"{checkpoint}: {MARKER} can't be read (" in line
        assert reason in line
    assert reason in cli("list", run)[1]
    assert not (run / "out").exists()


@pytest.mark.parametrize("kind", NO_NAMES)
def test_metadata_that_names_no_file_is_one_line(run: Path, cli: Cli, kind: str) -> None:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = NO_NAMES[kind][0]

    checkpoint = checkpoint_of(run)
    change_metadata(checkpoint.root, change)
    vouch(checkpoint)
    for command in ("show", run), ("export", run, run / "out", "--format=pt"):
        status, out, line = cli(*command)
        assert (status, out, line.count("\n")) == (2, "", 1)
        assert f"{checkpoint}: .metadata can't be used: it " in line


@pytest.mark.parametrize("kind", ["a lone surrogate", "5,000 characters", "a new line", "elsewhere"])
def test_an_index_that_names_no_file_is_one_line(tmp_path: Path, cli: Cli, kind: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"weight": NO_NAMES[kind][0]}}))
    status, out, line = cli("show", tmp_path)
    assert (status, out, line.count("\n")) == (2, "", 1)
    assert line.startswith(f"fsdp2.checkpoint: error: {tmp_path}: {INDEX} can't be used (ValueError: ")


def test_many_files_that_are_missing_are_a_line_of_bounded_length(run: Path, cli: Cli) -> None:
    checkpoint = checkpoint_of(run)
    marker = {key: value for key, value in read_marker(checkpoint).items() if key != HASH}
    marker["files"] |= {f"missing-{number}": {"size": 1, HASH: "0"} for number in range(1000)}
    marker |= {"imported": True, "source": "x" * 5000}
    checkpoint.write(MARKER, _marker_bytes(marker))
    assert max(map(len, cli("list", run)[1].splitlines())) < 2 * LONGEST_REFUSAL
    assert max(map(len, cli("show", run)[1].splitlines())) < 2 * LONGEST_REFUSAL


@pytest.mark.parametrize("samples", [[8] * 1000, "8 and more", {"8": 8}, 8.5, True])
def test_a_batch_that_is_no_number_is_not_repeated(samples: Any) -> None:
    marker = {"config": {"global-batch-size": samples}, "world_size": 2}
    assert changed_batch(Config(model_size="tiny"), World(0, 2, 0, 2), length_before(marker)) is None


def test_a_shard_that_the_marker_does_not_list_is_not_read(run: Path, cli: Cli) -> None:
    checkpoint = checkpoint_of(run)
    marker = {key: value for key, value in read_marker(checkpoint).items() if key != HASH}
    del marker["files"]["__1_0.distcp"]
    checkpoint.write(MARKER, _marker_bytes(marker))
    for line in ("verify", "show"):
        assert f"__1_0.distcp is read and not listed in {MARKER}" in cli(line, checkpoint)[2]


# --- pipes elsewhere ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_pipe_in_a_files_place_stops_nothing(run: Path, cli: Cli, name: str) -> None:
    path = checkpoint_of(run).root / name
    path.unlink()
    os.mkfifo(path)
    assert "is a pipe and no file" in refusal(run)
    assert cli("verify", run)[0] == 1
    writing = ("export", run, run / "out", "--format=pt"), ("import", run, run / "x")
    for line in (("diff", run, run), *writing, *([("show", run)] if name == ".metadata" else [])):
        assert cli(*line)[0] == 2
    (path.parent / MARKER).unlink()
    assert cli("diff", path.parent, path.parent)[0] == 2


def test_a_pipe_for_a_model_stops_nothing(run: Path, cli: Cli) -> None:
    full = run / "full_model" / "full-model.pt"
    full.unlink()
    for path in (full, run / "weights.safetensors"):
        os.mkfifo(path)
        for line in (("show", path), ("import", path, run / "x")):
            assert "is a pipe and no file" in cli(*line)[2]
    assert cli("verify", run)[0] == 1
    with pytest.raises(ConfigError):
        infer(run)
    with pytest.raises(ConfigError):
        preflight(Config(run_dir=str(run.with_name("n")), model_size="tiny", init_from=str(full)), World(0, 2, 0, 2))


# --- deletion ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [True, False])
def test_a_link_is_not_followed_to_delete(run: Path, tmp_path: Path, committed: bool) -> None:
    theirs = tmp_path / "theirs"
    shutil.copytree(checkpoint_of(run).root, theirs)
    if not committed:
        (theirs / MARKER).unlink()
    link = run / "checkpoints" / "step-00000000"
    link.symlink_to(theirs)
    before = contents(tmp_path)
    for resume in ("auto", "never"):
        assert f"{link} is a link or a file and no checkpoint's folder; move it away" in refusal(run, resume=resume)
    store = Store(LocalFiles(run / "checkpoints"))
    for remove in (store.remove_dead, (lambda: store.retain(1)) if committed else (lambda: store.begin(0))):
        with pytest.raises(NotAFile, match="is a link or a file"):
            remove()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["a file", "a folder in a dead save"])
def test_what_no_save_made_is_not_removed(run: Path, kind: str) -> None:
    place = run / "checkpoints" / "step-00000008"
    if kind == "a file":
        place.write_text("notes")
    else:
        (place / "mine").mkdir(parents=True)
        (place / "__0_0.distcp").write_text("half")
    before = contents(run)
    assert str(place) in refusal(run)
    assert contents(run) == before


def test_a_link_in_a_dead_save_is_removed_and_not_what_it_leads_to(run: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    place = run / "checkpoints" / "step-00000008"
    place.mkdir()
    (place / "__0_0.distcp").symlink_to(tmp_path / "theirs")
    assert Store(LocalFiles(run / "checkpoints")).remove_dead() == [place.name]
    assert (tmp_path / "theirs").read_text() == "theirs"


# --- what is said of hashes --------------------------------------------------------------------------------


def test_show_diff_and_export_say_what_is_verified(run: Path, cli: Cli, tmp_path: Path) -> None:
    checkpoint, full = checkpoint_of(run).root, run / "full_model" / "full-model.pt"
    assert cli("show", run)[1].splitlines()[0].endswith("; verified")
    assert cli("show", full)[1].splitlines()[0] == f"{full}: verified"
    assert "; the source is verified\n" in cli("export", run, tmp_path / "a.pt", "--format=pt")[1]
    (checkpoint / MARKER).unlink()
    (full.parent / MARKER).unlink()
    no = f"unverified: no {MARKER}"
    assert cli("show", checkpoint)[1].splitlines()[0] == f"{checkpoint}: {no}"
    assert f"; {full} is {no}" in cli("diff", full, tmp_path / "a.pt")[1]
    assert f"; the source is {no}\n" in cli("export", full, tmp_path / "b.pt", "--format=pt")[1]
    assert cli("verify", run)[:2] == (1, f"{no.replace(':', f': {full.parent}:')}\n")


@pytest.mark.parametrize("name", ["checkpoints/step-00000001/__1_0.distcp", "full_model/full-model.pt"])
def test_a_changed_byte_is_an_error_of_show_diff_and_verify(run: Path, cli: Cli, name: str) -> None:
    path = run / name
    flip(path)  # of the shards, the one with the plain values
    place = path if path.suffix == ".pt" else run
    assert cli("show", place)[0] == 2
    assert cli("diff", place, place)[0] == 2
    assert f"{path.name} differs from what was committed" in cli("verify", run)[2]
