"""The notebooks whose cells print code of this repository, with what those cells print today."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = ("tutorial.ipynb", "deepspeed_tutorial.ipynb")


def printed_again(name: str) -> str:
    """The text of a notebook. Raises ImportError without Ray, whose launcher one cell prints."""
    notebook, names = json.loads((DOCS / name).read_text()), dict[str, Any]()
    exec("import inspect", names)
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and "getsource" in source:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(source, names)
            cell["outputs"][0]["text"] = printed.getvalue().splitlines(keepends=True)
    return json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"
