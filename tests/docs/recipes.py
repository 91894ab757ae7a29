"""The recipes of configs/ and their planned memory, for docs/own-models.md:  python -m tests.docs.recipes  (minutes)"""

from __future__ import annotations

import re
from pathlib import Path

from fsdp2.config import Config
from fsdp2.options.parser import read_file
from fsdp2.units import size
from fsdp2_tools.plan.device import gpu as find_gpu
from fsdp2_tools.plan.plans import plan

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "own-models.md"
RANKS = (1, 4, 8)
RECIPES = {
    "finetune-full": "all weights, on conversations or text",
    "finetune-lora": "adapters of rank 16, on conversations or text",
    "pretrain-further": "all weights, on much text: one pass, a larger step",
}
BEGIN, END = "<!-- python -m tests.docs.recipes -->\n", "<!-- end -->\n"


def planned(name: str) -> list[str]:
    """Bytes of the fullest rank, in words, for Llama 8B on each number of H100s."""
    # A plan reads no weights: any name will do.
    model = {"model": "llama", "model_size": "8b", "init_from": "weights", "device": "cuda"}
    config = Config(**{**read_file(Config, str(ROOT / "configs" / f"{name}.toml")), **model})
    return [size(plan(config, ranks, find_gpu("h100"), None).bytes) for ranks in RANKS]


def table() -> str:
    lines = [
        "| `--config configs/…` | trains | " + " | ".join(f"{ranks} GPU{'s' * (ranks > 1)}" for ranks in RANKS) + " |"
    ]
    lines.append("| --- | --- |" + " --- |" * len(RANKS))
    for name, what in RECIPES.items():
        lines.append(f"| `{name}.toml` | {what} | " + " | ".join(planned(name)) + " |")
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = PAGE.read_text()
    assert BEGIN in text
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + table() + END, text, flags=re.DOTALL))
