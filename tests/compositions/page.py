"""`make compositions`: run every cell, write docs/compositions.md, and end with 1 where one isn't as it should be."""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

from tests.compositions.cells import FEATURES, SAME_BITS, SEED, STEPS, Cell, allowed, in_order, named, pairs, triples
from tests.compositions.composing import BOUNDS, EXACT, Composer, Outcome
from tests.harness import Ranks
from tests.others.sections import put

PAGE = Path(__file__).parents[2] / "docs" / "compositions.md"


def run(cells: list[Cell]) -> dict[Cell, Outcome]:
    """Outcomes, in the order of the meshes, each of which has its processes."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        ranks = Ranks(Path(name))
        try:
            composer = Composer(ranks, Path(name))
            for cell in in_order(cells):
                found[cell] = composer.outcome(cell)
                print(f"{len(found)}/{len(cells)} {named(cell)}: {found[cell]}", file=sys.stderr, flush=True)
        finally:
            ranks.close()
    return found


def wrong(found: dict[Cell, Outcome]) -> list[str]:
    """What isn't as it should be, a line each."""
    lines = []
    for cell, outcome in found.items():
        bounds = BOUNDS["bf16" in cell]
        lines += [
            f"{named(cell)}: {name} are {apart:.1e} from one process's"
            for name, apart in (outcome.apart or {}).items()
            if not apart <= bounds[name]
        ]
        for one in cell & set(SAME_BITS):
            other = found.get(cell - {one}, Outcome())
            if outcome.bits and other.bits and outcome.bits != other.bits:
                lines.append(f"{named(cell)}: other bits than without {one}")
    return lines


def table(found: dict[Cell, Outcome]) -> str:
    """Cells by pairs, then triples, then why some are refused, in Markdown."""
    reasons = list(dict.fromkeys(_reason(one) for one in found.values() if one.refused))

    def shown(cell: Cell) -> str:
        if not allowed(cell):
            return "—"
        outcome = found[cell]
        if outcome.apart is None:
            return f"r{reasons.index(_reason(outcome)) + 1}"
        return f"{max(outcome.apart.values()):.0e}".replace("e-0", "e-")

    names = list(FEATURES)
    lines = [f"| | alone | {' | '.join(str(number) for number in range(1, len(names)))} |"]
    lines.append(f"|---|{'---|' * len(names)}")
    for number, name in enumerate(names, 1):
        cells = [frozenset({name}), *(frozenset({name, other}) for other in names[: number - 1])]
        lines.append(f"| {number} {name} | {' | '.join(map(shown, cells))} {'| ' * (len(names) - number)}|")
    lines += ["", f"FSDP2 with none of these: {shown(frozenset())}.", "", "| three at once | |", "|---|---|"]
    lines += [f"| {named(cell)} | {shown(cell)} |" for cell in found if len(cell) == 3]
    lines += ["", "| refused | |", "|---|---|"]
    lines += [f"| r{number} | {reason.replace('|', chr(92) + '|')} |" for number, reason in enumerate(reasons, 1)]
    return "\n".join(lines)


def _reason(outcome: Outcome) -> str:
    """The refusal without the name that this model of the tests' own has."""
    return outcome.refused.replace("tests.compositions.cells:composed", "MODEL")


def _counts(found: dict[Cell, Outcome]) -> str:
    ran = [one for one in found.values() if one.apart is not None]
    exact = max(max(one.apart.values()) for cell, one in found.items() if one.apart and "bf16" not in cell)
    rounded = max(max(one.apart.values()) for cell, one in found.items() if one.apart and "bf16" in cell)
    pairs_of_bits = sum(
        bool(one.bits and found.get(cell - {name}, Outcome()).bits)
        for cell, one in found.items()
        for name in cell & set(SAME_BITS)
    )
    return (
        f"{len(found)} cells: {len(ran)} equal one process, {len(found) - len(ran)} are refused. The farthest in fp32 "
        f"is {exact:.0e} away (bound {EXACT:.0e}), in bf16 {rounded:.0e}. In {pairs_of_bits} cells recomputation or "
        "offload was compared with the cell without it: the same bits."
    )


def main() -> int:
    """Write the page, or with `--only` look at some cells; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="WORD", help="cells with this feature, and no page")
    only = parser.parse_args().only
    begin = time.monotonic()
    cells = pairs() + triples()
    found = run([cell for cell in cells if only is None or only in cell])
    problems = wrong(found)
    print("\n".join(problems) or "every cell is as it should be")
    if only is None:
        found = {cell: found[cell] for cell in cells}
        minutes = (time.monotonic() - begin) / 60
        made = (
            f"{datetime.date.today()}, {minutes:.0f} minutes on 2 cores, torch {torch.__version__}, transformers "
            f"{transformers.__version__}; {STEPS} steps a cell, triples by the seed {SEED}."
        )
        PAGE.write_text(put(PAGE.read_text(), "cells", [made, "", _counts(found), "", table(found)]))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
