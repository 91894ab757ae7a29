"""The table of options as text: the page in docs/, and what the command line prints."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from fsdp2_tools.compare.report import markdown_table
from migration.options import SECTIONS, TABLE
from migration.row import DECIDE, EXACT, REFUSED, Row

MEANING = {
    EXACT: "the same arithmetic, and memory in the same place",
    DECIDE: "there is an equivalent; which one depends on what was meant",
    REFUSED: "FSDP2 has nothing that means the same",
}


def page() -> str:
    """docs/migration-options.md."""
    parts = [
        "# What does this option of FSDP1 mean in FSDP2?",
        "Made by `python -m fsdp2.migrate options --markdown` from `migration/options.py`; "
        "`python -m fsdp2.migrate options NO_SHARD` prints the rows whose name holds that. Each public name, argument "
        "and member of FSDP1 in torch has a row (`tests/migrate/test_options.py::test_every_name_of_fsdp1_has_a_row`). "
        "`FSDP` stands for `FullyShardedDataParallel`.",
        "\n".join(
            f"- **{status}**: {meaning} ({sum(row.status == status for row in TABLE)} of {len(TABLE)} rows)"
            for status, meaning in MEANING.items()
        ),
    ]
    for title, rows in SECTIONS.items():
        lines = [
            (
                _anchored(row.code),
                f"`{row.name.replace('FullyShardedDataParallel.', 'FSDP.')}`",
                _code(row.becomes),
                row.status,
                row.note,
            )
            for row in rows
        ]
        parts += [f"## {title}", markdown_table(("code", "FSDP1", "FSDP2", "", "what to check or decide"), lines)]
    return "\n\n".join(parts) + "\n"


def _anchored(code: str) -> str:
    """The findings of `check` point to their code's row."""
    return f'<a id="{code.lower()}"></a>{code}'


def _code(text: str) -> str:
    """Code as code, and words as words: what Python can parse, with … for what is left out."""
    if not any(sign in text for sign in "(=.["):
        return text
    try:
        ast.parse(text.replace("=…", "=0").replace("…", "0").removesuffix("="))
    except SyntaxError:
        return text
    return f"`{text}`"


def listing(rows: Sequence[Row]) -> str:
    return "\n".join(f"{row.code} {row.name}: {row.status}\n  {row.becomes}\n  {row.note}".rstrip() for row in rows)
