"""The rows of the table of options. Sources of the rows: the docstrings of
`torch.distributed.fsdp` and the notes on moving at
https://docs.pytorch.org/docs/main/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from dataclasses import dataclass

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


def rows(letter: str, owner: str, *rows: tuple[str, str, str, str]) -> tuple[Row, ...]:
    """Rows that share the letters of their codes and the beginning of their names, numbered."""
    return tuple(Row(f"{letter}{number:02}", owner + name, *rest) for number, (name, *rest) in enumerate(rows, 1))


CLASS = "FullyShardedDataParallel"
