"""The reader of what Hugging Face's `datasets` reads: its saved folders, tables, JSON, and elsewhere the hub and URLs.

The library works in a child process, within bounds. Of this machine it gets names of files and never a folder, whose
description could name a URL. What it reads stays Arrow's: a row would become a picture or a sound that is fetched.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from fsdp2.data.errors import UnusableText
from fsdp2.data.splits import identity_of
from fsdp2.options.settings_file import read_table
from fsdp2.units import install
from fsdp2_extra.foreign.bounds import Foreign, run_in_bounds
from fsdp2_extra.text.forms import NAME_THEM, OTHERS, Fields, form_of, formless, of_line
from fsdp2_extra.text.places import HUB, PUBLISHED, File, below, suffix_of, with_split
from fsdp2_extra.text.rows import Row, row_of, rows_in
from fsdp2_extra.text.written import NOT_UTF_8, objects, records

WRITTEN = {"json": objects, "csv": records}
READERS = {".parquet": "parquet", ".arrow": "arrow", ".json": "json", ".jsonl": "json", ".csv": "csv"}
BESIDE = re.compile(r"(state|dataset_infos?|dataset_dict)\.json|cache-.*\.arrow")  # what `save_to_disk` and `map` add
HELD_OUT = ("validation", "valid", "val", "dev", "test", "eval")
UNKNOWN = 1 << 62  # bytes
AT_ONCE = 256  # rows of a table


@dataclass(frozen=True)
class Published(File):
    """A split as it was when it was found.

    Attributes:
        reader: the library's, for files; "" for a name on the hub.
        files: their paths or URLs, or that name.
        split: which one.
        columns: what it has.
    """

    reader: str = ""
    files: tuple[str, ...] = ()
    split: str = ""
    columns: tuple[str, ...] = ()

    @property
    def suffix(self) -> str:
        """One that no file has."""
        return PUBLISHED

    def require_unchanged(self) -> None:
        """Raises UnusableText if it isn't what was found."""
        now = _listed(self.name)
        if (now.state or look.__wrapped__(now).state) != self.state:
            raise UnusableText(f"{self.name}: has changed while it was read; start again when it stays as it is")


def find(place: str) -> Published:
    """A split of a place, as `published` writes it. Raises UnusableText."""
    listed = _listed(place)
    if not _is_written(listed) and find_spec("datasets") is None:
        raise UnusableText(f"{place}: datasets isn't installed; {install('datasets')}")
    return look(listed)


def _is_written(source: Published) -> bool:
    """Return whether it is files here, in a form that is read without the library."""
    return source.reader in WRITTEN and "://" not in source.files[0]


def _listed(place: str) -> Published:
    path, named = with_split(place)
    split = named or "train"
    if path.startswith(HUB):
        return Published(place, UNKNOWN, "", "", (path.removeprefix(HUB),), split)
    if "://" in path:
        return Published(place, UNKNOWN, "", _reader([urlsplit(path).path], path), (path,), split)
    there = next(one for one in (Path(path), *Path(path).parents) if one.exists())  # as much of a pattern as is none
    by_name = {os.path.relpath(file.name, there): file for file in below(Path(path), tuple(READERS))}
    by_name = {name: file for name, file in by_name.items() if not BESIDE.fullmatch(os.path.basename(name))}
    tables = (file.name for file in by_name.values() if file.suffix == ".arrow" and Path(path).is_dir())
    for told in {one for name in tables if os.path.lexists(one := Path(name).with_name("state.json"))}:
        last = _saved(told)
        by_name = {n: one for n, one in by_name.items() if Path(one.name).parent != told.parent or one.name in last}
    if (Path(path) / "dataset_dict.json").is_file():
        of_split = [file for name, file in by_name.items() if name.startswith(f"{split}/")]
    else:
        of_split = [file for name, file in by_name.items() if _is_of(split, name)]
    if not of_split and (named or any(_is_of(other, name) for name in by_name for other in HELD_OUT)):
        has = ", ".join([name if name != "." else os.path.basename(path) for name in by_name][:5])
        raise UnusableText(
            f"{path}: no name of a file is of the split {split}; name another behind a colon, or none; it has {has}"
        )
    files = of_split or list(by_name.values())
    if not files:
        raise UnusableText(f"{path}: there is nothing that datasets reads ({', '.join(READERS)})")
    if odd := next((file.name for file in files if "::" in file.name or re.search(r"[*?\[]", file.name)), None):
        raise UnusableText(f"{odd}: datasets takes its name for a pattern or a URL; rename it")
    names = tuple(file.name for file in files)
    state = identity_of(repr([(os.path.relpath(file.name, there), file.size, file.state) for file in files]).encode())
    return Published(place, sum(file.size for file in files), state, _reader(names, path), names, split)


def _saved(state: Path) -> set[str]:
    """The files that `save_to_disk` wrote last: of an earlier time, in more files, it leaves some.

    Raises UnusableText if they aren't all there, or none are named.
    """
    try:
        found = {str(state.with_name(file["filename"])) for file in read_table(str(state))["_data_files"]}
    except (ValueError, TypeError, KeyError):
        raise UnusableText(f"{state}: names no files of data; save the dataset again, or name its files") from None
    if missing := [name for name in found if not os.path.isfile(name)]:
        raise UnusableText(f"{state}: names {ascii(min(missing))[:200]}, which isn't there; save the dataset again")
    return found


def _is_of(split: str, name: str) -> bool:
    """Return whether a file's name has that of a split as a word, as on the hub."""
    return bool(re.search(rf"(^|[-._ 0-9/]){re.escape(split.lower())}([-._ 0-9/]|$)", name.lower()))


