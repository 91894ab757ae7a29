"""The notebooks in docs/: what is in them was run, and they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent.parent / "docs"


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook["cells"] if cell["cell_type"] == "code" for output in cell["outputs"]]


def printed(notebook: Any) -> str:
    return "".join("".join(output.get("text", "")) for output in outputs(notebook))


def pictures(notebook: Any) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def was_run(path: Path) -> Any:
    """A notebook as it is stored. Fails the test if a cell of it wasn't run, or failed, or shows a path."""
    notebook = json.loads(path.read_text())
    assert all(cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert not [output for output in outputs(notebook) if output["output_type"] == "error"]
    assert "/tmp/" not in printed(notebook)
    return notebook


def run(path: Path, parameters: str) -> Any:
    """The notebook after a run with other parameters. Raises what a cell raises."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    cell.source = parameters
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    return notebook
