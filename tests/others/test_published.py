"""Each row of the table of published configurations is what a run does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import forget_models
from tests.others.published import CONFIGS, outcome, row
from tests.others.sections import PAGE


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_configuration_does_what_the_page_says(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    forget_models()
    assert row(name, outcome(name, tmp_path)) in PAGE.read_text().splitlines()