def kind_of(source: Published, field: str, fields: Fields, *, mixed: bool = False) -> str:
    """`chat` or `text`, by its columns and which of them was named. Raises UnusableText for neither.

    Where sources are `mixed`, the name is for those that are text.
    """
    if (field == "text" or (mixed and field not in source.columns)) and form_of(source.columns, fields):
        return "chat"
    if of_line(fields):
        raise UnusableText(f"{source.name}: {formless(source.columns, fields)}")
    if field in source.columns:
        return "text"
    raise UnusableText(
        f"{source.name}: has the columns {', '.join(source.columns[:12])}, and reads {field} as documents, or as "
        f"conversations messages, {OTHERS}; name its column of text with --text-field, or for conversations {NAME_THEM}"
    )


def rows(file: File, field: str | Fields) -> Iterator[Row]:
    """Its documents or conversations, in the child. Raises UnusableText."""
    assert isinstance(file, Published), "another file has a reader of its own"
    found = _opened(file)
    if found.tables is not None:
        return rows_in(found.tables, file.columns, field, file.name)
    return (row_of(content, field, where, size) for content, where, size in _written(found))


@cache
def look(source: Published) -> Published:
    """A split with its columns, and its version where it is elsewhere. Raises UnusableText."""
    found = run_in_bounds(lambda: _look(source), Foreign(source.name, UnusableText, "give other files, or download it"))
    if not found.state:
        raise UnusableText(f"{source.name}: its server tells no version, so other data could pass for it; download it")
    return found


def _look(source: Published) -> Published:
    found = _opened(source)
    first: Any = next(_written(found) if found.tables is None else iter(found.tables), None)
    if first is None:
        raise UnusableText(f"{source.name}: its split {source.split} is empty; give another")
    if found.tables is None and not isinstance(first[0], dict):
        raise UnusableText(f"{first[1]}: is no object; give one of each document or conversation")
    columns = tuple(first[0] if found.tables is None else first.schema.names)
    return replace(source, state=source.state or found.version, columns=columns)


class _Split(NamedTuple):
    """A split as it is opened. Nothing of it is read yet.

    Attributes:
        version: "" if it isn't known.
        written: the library's name of a form that is read here, and its files.
        tables: of another form, Arrow's.
    """

    version: str
    written: tuple[str, tuple[str, ...]]
    tables: Iterable[Any] | None


def _opened(source: Published) -> _Split:
    if _is_written(source):
        return _Split(source.state, (source.reader, source.files), None)
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # it would tell a server of each use, of files of one's own too
    files = {source.split: list(source.files)}
    what: dict[str, Any] = {"path": source.reader, "data_files": files} if source.reader else {"path": source.files[0]}
    builder = datasets.load_dataset_builder(**what)
    found = builder.config.data_files or {}
    if getattr(builder.config, "batch_size", 0) is None:  # else as many rows as the first group has, perhaps none
        builder.config.batch_size = AT_ONCE
    versions = [files.origin_metadata for files in found.values()]
    version = identity_of(repr(versions).encode()) if versions and all(all(one) for one in versions) else ""
    # The class is one of its own for each name, derived from the reader's.
    reader = next((name for one in type(builder).__mro__ if (name := one.__name__.lower()) in WRITTEN), "")
    if reader and (told := _told(builder.config, datasets.BuilderConfig())):
        raise UnusableText(
            f"{source.name}: its description reads {reader} with {told[:160]}, which isn't followed here; download its "
            "files, and give them as .jsonl"
        )
    splits = found if reader else builder.as_streaming_dataset()
    if source.split not in splits:
        has = ", ".join(map(str, splits))
        raise UnusableText(f"{source.name}: has no split {source.split}; it has {has}; name one")
    if reader:
        return _Split(version, (reader, tuple(map(str, found[source.split]))), None)
    return _Split(version, ("", ()), splits[source.split].with_format("arrow").iter(batch_size=AT_ONCE))


def _told(config: Any, any_config: Any) -> str:
    """In which way a description, or the end of a name, has a file read: none is followed but which files it names, and
    into which types."""
    own, beside = vars(type(config)()), {*vars(any_config), "features"}
    told = {name: value for name, value in vars(config).items() if name not in beside and value != own[name]}
    return ", ".join(f"{name} {value!r}" for name, value in told.items())


def _written(found: _Split) -> Iterator[tuple[Any, str, int]]:
    """The values of files in a form that is read here, where each is, and its size. Raises UnusableText."""
    reader, files = found.written
    if "://" in files[0]:
        from datasets import StreamingDownloadManager
        from datasets.utils.file_utils import xopen

        manager = StreamingDownloadManager()
        files = tuple(manager.iter_files(manager.extract(list(files))))
        opened: Callable[..., Any] = xopen
    else:
        opened = open
    for file in files:
        end = "" if reader == "csv" else "\n"  # as their readers want the ends of lines
        with opened(file, "rb") as stream, io.TextIOWrapper(stream, "utf-8", newline=end) as text:
            try:
                yield from WRITTEN[reader](text, file)
            except UnicodeDecodeError as error:
                raise UnusableText(f"{file}: {NOT_UTF_8.format(error)}") from None


def _reader(names: Any, place: str) -> str:
    found = {READERS.get(suffix_of(name), "") for name in names}
    if len(found) > 1 or "" in found:
        raise UnusableText(f"{place}: files of one kind are read together, of {', '.join(READERS)}; name them")
    return str(found.pop())
