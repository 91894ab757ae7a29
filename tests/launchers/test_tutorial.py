"""docs/tutorial.ipynb: what is in it was run, and it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parent.parent.parent / "docs" / "tutorial.ipynb"


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook["cells"] if cell["cell_type"] == "code" for output in cell["outputs"]]


def printed(notebook: Any) -> str:
    return "".join("".join(output.get("text", "")) for output in outputs(notebook))


def pictures(notebook: Any) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def test_what_it_shows_was_run() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert all(cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert not [output for output in outputs(notebook) if output["output_type"] == "error"]
    assert pictures(notebook) == 2
    assert "next: python -m fsdp2.infer tutorial" in printed(notebook)
    assert "/tmp/" not in printed(notebook)


@pytest.mark.ray
def test_it_runs() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    parameters.source = 'flags = ["--num-workers=2", "--max-steps=3", "--device=cpu"]'
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    client.execute()  # raises what a cell raises
    assert pictures(notebook) == 2
    text = printed(notebook)
    assert "full_model/full-model.pt" in text
    assert "checkpoints/step-00000003" in text
    assert "samples right" in text
