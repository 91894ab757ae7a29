"""Features of a run composed, against a judge that shares no code with it. docs/compositions.md has all of them."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.compositions import alone
from tests.compositions.cells import FEATURES, Cell, fast, named, pairs, triples
from tests.compositions.composing import Composer, Outcome
from tests.compositions.mutants import MUTANTS, ROOT, cell_of, changed
from tests.compositions.page import PAGE, wrong
from tests.harness import Ranks, imported_once, main_in_ranks

imported_once("peft")


@pytest.fixture(scope="module")
def composer(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composer]:
    yield Composer(ranks, tmp_path_factory.mktemp("compositions"))
    ranks.close()


@pytest.fixture(scope="module")
def found() -> dict[Cell, Outcome]:
    """What came of the cells so far: some have the same bits."""
    return {}


@pytest.mark.parametrize("cell", fast(), ids=named)
def test_a_cell_is_one_process_or_is_refused(composer: Composer, found: dict[Cell, Outcome], cell: Cell) -> None:
    found[cell] = outcome = composer.outcome(cell)
    assert outcome.refused or outcome.apart
    assert not [line for line in wrong(found) if line.startswith(f"{named(cell)}:")]


def test_the_page_has_each_cell_and_the_suite_forty_of_them() -> None:
    page = PAGE.read_text()
    assert len(pairs()) == 1 + 16 + 16 * 15 // 2 - 2
    assert f"{len(pairs()) + len(triples())} cells" in page
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert [f"{number} {name}" for number, name in enumerate(FEATURES, 1)] == [row for row in rows if row[:1].isdigit()]
    assert {named(cell) for cell in triples()} <= set(rows)
    assert len(fast()) >= 40
    assert set(fast()) <= set(pairs())
    assert page.count("| — |") == 2, "the two values of one flag"


def test_the_judge_knows_nothing_of_what_it_judges() -> None:
    tree = ast.parse(Path(alone.__file__).read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert "torch" in names
    assert not [name for name in names if name.startswith(("fsdp2", "tests"))]


def test_each_fault_that_is_put_in_has_its_place_and_a_cell_of_the_suite(tmp_path: Path) -> None:
    assert len(MUTANTS) >= 20
    for number, mutant in enumerate(MUTANTS):
        for file, _, _ in mutant.edits:
            (tmp_path / str(number) / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, tmp_path / str(number) / file)
        changed(mutant, tmp_path / str(number))
        assert cell_of(mutant) in fast(), mutant.fault
        assert mutant.fault in PAGE.read_text()


def _drawn(flags: list[str]) -> Tensor:
    """What this rank's dropout would draw in the first forward of a training."""
    from fsdp2.models import llama

    drawn: list[Tensor] = []
    forward = llama.Decoder.forward

    def drawing(self: llama.Decoder, *inputs: Tensor | None) -> Tensor:
        if self.training:
            drawn.append(torch.rand(4))
        return forward(self, *inputs)  # type: ignore[arg-type]

    llama.Decoder.forward = drawing  # type: ignore[method-assign, assignment]
    try:
        main_in_ranks(flags)
    finally:
        llama.Decoder.forward = forward  # type: ignore[method-assign]
    return drawn[0]


@pytest.mark.parametrize("flag", ["--replicas=2", "--tp=2", "--sp=2"])
def test_dropout_differs_but_where_ranks_compute_the_same(ranks: Ranks, tmp_path: Path, flag: str) -> None:
    """Ranks that split a layer hold the same tokens; those of a sequence hold others."""
    ranks.close()
    line = ["--model=llama", "--dataset=random-tokens", "--seq-len=16", "--max-steps=1", "--checkpoint-every=never"]
    drawn = ranks.run(_drawn, [*line, f"--run-dir={tmp_path}/run", "--device=cpu", flag], ranks=4)
    ranks.close()
    same = [(i, j) for i in range(4) for j in range(i) if torch.equal(drawn[i], drawn[j])]
    assert same == ([(1, 0), (3, 2)] if flag == "--tp=2" else [])
