"""docs/tutorial.ipynb: what is in it was run, and it runs."""

from __future__ import annotations

import pytest

from tests.launchers import notebooks

NOTEBOOK = notebooks.DOCS / "tutorial.ipynb"


def test_what_it_shows_was_run() -> None:
    notebook = notebooks.was_run(NOTEBOOK)
    assert notebooks.pictures(notebook) == 2
    assert "next: python -m fsdp2.infer tutorial" in notebooks.printed(notebook)


@pytest.mark.ray
def test_it_runs() -> None:
    notebook = notebooks.run(NOTEBOOK, 'flags = ["--num-workers=2", "--max-steps=3", "--device=cpu"]')
    assert notebooks.pictures(notebook) == 2
    text = notebooks.printed(notebook)
    assert "full_model/full-model.pt" in text
    assert "checkpoints/step-00000003" in text
    assert "samples right" in text
