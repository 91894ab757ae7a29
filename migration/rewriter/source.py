"""Files as they are on disk: found, read, written back. A notebook is one text of all its code cells.

Nothing here runs or imports what it reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tempfile
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from fsdp2.options.errors import ConfigError
from fsdp2.options.values import checked, location
from fsdp2.units import printable

LIMIT = 4 << 20  # bytes; the longest Python file of a public training repository has 0.5 MB
SUFFIXES = (".py", ".ipynb", ".yaml", ".yml", ".json")
INTERFACE = "fsdp1_interface"  # the package that programs get, whose names of FSDP1 are meant
SKIPPED = {".git", ".hg", ".tox", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", "site-packages"}
SKIPPED.add(INTERFACE)
# Between a notebook's cells: a comment, so that it survives all changes and the cells can be told apart again.
BORDER = "#~ next cell of the notebook ~#\n"
# Commands: `%time`, `!pip install x`, `?f`, `files = !ls`, `model?`.
MAGIC = re.compile(r"^([ \t]*)(?:[%!?]|[\w., \t]+=[ \t]*[%!](?!=)|[\w.]+\?{1,2}[ \t]*$)", re.MULTILINE)


class Unreadable(ValueError):
    """A file that can't be looked into; the message is one line without the file's name."""


def why_not(error: Exception) -> str:
    """One line for a file that is left out: what is the file's fault, or the error of a rule that failed in it."""
    return str(error) if isinstance(error, Unreadable) else printable(f"{type(error).__name__} in here: {error}")


@dataclass
class Cell:
    """A code cell: where it begins in the joined text, and which of the notebook's cells it is."""

    index: int
    start: int
    end: int


@dataclass
class Source:
    """A file's text, with what is needed to write it back as it was.

    Attributes:
        path: as it was given, or found below a given folder.
        text: decoded, with the line endings of the file.
        encoding: what the file declares, UTF-8 otherwise.
        bom: whether it begins with UTF-8's mark.
        cells: of a notebook; empty for anything else.
    """

    path: Path
    text: str
    encoding: str = "utf-8"
    bom: bool = False
    cells: list[Cell] = field(default_factory=list)
    notebook: dict[str, Any] | None = None
    raw: str = ""

    @property
    def newline(self) -> str:
        return "\r\n" if "\r\n" in self.text else "\n"

    def place(self, offset: int) -> tuple[int | None, int, int]:
        """Cell (or None), line and column, from 1, of a position in the text."""
        start, cell = 0, None
        for known in self.cells:
            if known.start <= offset <= known.end:
                start, cell = known.start, known.index
        before = self.text[start:offset]
        line = before.count("\n") + 1
        return cell, line, offset - start - (before.rfind("\n") + 1) + 1

    def parsable(self) -> str:
        """The text for a Python parser: lines of notebook commands become comments of the same length."""
        if self.notebook is None:
            return self.text
        return MAGIC.sub(lambda match: f"{match[1]}#{match[0][len(match[1]) + 1 :]}", self.text)

    def pieces(self, text: str) -> list[str]:
        """A changed text's cells; of a file that is no notebook, the text."""
        return [piece.removesuffix("\n") for piece in text.split(BORDER)[:-1]] if self.notebook is not None else [text]

    def encoded(self, text: str) -> bytes:
        """The file's bytes with another text."""
        if self.notebook is None:
            return (b"\xef\xbb\xbf" if self.bom else b"") + text.encode(self.encoding)
        cells = json.loads(json.dumps(self.notebook))
        for known, piece in zip(self.cells, self.pieces(text), strict=True):
            cell = cells["cells"][known.index - 1]
            # nbformat allows both; what the notebook had is kept.
            cell["source"] = piece.splitlines(keepends=True) if isinstance(cell["source"], list) else piece
        # In the layout of the file, so that a diff has what was moved alone.
        indent = re.search(r"\n([ \t]+)\"", self.raw)
        compact = (",", ":") if not indent and '": ' not in self.raw else None
        made = json.dumps(cells, indent=indent and indent[1], ensure_ascii=self.raw.isascii(), separators=compact)
        newline = "\r\n" if "\r\n" in self.raw else "\n"
        made = made.replace("\n", newline) + self.raw[len(self.raw.rstrip()) :]
        return made.encode("utf-8-sig" if self.bom else "utf-8")


