"""A stranger's checkpoint, snapshot or model runs no code and reaches no file outside of itself."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2 import infer
from fsdp2.checkpoint.files import LocalFiles, inside
from fsdp2.checkpoint.safe_reader import SafeReader
from fsdp2.checkpoint.store import HASH, DamagedCheckpoint, read_marker, verify, write_marker
from fsdp2.config import parse
from fsdp2.train import main
from fsdp2_tools.checkpoint.__main__ import main as commands
from tests.harness import Payload, Ranks
from tests.hostile.common import checkpoint_of, resume, vouch

LEADS_OUT = ["../secret", "/etc/passwd", "a/../../secret", "..", "a\\..\\secret", "null\0byte"]


def _messages(ranks: Ranks, run: Path) -> list[str]:
    return [messages[0] for messages in ranks.run(resume, str(run))]


def test_metadata_that_would_run_code_stops_the_resume(run: Path, ranks: Ranks, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(run)
    (checkpoint.root / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    vouch(checkpoint)
    for message in _messages(ranks, run):
        assert message.startswith("ConfigError: --resume: the checkpoint is damaged: ")
        assert "which a checkpoint's metadata never holds" in message
    assert not (tmp_path / "ran").exists()


def test_metadata_changes_nothing_in_the_process(run: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    """BUILD sets attributes of what a pickle names; the rest of this one is a sound checkpoint's."""
    checkpoint, is_file = checkpoint_of(run), Path.is_file
    sound = checkpoint.read(".metadata")
    assert sound[:2] == b"\x80\x04"
    changes = b"cpathlib\nPosixPath\n(N}X\x07\x00\x00\x00is_fileK\x01stb"
    for prefix in (changes + b"0", b"(" + changes + b"1", b""):
        # With POP, with POP_MARK, and in a list whose first part it is.
        content = b"\x80\x04" + prefix + sound[2:] if prefix else b"\x80\x04" + changes + b"."
        checkpoint.write(".metadata", content)
        vouch(checkpoint)
        assert commands(["verify", str(checkpoint)]) == 1
        assert ".metadata can't be used: it " in capsys.readouterr().err
        assert Path.is_file is is_file
        assert "is_file" not in vars(type(run))
    for message in _messages(ranks, run):
        assert message.startswith("ConfigError: --resume: the checkpoint is damaged: ")
    for still in ranks.run(_is_file_is_a_function):
        assert still


def _is_file_is_a_function() -> bool:
    return callable(Path("/").is_file) and Path(__file__).is_file()


def _change_metadata(checkpoint: LocalFiles, change: Callable[[Any, Any], Any]) -> None:
    """Apply `change(index, storage info)` to where each entry is said to be."""
    metadata: Any = SafeReader(checkpoint).read_metadata()
    metadata.storage_data = {index: change(index, info) for index, info in metadata.storage_data.items()}
    (checkpoint.root / ".metadata").write_bytes(pickle.dumps(metadata))
    vouch(checkpoint)


@pytest.mark.parametrize("name", LEADS_OUT)
def test_a_shard_elsewhere_is_not_followed(run: Path, ranks: Ranks, name: str) -> None:
    _change_metadata(checkpoint_of(run), lambda index, info: dataclasses.replace(info, relative_path=name))
    for message in _messages(ranks, run):
        assert "leads out of the checkpoint; it was not followed" in message


@pytest.mark.parametrize("name", LEADS_OUT)
def test_a_marker_that_names_files_elsewhere_is_refused(run: Path, name: str) -> None:
    checkpoint = checkpoint_of(run)
    marker = {key: value for key, value in read_marker(checkpoint).items() if key != HASH}
    write_marker(checkpoint, {**marker, "files": {**marker["files"], name: {"size": 1, HASH: "0"}}})
    with pytest.raises(DamagedCheckpoint, match="leads out of the checkpoint"):
        verify(checkpoint)


def test_names_that_stay_inside_are_followed() -> None:
    for name in ("", "__0_0.distcp", ".metadata", "step-00000001/COMMIT.json", "a..b", "..."):
        assert inside(name) == name


@pytest.mark.parametrize("kind", ["value", "tensor"])
def test_a_shard_that_would_run_code_stops_the_resume(run: Path, ranks: Ranks, tmp_path: Path, kind: str) -> None:
    checkpoint = checkpoint_of(run)
    torch.save(Payload(tmp_path / "ran"), checkpoint.root / "__0_0.distcp")
    length = (checkpoint.root / "__0_0.distcp").stat().st_size
    wanted = "app.progress.step" if kind == "value" else "app.model.class_token"

    def change(index: Any, info: Any) -> Any:
        if index.fqn != wanted:
            return dataclasses.replace(info, relative_path="__1_0.distcp")
        return dataclasses.replace(info, relative_path="__0_0.distcp", offset=0, length=length)

    _change_metadata(checkpoint, change)
    for message in _messages(ranks, run):
        assert message != "resumed"
    assert not (tmp_path / "ran").exists()
    # The payload itself is in order: whoever loads it without care runs it.
    torch.load(checkpoint.root / "__0_0.distcp", weights_only=False)
    assert (tmp_path / "ran").exists()


def test_a_full_model_that_would_run_code_is_refused(run: Path, tmp_path: Path) -> None:
    file = run / "full_model" / "full-model.pt"
    torch.save({"weight": Payload(tmp_path / "ran")}, file)
    vouch(LocalFiles(file.parent))
    with pytest.raises(Exception, match="can't be loaded"):
        main(parse([f"--init-from={file}", f"--run-dir={tmp_path / 'new'}", "--model-size=tiny", "--device=cpu"]))
    with pytest.raises(Exception, match="can't be loaded"):
        infer.main(run)
    assert not (tmp_path / "ran").exists()


def test_a_marker_is_data(run: Path) -> None:
    """Whatever JSON it is, it is refused with an error of ours."""
    checkpoint = checkpoint_of(run)
    strange: list[Any] = [
        [],
        "text",
        5,
        None,
        {},
        {"files": {}},
        {"files": [], "step": 1},
        {"files": {"a": 1}, "step": 1},
    ]
    for content in strange:
        if isinstance(content, Mapping):
            write_marker(checkpoint, content)
        else:
            checkpoint.write("COMMIT.json", repr(content).encode())
        with pytest.raises(DamagedCheckpoint):
            verify(checkpoint)
