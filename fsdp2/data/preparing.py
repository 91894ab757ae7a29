"""From files to prepared documents, by a process that may be killed at any moment.

The files are made in a folder of their own. They are only appended to, and progress.json says from time to time what of
them is good: whoever begins again cuts them back to that and goes on. So the bytes are those of a process that wasn't
killed, and the folder that a run asks for is there as a whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy

from fsdp2.data.alone import LOCK, alone
from fsdp2.data.errors import UnusableText
from fsdp2.data.meter import Meter, Say, silent
from fsdp2.data.places import File, Unreachable
from fsdp2.data.prepared import FORMAT, META, SPLITS, Encoder, dtype_of, files_of, is_prepared, read_meta, source_of
from fsdp2.data.reading import Row, rows_of
from fsdp2.data.splits import identity_of
from fsdp2.data.turns import Turns

PROGRESS = "progress.json"
AT_A_TIME, BYTES_AT_A_TIME = 1000, 8 << 20  # of documents that are tokenised together
SAVE_SECONDS, SAY_SECONDS = 5.0, 10.0


@dataclass
class Progress:
    """The progress of a preparation.

    Attributes:
        source: of what, and how.
        file, place: where reading goes on.
        inside: the split of a document that has begun and not ended.
        content: says which documents came so far.
        tokens, documents, targets: by split.
        characters, empty: of documents of text, and how many documents hold none.
        turns: of conversations, by the token that ends an answer: in how many it is learned, and in how many not.
        files: name -> bytes of it that are good.
    """

    source: str
    file: int = 0
    place: tuple[int, int] = (0, 0)
    inside: str | None = None
    content: str = ""
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    targets: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    characters: int = 0
    empty: int = 0
    turns: dict[str, list[int]] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)


def prepare(
    files: Sequence[File],
    folder: Path,
    encoder: Encoder,
    *,
    work: Path | None = None,
    say: Say = silent,
    say_seconds: float = SAY_SECONDS,
    save_seconds: float = SAVE_SECONDS,
) -> dict[str, Any]:
    """Tokenise files into a folder; its meta.json.

    What an earlier call has left undone is gone on with, and another process that does the same is waited for.

    Args:
        work: where the files lie until all are done; None = beside `folder`.
        say: is called every `say_seconds` with how far it is.

    Raises UnusableText for files that are no text; Unreachable for a server that fails, and then the work stays.
    """
    work, source = work or folder.with_name(f"{folder.name}.unfinished"), source_of(files, encoder)
    try:
        with alone(work, lambda: say(f"waiting for another process that prepares {folder.name}")):
            if is_prepared(folder):
                shutil.rmtree(work)
                meta = read_meta(folder)
                if meta["source"] != source:
                    raise UnusableText(f"{folder}: was made of other files, or with other settings; choose another")
                return meta
            progress = _begun(work, source)
            if not _is_whole(work):  # else it was killed when all was done
                _make(
                    files, work, encoder, progress, Meter([file.size for file in files], say, say_seconds), save_seconds
                )
            meta = read_meta(work)
            _move(work, folder)
            return meta
    except OSError as error:
        raise UnusableText(
            f"{error.filename or folder}: can't be written ({error.strerror}); choose a folder that can (for the "
            "cache, XDG_CACHE_HOME)"
        ) from None


def _make(
    files: Sequence[File], work: Path, encoder: Encoder, progress: Progress, meter: Meter, save_seconds: float
) -> None:
    try:
        with _Output(work, progress, encoder) as output:
            _write(files, encoder, output, meter, save_seconds)
        if not sum(progress.tokens.values()):
            raise UnusableText(f"{files[0].name}: {len(files)} files hold no text")
    except Unreachable:
        raise
    except UnusableText:
        shutil.rmtree(work)  # the same files can't be gone on with
        raise
    meta = {
        "format": FORMAT,
        "kind": encoder.kind,
        "tokenizer": encoder.identity,
        "begin": list(encoder.begin),
        "field": encoder.field,
        "source": progress.source,
        "content": progress.content,
        "dtype": numpy.dtype(dtype_of(encoder)).name,
        "documents": progress.documents,
        "tokens": progress.tokens,
        "characters": progress.characters,
        "empty": progress.empty,
        "turns": progress.turns,
        "unlike": encoder.unlike(),
        "files": progress.files,
    }
    _replace(work / META, json.dumps(meta, indent=1) + "\n")


def _move(work: Path, folder: Path) -> None:
    for name in (PROGRESS, LOCK):
        (work / name).unlink(missing_ok=True)
    try:
        os.rename(work, folder)
    except OSError:
        if not is_prepared(folder):  # else another node was faster, with the same
            raise
        shutil.rmtree(work)


def _write(files: Sequence[File], encoder: Encoder, output: _Output, meter: Meter, seconds: float) -> None:
    progress, saved = output.progress, time.monotonic()
    for number in range(progress.file, len(files)):
        for rows in _blocks(rows_of(files[number], encoder.field, progress.place)):
            for row, (tokens, learn) in zip(rows, encoder.encode(rows), strict=True):
                output.add(row, tokens, learn)
            progress.place = rows[-1].after
            meter.show(number, rows[-1].share, sum(progress.tokens.values()))
            if time.monotonic() - saved >= seconds:
                output.save()
                saved = time.monotonic()
        progress.file, progress.place = number + 1, (0, 0)
    output.save()


def _blocks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    block: list[Row] = []
    size = 0
    for row in rows:
        block.append(row)
        size += row.size
        if len(block) == AT_A_TIME or size >= BYTES_AT_A_TIME:
            yield block
            block, size = [], 0
    if block:
        yield block


class _Output:
    """The files while they are made: appended to, and good up to where the last `save` found them."""

    def __init__(self, work: Path, progress: Progress, encoder: Encoder) -> None:
        self.work, self.progress, self._dtype = work, progress, dtype_of(encoder)
        self._turns = Turns(encoder.names, encoder.about["added"], encoder.end) if encoder.kind == "chat" else None
        self._files = {}
        for name in files_of(encoder.kind):
            self._files[name] = open(work / name, "ab")  # noqa: SIM115 - closed by __exit__
            self._files[name].truncate(progress.files.get(name, 0))
            self._files[name].seek(0, os.SEEK_END)

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in self._files.values():
            file.close()

    def add(self, row: Row, tokens: numpy.ndarray, learn: numpy.ndarray | None) -> None:
        progress = self.progress
        if not len(tokens) and progress.inside is None:
            progress.empty += row.ends
            return
        tokens = tokens.astype(self._dtype)
        identity = identity_of(tokens.tobytes() + (b"" if learn is None else learn.tobytes()))
        # One document in ten, by its tokens: the same one twice is in one split.
        split = progress.inside or ("test" if int(identity[:2], 16) < 26 else "train")
        progress.content = identity_of(f"{progress.content}{identity}{row.ends}".encode())
        progress.tokens[split] += len(tokens)
        self._files[f"{split}.bin"].write(tokens.tobytes())
        if learn is not None:
            progress.targets[split] += int(learn[1:].sum())  # nothing comes before the first
            self._files[f"{split}-learn.bin"].write(learn.tobytes())
            for token, learned in self._turns(tokens, learn) if self._turns else ():
                progress.turns.setdefault(str(token), [0, 0])[not learned] += 1
        else:
            progress.characters += len(row.content)
        progress.inside = None if row.ends else split
        if row.ends:
            progress.documents[split] += 1
            self._files[f"{split}-ends.bin"].write(numpy.int64(progress.tokens[split]).tobytes())
            if learn is not None:
                self._files[f"{split}-targets.bin"].write(numpy.int64(progress.targets[split]).tobytes())

    def save(self) -> None:
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            self.progress.files[name] = file.tell()
        _replace(self.work / PROGRESS, json.dumps(asdict(self.progress)))


def _replace(path: Path, content: str) -> None:
    aside = path.with_name(f"{path.name}.new")
    with open(aside, "w") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def _is_whole(work: Path) -> bool:
    try:
        read_meta(work)
    except UnusableText:
        return False
    return True


def _begun(work: Path, source: str) -> Progress:
    """Read the progress that an earlier process left; begin if there is none, or it is torn. Raises UnusableText."""
    try:
        found = Progress(**json.loads((work / PROGRESS).read_bytes()))
        found.place = (int(found.place[0]), int(found.place[1]))
        whole = all((work / name).stat().st_size >= size for name, size in found.files.items())
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return Progress(source)
    if found.source != source:
        raise UnusableText(
            f"{work}: was begun with other files or settings; go on with those, or remove it to begin with these"
        )
    return found if whole else Progress(source)
