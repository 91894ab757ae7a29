"""Configurations as their authors publish them, sizes alone shrunk: what a run does with each on a text of one's own.

python -m tests.others.published     # writes the first table of docs/models.md
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.train import main
from tests.others.common import flags
from tests.others.sections import PAGE, put

HERE = Path(__file__).parent
CONFIGS: dict[str, dict[str, object]] = json.loads((HERE / "published.json").read_text())
INTRO = """
## Configurations as published

Tiny models are made of the `config.json` that their authors publish, with its old keys and its token numbers; sizes
alone are shrunk. Each trains on a folder of text files for a step. `python -m tests.others.published` writes this
table, and a test compares each row with a run.

| | class | `--dataset text:` |
|---|---|---|
"""


def outcome(name: str, folder: Path) -> str:
    """What a run on short documents does: it trains, as it is or with documents together, or is refused with a line."""
    model, text = folder / "model", folder / "text"
    for made in (model, text):
        made.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIGS[name]))
    for i in range(8):  # a hash chooses those for evaluation
        (text / f"{i}.txt").write_text("A short document. " * (1 + i % 3))
    said = ""
    for way in ("", "together"):
        line = flags(f"hf:{model}", folder / f"run{way}", f"--dataset=text:{text}", "--tokenizer=bytes")
        line += ["--strategy=none", "--init-from=scratch", "--max-steps=1", "--no-save-model", "--test-batch-size=1"]
        line += ["--checkpoint-every=never", *([f"--documents={way}"] if way else [])]
        try:
            with contextlib.redirect_stdout(sys.stderr):
                main(parse(line))
        except ConfigError as error:
            if "a document sees those before it" not in str(error):
                return f"refused: {error}".replace(str(folder), "…")
            said = "refused for documents apart, "
        else:
            return f"{said}trains{' with `--documents together`' if way else ''}"
    raise AssertionError(f"{name}: documents see each other, and --documents together is refused for it")


def row(name: str, found: str) -> str:
    """A row of the table."""
    named = CONFIGS[name]["architectures"]
    assert isinstance(named, list)
    return f"| {name} | `{named[0]}` | {found} |"


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    found = []
    for each in CONFIGS:
        with tempfile.TemporaryDirectory() as place:
            found.append(row(each, outcome(each, Path(place))))
            print(found[-1])
    PAGE.write_text(put(PAGE.read_text(), "published", [*INTRO.strip().splitlines(), *found]))
