"""The recipes of configs/ and their planned memory, for docs/own-models.md:  python -m tests.docs.recipes  (minutes)"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fsdp2.config import Config
from fsdp2.options.parser import read_file
from fsdp2.units import size
from fsdp2_tools.plan.device import Gpu
from fsdp2_tools.plan.device import gpu as find_gpu
from fsdp2_tools.plan.plans import plan

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "own-models.md"
RANKS = (1, 4, 8)
# A plan reads no weights: any name will do.
MODEL: dict[str, Any] = {"model": "llama", "model_size": "8b", "init_from": "weights", "device": "cuda"}
OF_DPO = {**MODEL, "optimizer": "adamw", "seq_len": 1024, "batch_size": 2, "checkpoint_every": "never"}
RECIPES = {
    "finetune-full": "all weights, on conversations or text",
    "finetune-lora": "adapters of rank 16, on conversations or text",
    "pretrain-further": "all weights, on much text: one pass, a larger step",
}
DPO = "all weights, on preferences, in fp32: a pair of answers of 1,024 tokens a GPU"
DPO_LORA = "adapters of rank 16, on preferences, in bf16: the same pair, and no second model"
DPO_AGAIN = "… activations are computed again in backward"
BEGIN, END = "<!-- python -m tests.docs.recipes -->\n", "<!-- end -->\n"


def with_reference(config: Config, ranks: int, gpu: Gpu | None) -> int:
    """Bytes of examples/dpo.py: of a training on as many rows as both answers are, and the shards of a frozen copy.

    Nothing else of the copy is there at the moment when the training takes most: its forward is over by then.
    """
    found = plan(config, ranks, gpu, None)
    return found.bytes + found.memory.model_bytes


def planned(name: str) -> list[int]:
    """Bytes of the fullest rank for Llama 8B on each number of H100s."""
    config = Config(**{**read_file(Config, str(ROOT / "configs" / f"{name}.toml")), **MODEL})
    return [plan(config, ranks, find_gpu("h100"), None).bytes for ranks in RANKS]


def planned_dpo() -> list[int]:
    """The same of examples/dpo.py, whose flags are its own: by those that train so."""
    return [with_reference(Config(**OF_DPO), ranks, find_gpu("h100")) for ranks in RANKS]


def planned_dpo_with_adapters(**more: Any) -> list[int]:
    """The same with `--lora 16 --mixed-precision`. A forward of the reference holds nothing that the next doesn't."""
    config = Config(**OF_DPO, lora=16, mixed_precision="bf16", **more)
    return [plan(config, ranks, find_gpu("h100"), None).bytes for ranks in RANKS]


def table() -> str:
    lines = ["| recipe | trains | " + " | ".join(f"{ranks} GPU{'s' * (ranks > 1)}" for ranks in RANKS) + " |"]
    lines.append("| --- | --- |" + " --- |" * len(RANKS))
    rows = [(f"`configs/{name}.toml`", what, planned(name)) for name, what in RECIPES.items()]
    rows += [("`examples/dpo.py`", DPO, planned_dpo())]
    rows += [("`examples/dpo.py --lora 16 --mixed-precision`", DPO_LORA, planned_dpo_with_adapters())]
    again = planned_dpo_with_adapters(activation_checkpointing="block")
    rows += [("the same with `--activation-checkpointing`", DPO_AGAIN, again)]
    for name, what, sizes in rows:
        lines.append(f"| {name} | {what} | " + " | ".join(map(size, sizes)) + " |")
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = PAGE.read_text()
    assert BEGIN in text
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + table() + END, text, flags=re.DOTALL))
