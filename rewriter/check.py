"""check PATH…: every use of FSDP1, one finding each."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fsdp2.checkpoint.refusal import printable
from rewriter.configs import Config, read_config
from rewriter.finding import Finding, sort
from rewriter.program import Program
from rewriter.source import Source, Unreadable, find, read
from rewriter.survey import survey


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
    notes += unread
    notes += [f"{printable(str(program.sources[p].path))}: {why}" for p, why in program.unparsable.items()]
    return sort(findings), notes
