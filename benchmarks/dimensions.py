"""A choice of dimensions: planned numbers for docs/dimensions.md. `python benchmarks/dimensions.py` takes minutes.

Each row is `fsdp2.plan` of a Llama on H100s of eight a machine, in bf16 with blocks recomputed and a sample a share. No
such machine was measured.
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from pathlib import Path

from tables import write_page

sys.path.insert(0, str(Path(__file__).parent.parent))

from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2_tools.compare.report import markdown_table
from fsdp2_tools.plan.device import gpu
from fsdp2_tools.plan.plans import plan
from tests.others.sections import put

PAGE = Path(__file__).parents[1] / "docs" / "dimensions.md"
COMMON = "--model=llama --dataset=random-tokens --batch-size=1 --mixed-precision --activation-checkpointing=block"
MODELS = ("8b", "70b", "405b")
CASES = ((8192, 8), (8192, 64), (8192, 1024), (65536, 64))  # tokens of a sample, GPUs


def layouts(ranks: int, length: int) -> list[str]:
    """Meshes that make sense for so many ranks in machines of eight."""
    found = ["", "--tp=8", "--sp=8"]
    if ranks > 8:
        found.append("--replicas=8")
    if length > 8192:
        found.append("--tp=8 --sp=8")
    return found


def row(model: str, ranks: int, length: int, mesh: str) -> tuple[str, ...]:
    """A row of the table: what a plan says, or why there is none."""
    h100 = gpu("h100")
    try:
        config = parse(f"{COMMON} --model-size={model} --seq-len={length} {mesh}".split())
        there = plan(config, ranks, h100, h100.memory)
    except ConfigError as error:
        return model, str(ranks), f"{length:,}", f"`{mesh or 'FSDP2 alone'}`", "—", str(error).partition(":")[2], ""
    assert there.time is not None
    memory = f"{there.bytes / 1e9:,.0f} GB{'' if there.fits else ', too much'}"
    rate = (there.time.tokens_per_second or 0) / ranks
    waits = f"{there.time.exposed_ms / there.time.milliseconds:.0%}"
    return model, str(ranks), f"{length:,}", f"`{mesh or 'FSDP2 alone'}`", memory, f"{rate:,.0f}", waits


def main() -> None:
    """Write the table."""
    warnings.simplefilter("ignore")
    rows, began = [], time.perf_counter()
    for model, (length, ranks) in itertools.product(MODELS, CASES):
        for mesh in layouts(ranks, length):
            rows.append(row(model, ranks, length, mesh))
            print(*rows[-1], f"{time.perf_counter() - began:.0f} s", sep="  ", flush=True)
    head = ("Llama", "GPUs", "tokens a sample", "mesh", "a GPU holds", "tokens/s a GPU", "waits for exchanges")
    made = f"{time.strftime('%Y-%m-%d')}, `python benchmarks/dimensions.py`."
    write_page(PAGE, put(PAGE.read_text(), "planned", [made, "", markdown_table(head, rows)]))


if __name__ == "__main__":
    main()
