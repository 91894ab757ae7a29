"""docs/migration-code.md, from the rules: python -m tests.rewriter.code_page > docs/migration-code.md"""

from __future__ import annotations

import ast
import difflib
import re
from pathlib import Path

from migration.rewriter.symbols import BY_CODE

RULES = Path(__file__).parent / "rules"
DECIDED = Path(__file__).parent / "decided"

HEAD = """\
# Moving code from FSDP1

Made by `python -m tests.rewriter.code_page` from the pairs of programs in `tests/rewriter/rules/`. Both programs of a
pair are run on 2 ranks in the tests, and every loss of the one is bit-equal to the other's.

```
pip install -e '.[migrate]'
python -m fsdp2.migrate check train.py policies/           # what has to be decided; --all: every use of FSDP1
python -m fsdp2.migrate rewrite train.py policies/         # what would change, as a diff
python -m fsdp2.migrate rewrite --write train.py policies/
```

- **Give all files of a program together.** FSDP1's class and the models that it makes are followed from one file to the
  other.
- **A program goes one of two ways.** If all that it does with FSDP1 is plain (calls that say their options, models
  that can be followed), it becomes `fully_shard` and plain lines. Else it keeps FSDP1's interface, on FSDP2: only its
  imports change, to `fsdp1_interface`, a package of 16 files that is put into the program and needs torch alone.
  There options from a configuration, kinds of state dicts that a function sets, and classes that are passed on are
  decided at run time, as before. What FSDP2 can't honour is refused in one line, and each call logs the FSDP2 code
  that takes its place.
- `check` prints the account that `rewrite` applies: each use once, as *moved*, *works as it is*, *to decide*, *to
  decide first* (a constructor: its program stays until then) or *waits for a decision*. Decisions stand first, then a
  line for each file's imports; `--all` lists the rest. Its exit status is 1 while anything is left to do, that of
  `rewrite` while a decision is; a file that can't be read and names FSDP1 is something left. `--format json`, `github`
  (remarks in a pull request) and `sarif` (code scanning) hold everything. Each code is a row of
  [the table](migration-options.md).
- `rewrite` leaves what it isn't certain of, and writes a comment above it: `# fsdp2: CODE what there is to decide`. If
  that is a constructor's call, nothing else is changed in the files that belong together: a model is never half moved.
  Change what the comment says, delete it, and run it again. Running it twice changes nothing more.
- The result needs torch alone, and nothing of this package. A few helpers (`no_sync`, `shard_by_size`) are written into
  files that become plain.
- Notebooks are rewritten cell by cell, accelerate's YAML line by line, its JSON and the `fsdp_config.json` of
  transformers' Trainer with the same indent. Comments,
  layout, encoding, line endings and permissions stay. Files are replaced whole or not at all. Of a folder, links to
  files outside of it are left out.
- What may be FSDP1's class or a model of it, since an object carries it there, is listed as FC36, with where it comes
  from; questions by a string or a private attribute as FC37. FSDP1's interface has both, and answers as FSDP1 does,
  but for the class of a module that is a group. What comes out of a list or a tuple of mixed things only may be a
  model, and no line about it is moved.
- Where FSDP1 has a fault that the moved program hasn't, a line names it: losses may differ for that reason
  ([which](notes/fsdp1.md)).
- A file in which anything fails is left as it is, with one line, and the others go on.
- What is rewritten loads the checkpoints that FSDP1 wrote, and goes on as FSDP1 does. In code moved by hand a full
  state of an optimizer [loads wrongly](migration-options.md#fm21), without an error.

What it wrote for public repositories: [trials](migration-trials.md).
"""


ASKED = """\
# What is asked

`rewrite` marks these, and what is shown was decided by hand. These pairs (`tests/rewriter/decided/`) are run too, and
their losses are bit-equal, but for clipping and for decay by dimension: there FSDP1 did something else than the
code says, by mistake, and FSDP2 does what it says.
"""


# Codes that no two programs show, and why.
WITHOUT = {
    "FM01": "`model.module` is FC08; of the class nobody asks it",
    "FC12": "FSDP1 waits for ever: a state dict needs all ranks",
    "FC15": "FSDP1 can't copy a sharded model on a CPU",
    "FC16": "FSDP1 gathers in forward alone, and so does what becomes of it",
    "FC19": "starting ranks by hand goes on working, and nothing of FSDP1 is in it",
    "FC21": "the library shards the model, and on a CPU it doesn't",
    "FC22": "fairscale has no release for a torch with FSDP2",
    **dict.fromkeys(("FC38", "FC39"), "a library's call, which needs GPUs: `tests/rewriter/test_libraries.py`"),
    "FC24": "what can't be parsed doesn't run",
    "FD09": "FSDP1 refuses the base class",
    "FD15": "FSDP1 refuses the base class",
    "FX06": "no torch that has FSDP2 takes the argument",
    **{
        f"FY{n:02}": "a configuration: `tests/rewriter/test_configs.py` has its text before and after"
        for n in range(1, 12)
    },
}


def page() -> str:
    without = "\n".join(f"- [{code}](migration-options.md#{code.lower()}): {why}" for code, why in WITHOUT.items())
    rules, decided = (map(_pair, sorted(folder.iterdir())) for folder in (RULES, DECIDED))
    return "\n".join([HEAD, *rules, ASKED, *decided, f"# Codes without a pair\n\n{without}\n"])


def _pair(rule: Path) -> str:
    before, after = ((rule / name).read_text() for name in ("in.py", "out.py"))
    codes = re.findall(r"F[A-Z]\d\d", rule.name)
    linked = ", ".join(f"[{code}](migration-options.md#{code.lower()}) {_name(code)}" for code in codes)
    text = " ".join((ast.get_docstring(ast.parse(before)) or rule.name).rstrip(".").split())
    title, *more = re.split(r"[:;,.] ", text, maxsplit=1)
    more = [f"{text}.\n\n"] if more else []
    return f"## {title}\n\n{''.join(more)}{linked}\n\n```diff\n{changes(before, after)}```\n"


def _name(code: str) -> str:
    return f"`{BY_CODE[code].name.removeprefix('FullyShardedDataParallel.')}`"


def changes(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm="")
    return "".join(line + "\n" for line in lines if not line.startswith(("---", "+++", "@@")))


if __name__ == "__main__":
    print(page(), end="")
