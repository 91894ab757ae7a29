"""Blocks of the pages that need ranks."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.harness import Ranks

DOCS = Path(__file__).parents[1] / "docs"


def _shown() -> tuple[str, str]:
    page = (DOCS / "state-dicts.md").read_text()
    (found,) = re.findall(r"```python\n([^`]*fully_shard[^`]*)```[^`]*```text\n([^`]*)```", page)
    source, wanted = found
    names: dict[str, Any] = {}
    exec(source, names)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        names["show"](dist.get_rank())
    return printed.getvalue(), wanted


def test_a_sharded_parameter_is_what_the_page_says(ranks: Ranks) -> None:
    of_rank_0, (printed, wanted) = ranks.run(_shown)
    assert printed == wanted
    assert of_rank_0[0].splitlines()[1] == wanted.splitlines()[1]
    assert of_rank_0[0].splitlines()[0] == "(5, 2) (Shard(dim=0),) (3, 2)"
