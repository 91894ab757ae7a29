"""Every name, argument and member of FSDP1, and what it means in FSDP2: the tables of docs/migration-options.md, read.

Sources of the rows: the docstrings of `torch.distributed.fsdp` and the notes on moving at
https://docs.pytorch.org/docs/main/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).with_name("options.md")  # a link to the page in docs/, so that a wheel has it too
CLASS = "FullyShardedDataParallel"
EXACT = "exact"  # the same arithmetic and the same placement of memory: losses stay bit-equal on 2 ranks
DECIDE = "decide"  # there is an equivalent, but which one depends on what was meant
REFUSED = "refused"  # FSDP2 has nothing that means the same
STATUSES = (EXACT, DECIDE, REFUSED)


@dataclass(frozen=True)
class Row:
    """One thing of FSDP1, and its successor.

    Attributes:
        code: stable, as a linter's.
        name: as torch spells it: `FullyShardedDataParallel.sharding_strategy` is an argument of the constructor,
            `FullyShardedDataParallel.no_sync()` a method, `ShardingStrategy.NO_SHARD` a member.
        becomes: FSDP2's code.
        status: one of STATUSES.
        note: what to check, what to decide, or why it is refused and what to do instead.
    """

    code: str
    name: str
    becomes: str
    status: str
    note: str


def sections(page: str) -> dict[str, list[Row]]:
    """The rows of each table, by the heading above it. Raises ValueError for a line of a table that is none."""
    found: dict[str, list[Row]] = {}
    for line in page.splitlines():
        if line.startswith("## "):
            found[line[3:]] = []
        elif line.startswith("| ") and not line.startswith(("| code |", "| --- |")):
            first, name, becomes, status, note = line.removeprefix("| ").removesuffix("|").split(" | ")
            code = re.fullmatch(r'<a id="(\w+)"></a>(\w+)', first)
            if code is None or code[1] != code[2].lower() or status not in STATUSES:
                raise ValueError(f"not a row: {line}")
            name = re.sub(r"^FSDP\.", f"{CLASS}.", name.strip("`"))
            cells = [cell.strip().replace("\\|", "|") for cell in (name, re.sub("^`(.*)`$", r"\1", becomes), note)]
            found[[*found][-1]].append(Row(code[2], cells[0], cells[1], status, cells[2]))
    return found


SECTIONS = sections(PAGE.read_text(encoding="utf-8"))
TABLE = tuple(row for rows in SECTIONS.values() for row in rows)


def listing(rows: Sequence[Row]) -> str:
    return "\n".join(f"{row.code} {row.name}: {row.status}\n  {row.becomes}\n  {row.note}".rstrip() for row in rows)
