"""A few rows of docs/models.md, of architectures that are unlike those of the other tests here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.harness import Ranks
from tests.others.page import page, passed
from tests.others.table import Fresh, Row, row_of

SAMPLE = [
    ("causal", "falcon_mamba"),  # no attention
    ("causal", "deepseek_v3"),  # experts, latent attention
    ("causal", "gemma3_text"),  # layers of two kinds, a softcap
    ("masked", "modernbert"),
    ("audio", "hubert"),  # a spec of one's own
]
GOOD = Row("good", "causal", 10, 3, True, 0.0, True, True, 0.0, True, 0.0)


@pytest.mark.parametrize(("kind", "name"), SAMPLE)
def test_a_row(ranks: Ranks, fresh: Fresh, tmp_path: Path, kind: str, name: str) -> None:
    row = row_of(kind, name, ranks, fresh, tmp_path)
    assert passed(row), row
    assert row.apart == 0.0


@pytest.fixture(scope="module")
def fresh() -> Fresh:
    pytest.importorskip("transformers")
    return Fresh()


def test_the_page_counts_what_passed() -> None:
    bad = [Row("bad", "causal", 10, failed="it has no blocks"), Row("odd", "causal", plain=False, failed="not today")]
    text = page([dataclasses.replace(GOOD, name="bad"), GOOD, *bad])
    assert "| Causal language models of transformers | 3 | 2 | 1 (50.0 %) | 1 |" in text
    assert "it has no blocks" in text
    assert "- odd: not today" in text


@pytest.mark.parametrize(
    "wrong",
    [
        {"started": False},
        {"apart": 1e-3},
        {"apart": float("nan")},
        {"resumed": False},
        {"checkpointed": None},
        {"bf16": None},
        {"bf16": 0.1},
        {"exported": False},
        {"failed": "no"},
    ],
    ids=str,
)
def test_whatever_is_wrong_does_not_pass(wrong: dict[str, object]) -> None:
    assert passed(GOOD)
    assert not passed(dataclasses.replace(GOOD, **wrong))  # type: ignore[arg-type]
