"""A run's checkpoints: one directory a step, which exists once its COMMIT.json does.

    checkpoints/step-00000120/  __0_0.distcp …  .metadata  COMMIT.json

Shards are written and synced into a new directory; then COMMIT.json, which lists them with size and hash, is
written under another name, synced and renamed. A directory without it is a save that died: it is removed and
passed over. One whose files don't match it is damaged: that is an error, never passed over in silence.
On an object store, which has no rename, the put of the marker is the commit.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, cast

from blake3 import blake3

from fsdp2.checkpoint.files import Files, NotAFile, Unreachable, file_name, is_there, publish
from fsdp2.checkpoint.refusal import Refused

INDEX = "model.safetensors.index.json"  # names the files of weights in several
MARKER = "COMMIT.json"
METADATA = ".metadata"  # DCP's, of what is in the other files
# As strong as SHA-256, and ten times as fast where the processor has no instructions for that (docs/notes/log.md).
# `b3sum` computes it too.
HASH, new_hash = "blake3", blake3
STEP = r"step-([0-9]{8}|[1-9][0-9]{8,})"  # as `Store.name` writes it: no other name is a checkpoint's
_STEP = re.compile(STEP)
_LARGEST_MARKER = 64 << 20  # a line of 200 bytes for each of 300,000 shards
_SET_ASIDE = re.compile(r"^superseded-[0-9]+-")


class DamagedCheckpoint(RuntimeError):
    """A committed checkpoint whose files are missing or don't match its marker."""


class ChangedFile(DamagedCheckpoint):
    """One whose bytes have another hash than its marker says: any other damage that a reader meets follows from it."""


def fingerprint(files: Files, name: str) -> dict[str, Any]:
    """{"size": bytes, HASH: BLAKE3 in hexadecimal digits} of a file. Raises as `Files.open` does."""
    with files.open(name) as file:
        digest = hashlib.file_digest(cast(Any, file), cast(Any, new_hash))
        return {"size": file.tell(), HASH: digest.hexdigest()}


def write_marker(checkpoint: Files, content: Mapping[str, Any]) -> None:
    """Publish COMMIT.json, with a hash of itself: it vouches for the other files, and nothing else for it."""
    publish(checkpoint, MARKER, _marker_bytes(content))


def _marker_bytes(content: Mapping[str, Any]) -> bytes:
    digest = new_hash(json.dumps(content, indent=1).encode()).hexdigest()
    return json.dumps({**content, HASH: digest}, indent=1).encode()


def read_marker(checkpoint: Files) -> dict[str, Any]:
    """COMMIT.json of a checkpoint. Raises DamagedCheckpoint if it can't be read or isn't as it was written."""
    try:
        size = checkpoint.size(MARKER) or 0
        if size > _LARGEST_MARKER:
            raise ValueError(f"it has {size} bytes, and no marker has more than {_LARGEST_MARKER}")
        raw = checkpoint.read(MARKER)
        marker = _parse(raw)
        # Byte for byte, so that no change goes unnoticed.
        if raw != _marker_bytes({key: value for key, value in marker.items() if key != HASH}):
            raise ValueError("it doesn't match its own hash")
        _require_parts(marker)
        named = _STEP.fullmatch(str(checkpoint).rsplit("/", 1)[-1])
        if named and int(named[1]) != marker["step"]:
            raise ValueError(f"it is of step {marker['step']}")
    except Unreachable:
        raise  # which is no damage
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{checkpoint}: {MARKER} can't be read ({type(error).__name__}: {error})") from error
    return marker


def says_finite(marker: Mapping[str, Any]) -> bool:
    """True if the weights were free of NaN and infinity when they were saved; also if an older marker doesn't say."""
    return marker.get("finite", True) is True


# Fields that a marker may have, and their types. It must have the first two.
_PARTS: dict[str, type] = {
    "step": int,
    "files": dict,
    "world_size": int,
    "source": str,
    **dict.fromkeys(("model", "config", "mesh", "optimizer", "adapters", "kept", "tokenizer", "began"), dict),
    **dict.fromkeys(("finite", "imported"), bool),
}
_LONGEST_NUMBER = 20  # digits: an integer of 64 bits, written out, has no more