def read(path: Path) -> Source:
    """Raises Unreadable: too large, binary, not text in its encoding, or not a notebook."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise Unreadable("is not a regular file")  # a pipe, say, would keep this process waiting
        if (size := status.st_size) > LIMIT:
            raise Unreadable(f"has {size:,} bytes; files of more than {LIMIT:,} aren't read")
        data = path.read_bytes()
    except OSError as error:
        raise Unreadable(f"can't be read: {error.strerror or error}") from None
    if b"\0" in data:
        raise Unreadable("is not text")
    bom = data.startswith(b"\xef\xbb\xbf")
    encoding = "utf-8"
    try:
        if path.suffix == ".py":
            encoding = tokenize.detect_encoding(BytesIO(data).readline)[0]
            encoding = "utf-8" if encoding == "utf-8-sig" else encoding
        text = data[3 if bom else 0 :].decode(encoding)
    except (SyntaxError, LookupError, UnicodeDecodeError):
        raise Unreadable(f"is not text in its encoding, {printable(encoding)}") from None
    found = _notebook(path, text, bom) if path.suffix == ".ipynb" else Source(path, text, encoding, bom)
    if re.search("[\ud800-\udfff]", found.text):  # as JSON's \ud800 or UTF-7 makes it: no parser takes it
        raise Unreadable("holds half of a surrogate pair")
    return found


def _notebook(path: Path, text: str, bom: bool) -> Source:
    try:
        notebook = json.loads(text)
        code = [(n, cell) for n, cell in enumerate(notebook["cells"], 1) if cell["cell_type"] == "code"]
        sources = [cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"]) for _, cell in code]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Unreadable("is not a notebook of nbformat 4") from None
    joined, cells = "", []
    for (index, _), source in zip(code, sources, strict=True):
        # A cell of another language, or one that is a command as a whole, holds no Python.
        python = not source.lstrip().startswith("%%") or source.lstrip().startswith(("%%time", "%%capture"))
        if python:
            cells.append(Cell(index, len(joined), len(joined) + len(source)))
            joined += source + "\n" + BORDER
    return Source(path, joined, bom=bom, cells=cells, notebook=notebook, raw=text)


def find(paths: Sequence[str | os.PathLike[str]]) -> tuple[list[Path], list[str]]:
    """The files that PATH… name, and a line for each that is left out.

    A file is taken as it is, a folder with all that can be looked into below it. A link below a folder to a file
    outside of it is left out: rewriting the folder would change that file.

    Raises ConfigError if a path isn't there, or is a file of a kind that isn't looked into.
    """
    found: dict[Path, None] = {}
    notes = []
    for given in paths:
        # A Path was found before, and a folder may hold names that no command line is given.
        path = given if isinstance(given, Path) else Path(checked("PATH", os.fspath(given), location))
        if path.is_dir():
            for file in _below(path):
                # Unlike `Path.resolve`, it takes a link that leads to itself.
                if Path(os.path.realpath(file)).is_relative_to(os.path.realpath(path)):
                    found[file] = None
                else:
                    notes.append(f"{printable(str(file))}: leads out of the folder; left out, name the file itself")
        elif not os.path.lexists(path):
            raise ConfigError(f"{printable(str(path))}: no such file or folder")
        elif path.suffix not in SUFFIXES:
            raise ConfigError(f"{printable(str(path))}: neither Python, a notebook, YAML nor JSON")
        else:
            found[path] = None
    return list(found), notes


def _below(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED and not name.endswith(".egg-info"))
        yield from (Path(place) / name for name in sorted(files) if name.endswith(SUFFIXES))


def write(path: Path, data: bytes) -> None:
    """Replace a file at once, keeping its permissions, or make one. Through a link, what it points to is replaced.

    Raises ConfigError; the file is then as it was.
    """
    target = Path(os.path.realpath(path))
    temporary = ""
    try:
        target.parent.mkdir(exist_ok=True)
        mode = target.stat().st_mode & 0o7777 if target.exists() else 0o644
        handle, temporary = tempfile.mkstemp(prefix=".", suffix=".new", dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except OSError as error:
        if temporary:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        raise ConfigError(f"{printable(str(path))}: can't be written, it is as it was: {error.strerror}") from None
