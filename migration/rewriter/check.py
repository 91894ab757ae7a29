"""Find FSDP1 in files and folders, and its successors: `check` and `rewrite` say and do the same."""

from __future__ import annotations

import mmap
import os
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp2.units import printable
from migration.rewriter.configs import UNKNOWN, Config, read_config
from migration.rewriter.edits import BLOCKS, KEPT, Undecided
from migration.rewriter.finding import Finding, make, of, sort
from migration.rewriter.module import Module
from migration.rewriter.program import Program
from migration.rewriter.rewrite import Result, rewrite
from migration.rewriter.source import Source, find, read, why_not
from migration.rewriter.symbols import SURE_IMPORTS

# Files that name FSDP1 surely, by suffix: code by its class, a configuration by the word.
CONFIGS = (".yaml", ".yml", ".json")
SURE = dict.fromkeys((".py", ".ipynb"), re.compile(rb"FullyShardedDataParallel|distributed\.fsdp import \*"))
SURE |= dict.fromkeys(CONFIGS, re.compile(rb"fsdp", re.IGNORECASE))


def load(
    paths: Sequence[str | os.PathLike[str]], configured: Mapping[str, bool] | None = None
) -> tuple[Program, list[str]]:
    """The program that files and folders are, and a line for each file that couldn't be read."""
    sources: list[Source] = []
    files, notes = find(paths)
    for path in files:
        if path.suffix in (".py", ".ipynb"):
            try:
                sources.append(read(path))
            except Exception as error:
                notes.append(f"{printable(str(path))}: {why_not(error)}; left out")
    program = Program(sources, configured)
    program.relevant()
    return program, notes


def configurations(paths: Sequence[Path]) -> tuple[list[Config], dict[Path, str]]:
    """The configuration files that use FSDP1, and why others couldn't be read."""
    found, unread = [], {}
    for path in paths:
        if path.suffix in CONFIGS:
            try:
                if (config := read_config(read(path))) is not None and [config.findings(), config.rewritten()]:
                    found.append(config)
            except Exception as error:
                unread[path] = why_not(error)
    return found, unread


def _configured(files: Sequence[Path], given: list[Config]) -> dict[str, bool]:
    """Of each library whose configurations are given whether all say FSDP2 when the run is over; else those beside the
    scripts, which the run leaves as they are."""
    folders = dict.fromkeys(path.parent for path in files if path.suffix == ".py")
    beside, _ = configurations([path for folder in folders for path in sorted(folder.glob("*.y*ml"))])
    both = [(one.kind, one.version == 2) for one in beside], [(one.kind, one.fsdp2) for one in given]
    return {kind: all(new for other, new in said if other == kind) for said in both for kind, _ in said}


@dataclass
class Everything:
    """The result that both commands share: `rewrite` applies it, `check` prints `findings`, in order.

    `notes`: a line for each file that couldn't be read, or stays as it is.
    """

    result: Result
    configs: list[Config]
    findings: list[Finding]
    notes: list[str]


SEARCHED = 256 << 20  # bytes; a larger file may hold it


def account(program: Program) -> list[Finding]:
    """Each use of FSDP1 in a program, and what becomes of it."""
    return of(_moved(program, texts=False).account)


def _moved(program: Program, *, texts: bool) -> Result:
    """The program rewritten, without the files in which a rule fails: one of them doesn't keep the others."""
    while True:
        try:
            return rewrite(program, texts=texts)
        except Exception as error:
            module = _at_hand(error)
            if module is None or module.file in program.unparsable:
                raise  # each turn leaves out a file, so that this ends
            program.leave_out(module.file, why_not(error))


def _at_hand(error: Exception) -> Module | None:
    """The file that was looked at when a rule failed: that of the innermost of our functions that has one."""
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        held = [frame.f_locals.get("module"), *frame.f_locals.values()]
        for value in [*held, *(getattr(one, "module", None) for one in held)]:
            if isinstance(value, Module) and frame.f_globals["__name__"].startswith(f"{__package__}."):
                return value
    return None


def everything(paths: Sequence[str], *, texts: bool = True) -> Everything:
    files, notes = find(paths)
    configs, unread_configs = configurations(files)
    program, unparsed = load(files, _configured(files, configs))
    result = _moved(program, texts=texts)
    unread = [f"{printable(str(path))}: {why}; left out" for path, why in unread_configs.items()]
    findings = of(result.account) + [finding for config in configs for finding in config.findings()]
    read = {source.path for source in program.sources.values()}
    missing = [path for path in files if path.suffix not in CONFIGS and path not in read]
    missing = [p for p in (*missing, *unread_configs) if UNKNOWN in unread_configs.get(p, "") or _names_fsdp1(p)]
    findings += [make(str(path), (None, 1, 1), "FC24", "a file that wasn't read", BLOCKS) for path in missing]
    for path, why in program.unparsable.items():
        source = program.sources[path]
        if SURE_IMPORTS.search(source.text):
            line = re.match(r"(?:cell \d+, )?line (\d+):", why)
            findings.append(make(str(source.path), (None, int(line[1]) if line else 1, 1), "FC24", why, BLOCKS))
        unread.append(f"{printable(str(source.path))}: {why}; left as it is")
    unread += [f"{one.place} {one.code} {one.message}" for one in findings if one.code == "FY11"]
    unread += [_kept(reasons) for reasons in result.kept]
    for node, module, fault in result.faults:
        place = make(str(module.path), module.source.place(module.span(node)[0]), "FC01", "", KEPT).place
        unread.append(
            f"{place}: a fault of FSDP1, which the moved program hasn't: {fault}. Other losses may be due to it"
        )
    return Everything(result, configs, sort(findings), notes + unparsed + unread)


def _kept(reasons: list[Undecided]) -> str:
    """All that isn't plain in a program, for who wants to make it plain."""
    places = [
        make(str(r.module.path), r.module.source.place(r.module.span(r.node)[0]), r.code, "", BLOCKS) for r in reasons
    ]
    why = dict.fromkeys(f"{one.place} {one.code} {r.why}" for one, r in zip(places, reasons, strict=True))
    return f"FSDP1's interface is kept, on FSDP2, since not all is plain: {'; '.join(why)}"


def _names_fsdp1(path: Path) -> bool:
    """Return whether a file that is too large, or not text, holds FSDP1's name all the same."""
    if not path.is_file() or not os.access(path, os.R_OK) or not path.stat().st_size:
        return False
    if path.stat().st_size > SEARCHED:
        return True
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return SURE[path.suffix].search(data) is not None