def _whole(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise Refused(f"it holds a number of {len(digits)} digits")
    return int(digits)


def _parse(raw: bytes) -> dict[str, Any]:
    """A marker, as yet of any parts. Raises ValueError, whose text doesn't repeat the file."""
    try:
        marker = json.loads(raw, parse_int=_whole)
        json.dumps(marker, ensure_ascii=False).encode()
    except Refused:
        raise
    except UnicodeEncodeError:
        raise ValueError("it holds a lone surrogate, which is no text") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON, {len(raw)} bytes") from error
    if not isinstance(marker, dict):
        raise ValueError(f"it is a {type(marker).__name__} and no list of files")
    if HASH not in marker:
        raise ValueError(f"it has no {HASH} of itself: it is damaged, or of another version of this program")
    return marker


def _require_parts(marker: dict[str, Any]) -> None:
    """Raise ValueError for a marker whose hash is right and whose parts aren't: a stranger has made it."""
    for part, kind in _PARTS.items():
        if part in marker or part in ("step", "files"):
            value = marker.get(part)
            if type(value) is not kind or (isinstance(value, int) and value < 0):
                raise ValueError(f"its {part} is {'missing' if part not in marker else 'not as it was written'}")
    if not marker["files"]:
        raise ValueError("it lists no files")
    for name, entry in marker["files"].items():
        file_name(name)
        if not (isinstance(entry, dict) and type(entry.get("size")) is int and isinstance(entry.get(HASH), str)):
            raise ValueError(f"{name} has no size or no hash")


def require_metadata(checkpoint: Files, marker: Mapping[str, Any]) -> None:
    """Raise DamagedCheckpoint if this is the marker of something else than a checkpoint."""
    missing = f"lists no {METADATA}" if METADATA not in marker["files"] else "has no world_size"
    if METADATA not in marker["files"] or "world_size" not in marker:
        raise DamagedCheckpoint(f"{checkpoint}: {MARKER} {missing}, so this is no checkpoint to resume from")


def require_file(checkpoint: Files, name: str) -> int:
    """Bytes of a file of a checkpoint. Raises DamagedCheckpoint if it isn't there or is no file."""
    try:
        size = checkpoint.size(name)
    except NotAFile as error:
        raise DamagedCheckpoint(str(error)) from None
    if size is None:
        raise DamagedCheckpoint(f"{checkpoint}: {name} is missing")
    return size


def verify(checkpoint: Files, names: Iterable[str] | None = None, *, hashes: bool = True) -> None:
    """Compare the files of a committed checkpoint with its marker.

    Args:
        names: check only these; ranks divide the work so.
        hashes: False compares the sizes alone.

    Raises DamagedCheckpoint that lists what is missing or differs.
    """
    files: Mapping[str, Mapping[str, Any]] = read_marker(checkpoint)["files"]
    wrong = []
    for name in files if names is None else names:
        expected = files[name]
        try:
            size = require_file(checkpoint, name)
        except DamagedCheckpoint as error:
            wrong.append(str(error).removeprefix(f"{checkpoint}: "))
            continue
        if size != expected["size"]:
            wrong.append(f"{name} has {size} bytes and not {expected['size']}")
        elif hashes and fingerprint(checkpoint, name)[HASH] != expected[HASH]:
            wrong.append(f"{name} differs from what was committed")
    if wrong:
        raise DamagedCheckpoint(f"{checkpoint}: {'; '.join(wrong)}")


class Store:
    """The checkpoints under one place. One process, rank 0's, changes them."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._evaluated: dict[int, tuple[Any, Any]] = {}  # what markers say of a step's evaluation

    def name(self, step: int) -> str:
        """The folder of a step's checkpoint."""
        return f"step-{step:08d}"

    def checkpoint(self, step: int) -> Files:
        """The files of one step's checkpoint, whether it exists or not."""
        return self.files.at(self.name(step))

    def _steps(self) -> dict[int, str]:
        matches = (_STEP.fullmatch(name) for name in self.files.list(""))
        return {int(match[1]): match[0] for match in matches if match}

    def _is_committed(self, name: str) -> bool:
        # A marker that is no file is damage, and not what a save leaves that died.
        return is_there(self.files, f"{name}/{MARKER}")

    def committed(self) -> list[int]:
        """Steps with a marker, oldest first."""
        return sorted(step for step, name in self._steps().items() if self._is_committed(name))

    def remove_dead(self) -> list[str]:
        """Remove saves that died before their commit; the names of what was removed.

        Copies that `set_aside` had not finished, where a rename is a copy, are removed too: the original is there.

        Raises NotAFile, and removes nothing, if a checkpoint is a link, a file, or a dead save with folders in it.
        """
        ours = [name for name in self.files.list("") if _STEP.fullmatch(_SET_ASIDE.sub("", name))]
        self._require_own(ours)
        dead = [name for name in ours if not self._is_committed(name)]
        for name in dead:
            self._remove(name)
        return dead

    def begin(self, step: int) -> None:
        """Make a new, empty directory for the shards of a step. Raises FileExistsError if it is committed.

        Raises NotAFile if something else has its name.
        """
        name = self.name(step)
        if self._is_committed(name):
            raise FileExistsError(f"{self.checkpoint(step)} is committed already; a checkpoint is never overwritten")
        self._remove(name)
        self.files.mkdir("")
        self.files.mkdir(name)

    def commit(self, step: int, files: Mapping[str, Mapping[str, Any]], info: Mapping[str, Any]) -> None:
        """Make a checkpoint exist, after every rank's shards are durable; it is durable on return.

        `files` is name -> `fingerprint` of every file in the directory, `info` what else the marker says: world size,
        mesh, config, versions, names and shapes.
        """
        content = {"step": step, **info, "time": time.time(), "files": dict(sorted(files.items()))}
        try:
            write_marker(self.checkpoint(step), content)
        except OSError:  # perhaps of the last sync: what isn't known to be durable is no checkpoint
            with suppress(OSError):
                self.checkpoint(step).unlink(MARKER)
            raise

    def retain(self, keep: int, keep_every: int | None = None, keep_best: bool = False) -> list[int]:
        """Remove old committed checkpoints; the steps removed.

        Those stay that are among the newest `keep` or of each `keep_every`th step, the newest that is finite, and with
        `keep_best` that of the lowest `eval_loss` of a marker, among those on the newest's data.
        Raises NotAFile or OSError if one can't be removed, such as a link; the others are.
        """
        committed = self.committed()
        old = [step for step in committed[:-keep] if not (keep_every and step % keep_every == 0)]
        if old and (finite := self.newest_finite(committed)) in old:
            old.remove(finite)
        if old and keep_best and (best := self._best(committed)) in old:
            old.remove(best)
        with ExitStack() as each:  # also if one can't be removed, which must not fill the disk with the others
            for step in reversed(old):
                each.callback(self._remove, self.name(step))
        return old

    def clear(self, *, keep: int | None = None) -> None:
        """Remove all checkpoints but that of step `keep`, and what died saves left. Raises NotAFile as `retain`."""
        for step, name in self._steps().items():
            if step != keep:
                self._remove(name)

    def newest_finite(self, committed: Sequence[int]) -> int | None:
        """The last of these steps whose weights are numbers, as its marker says; normally one marker is read."""
        for step in reversed(committed):
            with suppress(DamagedCheckpoint):  # of which nothing is known
                if says_finite(read_marker(self.checkpoint(step))):
                    return step
        return None

    def _best(self, committed: Sequence[int]) -> int | None:
        """The step whose marker has the lowest loss of an evaluation, the last of several."""
        for step in committed:
            with suppress(DamagedCheckpoint):
                if step not in self._evaluated:
                    marker = read_marker(self.checkpoint(step))
                    self._evaluated[step] = marker.get("eval_loss"), marker.get("eval_data")
        found = [step for step in reversed(committed) if isinstance(self._evaluated.get(step, (None,))[0], float)]
        # A run that goes on with another test set has other losses, which say nothing about those before.
        alike = [step for step in found if self._evaluated[step][1] == self._evaluated[found[0]][1]]
        return min(alike, key=lambda step: self._evaluated[step][0], default=None)

    def set_aside(self, after: int) -> list[str]:
        """Rename checkpoints newer than step `after`, which a run that goes back to it will write again.

        Nothing is deleted: the new names, which `committed` doesn't see, are returned.
        """
        moved = []
        taken = set(self.files.list(""))
        for step in [step for step in self.committed() if step > after]:
            number = 1
            while (target := f"superseded-{number}-{self.name(step)}") in taken:
                number += 1
            self.files.rename(self.name(step), target)
            moved.append(target)
        if moved:
            self.files.fsync("")
        return moved

    def _remove(self, name: str) -> None:
        """Remove a checkpoint's directory, marker first: half-removed, it is a dead save and not damage."""
        if name not in self.files.list(""):
            return
        self._require_own([name])
        if self._is_committed(name):
            self.files.unlink(f"{name}/{MARKER}")
            self.files.fsync(name)
        for file in self.files.list(name):
            self.files.unlink(f"{name}/{file}")
        self.files.rmdir(name)

    def _require_own(self, names: Iterable[str]) -> None:
        """Raise NotAFile for what no save has made: it belongs to somebody, and a link may lead anywhere."""
        real = self.files.folders("")
        for name in names:
            place = self.files.at(name)
            if name not in real:
                raise NotAFile(f"{place} is a link or a file and no checkpoint's folder; move it away, or rename it")
            if not self._is_committed(name) and (folders := place.folders("")):
                raise NotAFile(f"{place} is not a checkpoint, as no save makes {folders[0]}/ in one; move it away")
