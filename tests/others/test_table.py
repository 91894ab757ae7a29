"""A few rows of docs/models.md, of architectures that are unlike those of the other tests here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Ranks
from tests.others.table import Row, page, prove

SAMPLE = [
    ("causal", "mamba2"),  # no attention
    ("causal", "deepseek_v3"),  # experts, latent attention
    ("causal", "gemma3_text"),  # layers of two kinds, a softcap
    ("masked", "modernbert"),
]


@pytest.mark.parametrize(("kind", "name"), SAMPLE)
def test_a_row(ranks: Ranks, tmp_path: Path, kind: str, name: str) -> None:
    pytest.importorskip("transformers")
    row = Row(name, kind)
    prove(row, ranks, tmp_path)
    assert (row.apart, row.resumed, row.checkpointed, row.bf16) == (0.0, True, True, True)
    assert (tmp_path / "exported" / "model.safetensors").is_file()


def test_the_page_counts_what_passed() -> None:
    good = Row("good", "causal", 10, 3, 0.0, True, True, True, 0.0)
    text = page([good, Row("bad", "causal", 10, failed="it has no blocks"), Row("odd", "causal", plain=False)], 60)
    assert "## causal: 1 of 2 (50 %) that train in plain transformers; 1 bit-equal" in text
    assert "it has no blocks" in text
