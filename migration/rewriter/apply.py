"""rewrite PATH…: all files as one program; the difference printed, or the files replaced."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from fsdp2.units import printable
from migration.rewriter import source
from migration.rewriter.check import everything
from migration.rewriter.edits import KEPT, MOVED, WAITS
from migration.rewriter.rewrite import Result, Rewritten, diff


def rewrite(paths: Sequence[str], write_files: bool) -> int:
    """Prints, or writes. Everything is worked out before the first file is changed."""
    found = everything(paths)
    result, notes = found.result, list(found.notes)
    for config in found.configs:
        text = config.rewritten()
        for finding in config.undecided():
            notes.append(f"{finding.place} {finding.code} {finding.message} -> {finding.replacement}")
        if text != config.source.text:
            shown = diff(config.source.path, config.source.text, text)
            result.files.append(Rewritten(config.source, config.source.encoded(text), shown))
    for note in notes:
        print(f"fsdp2: {note}", file=sys.stderr)
    added = dict.fromkeys(f.source.path.parent for f in result.files if f.source.path.parent.name == source.INTERFACE)
    for file in result.files:
        if write_files:
            source.write(file.source.path, file.data)
        if file.source.path.parent not in added:
            print(f"rewrote {printable(str(file.source.path))}\n" if write_files else file.diff, end="")
    for folder in added:
        done = "is" if write_files else "would be"
        print(f"fsdp2: FSDP1's interface {done} put into {printable(os.path.relpath(folder))}", file=sys.stderr)
    left = [finding for finding in found.findings if finding.status not in (MOVED, KEPT)]
    _summary(result, sum(finding.status != WAITS for finding in left), write_files)
    return 1 if left else 0


def _summary(result: Result, left: int, written: bool) -> None:
    count = sum(file.source.path.parent.name != source.INTERFACE for file in result.files)
    if not count and not left:
        print("fsdp2: nothing of FSDP1 to move", file=sys.stderr)
        return
    done = f"{count} file{'s' if count != 1 else ''} {'rewritten' if written else 'would change'}"
    decide = (
        f"{left} place{'s' if left != 1 else ''} to decide, named above, and in code marked # fsdp2:"
        if left
        else "nothing left to decide"
    )
    faults = ", and losses may differ by a fault of FSDP1, named above" if result.faults else ""
    print(f"fsdp2: {done}, {decide}{faults}", file=sys.stderr)
    for path in dict.fromkeys(problem.module.path for problem in result.undecided if problem.blocking):
        print(
            f"fsdp2: {printable(str(path))}: a constructor has to be decided first, so nothing but comments is added "
            "there; change what they say and run this again",
            file=sys.stderr,
        )
    if not written and count:
        print("fsdp2: --write applies it", file=sys.stderr)
