"""check PATH…: every use of FSDP1, one finding each."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path

from fsdp2.checkpoint.refusal import printable
from rewriter.configs import Config, read_config
from rewriter.finding import Finding, make, sort
from rewriter.program import Program
from rewriter.source import Source, Unreadable, find, read
from rewriter.survey import survey

SURE = re.compile(rb"FullyShardedDataParallel|distributed\.fsdp import \*")


def load(paths: Sequence[str | os.PathLike[str]]) -> tuple[Program, list[str]]:
    """The program that files and folders are, and a line for each file that couldn't be read."""
    sources: list[Source] = []
    notes = []
    for path in find(paths):
        if path.suffix in (".py", ".ipynb"):
            try:
                sources.append(read(path))
            except Unreadable as error:
                notes.append(f"{printable(str(path))}: {error}; left out")
    program = Program(sources)
    program.relevant()
    return program, notes


def configurations(paths: Sequence[str | os.PathLike[str]]) -> tuple[list[Config], list[str]]:
    """The configuration files that use FSDP1, and a line for each that couldn't be read."""
    found, notes = [], []
    for path in find(paths):
        if path.suffix in (".yaml", ".yml", ".json"):
            try:
                if (config := read_config(read(path))) is not None:
                    found.append(config)
            except Unreadable as error:
                notes.append(f"{printable(str(path))}: {error}; left out")
    return found, notes


def check(paths: Sequence[str]) -> tuple[list[Finding], list[str]]:
    """All findings in order, and a line for each file that couldn't be read."""
    files = find(paths)
    program, notes = load(files)
    findings = survey(program)
    configs, unread = configurations(files)
    findings += [finding for config in configs for finding in config.findings()]
    read = {source.path for source in program.sources.values()}
    missing = [path for path in files if path.suffix in (".py", ".ipynb") and path not in read and _names_fsdp1(path)]
    findings += [make(str(path), (None, 1, 1), "FC24", "a file that wasn't read") for path in missing]
    notes += unread
    notes += [f"{printable(str(program.sources[p].path))}: {why}" for p, why in program.unparsable.items()]
    return sort(findings), notes


def _names_fsdp1(path: Path) -> bool:
    """Whether a file that is too large, or not text, holds FSDP1's name all the same."""
    if not path.is_file() or not os.access(path, os.R_OK) or not path.stat().st_size:
        return False
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return SURE.search(data) is not None
