"""What is composed: features of a run that its command line names, each cell a set of them, and the models and text."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

from fsdp2.models import get
from fsdp2.models.spec import ModelSpec, no_files

Cell = frozenset[str]
DIMENSIONS = ("HSDP", "TP", "SP")

# Each run is sharded by FSDP2, so that this is the cell of no feature. 12 samples are a step; in 3 microbatches of 2
# shards they are 2 each. The norm is clipped in each step.
CLIP = 0.1
FROZEN = ("model.layers.0.*", "*norm.weight", "model.embed_tokens.*")
FEATURES = {
    "HSDP": "--replicas=2",
    "TP": "--tp=2",
    "SP": "--sp=2",
    "LoRA": "--lora=2",
    "microbatches": "--grad-accumulation=3",
    "microbatches, reduced once": "--grad-accumulation=3 --grad-accumulation-sync=last",
    "blocks recomputed": "--activation-checkpointing=block",
    "operations recomputed": "--activation-checkpointing=op",
    "clipped": f"--clip-grad-norm={CLIP}",
    "bf16": "--mixed-precision=bf16",
    "offload": "--cpu-offload",
    "chunked loss": "--chunked-loss=8",
    "documents apart": "",
    "tied": "",
    "frozen": " ".join(f"--freeze={pattern}" for pattern in FROZEN),
    "uneven": "",
}
EITHER = (
    {"microbatches", "microbatches, reduced once"},
    {"blocks recomputed", "operations recomputed"},
)
# What only says where and when the same numbers are computed: a cell with one is bit for bit the cell without it.
SAME_BITS = ("blocks recomputed", "operations recomputed", "offload")
STEPS, WINDOW = 10, 16
TRIPLES, SEED = 48, 2026

_EVEN = {"vocab_size": 264, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 4, "hidden": 48}
# Two shards of half of it, on two ranks of tensor parallelism, are 33 and 33, and of 37 rows 19 and 18; of 11 samples
# a shard has 5 or 6.
_UNEVEN = {**_EVEN, "vocab_size": 266, "hidden": 74, "kv_heads": 2}
SIZES: dict[str, dict[str, Any]] = {
    f"{name}{'-tied' if tied else ''}": {**size, "tied": tied}
    for name, size in (("even", _EVEN), ("uneven", _UNEVEN))
    for tied in (False, True)
}
# Seeds of texts that are as many samples; of both, `text:` leaves one and the same document for evaluation.
TEXTS, HELD_OUT = {12: 3, 11: 21}, 11


def composed() -> ModelSpec:
    """Llama in the sizes of `SIZES`, for `--model`."""
    return dataclasses.replace(get("llama"), sizes=SIZES, files=no_files)


def size_of(cell: Cell) -> str:
    return f"{'uneven' if 'uneven' in cell else 'even'}{'-tied' if 'tied' in cell else ''}"


def samples_of(cell: Cell) -> int:
    return 11 if "uneven" in cell else 12


def ranks_of(cell: Cell) -> int:
    """Two for each dimension; pieces of sequences are shards too, and another dimension stands in for them."""
    dimensions = len(cell & set(DIMENSIONS))
    return 8 if dimensions == 3 else 4 if dimensions else 2


def mesh_of(cell: Cell) -> tuple[int, list[str]]:
    """Cells of equal ones run in the same processes."""
    return ranks_of(cell), sorted(cell & set(DIMENSIONS))


def flags_of(cell: Cell) -> list[str]:
    """The command line, but for text, weights, steps and learning rate."""
    line = ["--model=tests.compositions.cells:composed", f"--model-size={size_of(cell)}", f"--seq-len={WINDOW}"]
    line += [
        "--device=cpu",
        "--threads=1",
        "--optimizer=sgd",
        "--schedule=constant",
        "--warmup-steps=0",
        "--clip-grad-norm=off",
        "--tokenizer=bytes",
    ]
    line += [f"--global-batch-size={samples_of(cell)}", "--test-batch-size=8", "--epochs=100"]
    line.append(f"--documents={'apart' if 'documents apart' in cell else 'together'}")
    for feature in FEATURES:
        line += FEATURES[feature].split() if feature in cell else []
    return line


def allowed(cell: Cell) -> bool:
    return not any(either <= cell for either in EITHER)


def named(cell: Cell) -> str:
    """Its features, in the order of `FEATURES`."""
    return " x ".join(one for one in FEATURES if one in cell) or "FSDP2 alone"


def pairs() -> list[Cell]:
    """Each feature alone, FSDP2 with nothing, and each pair."""
    found = [frozenset(), *(frozenset({one}) for one in FEATURES)]
    return found + [frozenset(two) for two in itertools.combinations(FEATURES, 2) if allowed(frozenset(two))]


def triples() -> list[Cell]:
    """Some of all triples, by a seed; each dimension is in a third of them at least."""
    every = [frozenset(three) for three in itertools.combinations(FEATURES, 3) if allowed(frozenset(three))]
    draw = random.Random(SEED)
    found: list[Cell] = []
    for dimension in DIMENSIONS:
        found += draw.sample([cell for cell in every if dimension in cell and cell not in found], TRIPLES // 3)
    return found


def _texts(samples: int) -> list[str]:
    draw = random.Random(TEXTS[samples])
    return ["".join(draw.choices("abcdefgh", k=draw.randint(1, 30))) for _ in range(16)]


def in_order(cells: list[Cell]) -> list[Cell]:
    """Those of a mesh side by side, since each mesh has processes of its own."""
    return sorted(cells, key=mesh_of)


def fast() -> list[Cell]:
    """The cells that the suite runs, `in_order`."""
    beside = {
        "TP": {"HSDP", "SP", "microbatches, reduced once", "blocks recomputed", "clipped", "bf16", "offload"}
        | {"documents apart", "tied", "frozen", "uneven"},
        "SP": {"HSDP", "microbatches, reduced once", "operations recomputed", "clipped", "bf16"}
        | {"documents apart", "tied", "frozen", "uneven"},
        "HSDP": {"microbatches, reduced once", "LoRA", "uneven"},
        "microbatches": {"documents apart"},
    }
    found = [frozenset({one, other}) for one, others in beside.items() for other in sorted(others)]
    return in_order([frozenset(), *(frozenset({one}) for one in FEATURES), *found])


def documents(samples: int) -> list[str]:
    """Those to train on, of 1 to 30 characters; a byte is a token."""
    texts = _texts(samples)
    return texts[:HELD_OUT] + texts[HELD_OUT + 1 :]


def write_text(file: Path, samples: int) -> None:
    """The documents, a line each."""
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in _texts(samples)))
