"""check's account and rewrite's changes are the same thing: over all pairs, whole programs and scripts."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from migration.rewriter import account, names
from migration.rewriter.account import Entry
from migration.rewriter.check import load
from migration.rewriter.edits import BLOCKS, MARKED, MOVED, WAITS, Undecided
from migration.rewriter.module import Module
from migration.rewriter.rewrite import rewrite
from migration.rewriter.scene import Scene
from migration.rewriter.symbols import AROUND

HERE = Path(__file__).parent
IMPORT = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP"
PROGRAMS = sorted([*HERE.glob("rules/*/in.py"), *HERE.glob("decided/*/in.py"), *HERE.glob("scripts/*.py")])


def _lines(text: str, entry: Entry) -> range:
    """Those of the statement that an entry stands in, from 0."""
    start, end = entry.statement
    return range(text.count("\n", 0, start), text.count("\n", 0, max(start, end - 1)) + 1)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem if path.stem != "in" else path.parent.name)
def test_each_use_is_in_one_entry_and_each_change_belongs_to_one(path: Path) -> None:
    program, _ = load([str(path)])
    result = rewrite(program)
    (module,) = program.parsed
    uses = [module.span(n) for n, s in names.uses(module, program.symbol) if s not in AROUND.values()]
    assert uses
    entries = [(entry.start, entry.end) for entry in result.account if entry.use]
    assert [entries.count(use) for use in uses] == [1] * len(uses)

    left = {MARKED, BLOCKS, WAITS} & {entry.outcome for entry in result.account}
    assert bool(left) == bool(result.undecided)
    assert (BLOCKS in left) == any(problem.blocking for problem in result.undecided)

    old, new = module.text.splitlines(), result.files[0].data.decode().splitlines()
    taken = {line for entry in result.account if entry.outcome == MOVED for line in _lines(module.text, entry)}
    marked = {line for entry in result.account if entry.outcome in (MARKED, BLOCKS)
              for line in _lines(module.text, entry)}  # fmt: skip
    header = re.compile(r'import |from |"""|#|    |\)|try|[A-Z]')
    begun = next(number for number, line in enumerate(old) if line and not header.match(line))
    for tag, start, end, first, last in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for number in range(start, end) if tag in ("replace", "delete") else ():
            if old[number].strip() and not re.match(r"\s*(#|import |from )", old[number]):
                assert number in taken, (tag, number + 1, old[number])
        if tag == "insert" and start > begun:
            beside = taken & {start - 1, start, start + 1}
            marks = all(line.strip().startswith("# fsdp2: ") for line in new[first:last]) and start in marked
            helpers = any(re.match(r"def |@|class |import |from ", line) for line in new[first : last + 1])
            assert beside or marks or helpers, (start + 1, new[first:last])


def test_a_file_that_the_account_is_the_first_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in large packages, where a name that no rule asks for comes from a file that nothing else needs."""
    main = tmp_path / "main.py"
    main.write_text(f"{IMPORT}\nimport torch\n\nmodel = FSDP(torch.nn.Linear(2, 2))\n")
    (tmp_path / "far.py").write_text("def read():\n    return 1\n")
    entries = account.entries

    def reads_far(scene: Scene, undecided: list[Undecided], modules: list[Module]) -> list[Entry]:
        assert scene.rewriting.program.module((tmp_path / "far.py").resolve()) is not None
        return entries(scene, undecided, modules)

    monkeypatch.setattr(account, "entries", reads_far)
    program, _ = load([str(tmp_path)])
    assert [made.source.path.name for made in rewrite(program).files] == ["main.py"]
