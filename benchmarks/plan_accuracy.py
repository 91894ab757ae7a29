"""The distance between `fsdp2.plan`'s memory and what training takes: make plan-accuracy

Each row plans a training, and runs it as 2 to 4 gloo processes with the ledger of `--memory-snapshot`, beside torch's
profiler, which tells what the CPU allocator gives. Compared is the most that the fullest rank holds. Rows are kept in a
file, so a run that was stopped goes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from plan_accuracy_page import Row, of_meshes, page, picture
from step_page import versions
from tables import write_page
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).parent.parent))

from fsdp2 import data
from fsdp2.config import parse
from fsdp2.data.splits import Dataset
from fsdp2.options.errors import ConfigError
from fsdp2.options.parser import Parser
from fsdp2.run.process import ending
from fsdp2_extra.allocations.timeline import load
from fsdp2_tools.plan.plans import plan
from tests.harness import Ranks, main_in_ranks

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "plan-accuracy.md"
ROWS = ROOT / "runs" / "plan-accuracy.jsonl"
MODELS = {
    "llama debug": "--model=llama --model-size=debug --batch-size=3 --seq-len=96 --dataset=random-tokens",
    "transformer debug": "--model=transformer --batch-size=8 --seq-len=64 --dataset=random-tokens",
    "vit tiny": "--model=vit --model-size=tiny --batch-size=16 --test-batch-size=16",
    "cnn": "--model=cnn --batch-size=16 --test-batch-size=16",
    "llama 10m": "--model=llama --model-size=10m --batch-size=4 --seq-len=128 --dataset=random-tokens",
}
# transformers' families, by the arguments of their configurations.
# 301 rows are uneven on 2, 3 and 4 ranks, 100 on 3.
WIDTHS = {"vocab_size": 301, "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 3}
FAMILIES: dict[str, dict[str, int]] = {
    "llama": {**WIDTHS, "num_attention_heads": 4, "num_key_value_heads": 2},
    "mistral": {**WIDTHS, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen2": {**WIDTHS, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3": {**WIDTHS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12},
    "gemma": {**WIDTHS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12},
    "olmo2": {**WIDTHS, "num_attention_heads": 4, "num_key_value_heads": 2},
    "phi": {**WIDTHS, "num_attention_heads": 4},
    "gpt_neox": {**WIDTHS, "num_attention_heads": 4},
    "gpt2": {"vocab_size": 301, "n_embd": 48, "n_layer": 3, "n_head": 4},
    "opt": {
        "vocab_size": 301,
        "hidden_size": 48,
        "ffn_dim": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 48,
    },
}
# One found by chance, in which 8 bytes more were taken than planned.
TIED = ("hf qwen3 tied", "--grad-accumulation=5 --mixed-precision=bf16 --reduce-dtype=bf16 --shard-granularity=2", 2)
FAMILIES_TIED = {"qwen3 tied": {**FAMILIES["qwen3"], "tie_word_embeddings": True}}
HF = "--batch-size=4 --seq-len=64 --dataset=random-tokens"
OF_FAMILIES = (
    "",
    "--mixed-precision=bf16 --activation-checkpointing=block",
    "--lora=4",
    "--grad-accumulation=2 --clip-grad-norm --optimizer=adamw --fused-optimizer",
    "--chunked-loss=64 --reshard-after-forward=true --ema=0.99",
)
# Each against the defaults, alone and in pairs: two flags that change the same buffers are where a sum goes wrong.
FLAGS = (
    *("", "--mixed-precision=bf16", "--mixed-precision=fp16", "--mixed-precision=bf16 --reduce-dtype=bf16"),
    *("--activation-checkpointing=block", "--activation-checkpointing=op"),
    *("--reshard-after-forward=true", "--reshard-after-forward=false"),
    *("--shard-granularity=root", "--shard-granularity=2", "--shard-granularity=layer"),
    *("--explicit-prefetching=2", "--cpu-offload"),
    *("--grad-accumulation=2", "--grad-accumulation=2 --grad-accumulation-sync=last", "--clip-grad-norm"),
    *("--optimizer=sgd", "--optimizer=adamw --fused-optimizer", "--replicas=2", "--ema=0.99"),
    *("--chunked-loss=64", "--lora=4", "--global-batch-size=13", "--test-batch-size=128"),
)
# Meshes of 4 ranks, each with what else changes a rank's memory.
MESHES = ("--tp=2", "--sp=2", "--tp=2 --sp=2", "--tp=2 --replicas=2", "--sp=2 --replicas=2")
OF_MESHES = (
    "",
    "--mixed-precision=bf16",
    "--activation-checkpointing=block",
    "--activation-checkpointing=op --shard-granularity=layer",
    "--grad-accumulation=2 --clip-grad-norm --optimizer=adamw --fused-optimizer",
    "--grad-accumulation=2 --grad-accumulation-sync=last",
    "--cpu-offload",
    "--reshard-after-forward=true --ema=0.99",
    "--explicit-prefetching=2 --mixed-precision=bf16 --reduce-dtype=bf16",
)
MESHES_BEGIN = "<!-- meshes -->"
PAIRS = 150  # of those that there are
STEPS = 3
DATA_IS_THERE = "the data are there"  # in a trace


def main() -> None:
    parser = Parser(prog="benchmarks/plan_accuracy.py", allow_abbrev=False)
    parser.add_argument("--seconds", type=float, help="begin no row after so many")
    parser.add_argument("--only", help="rows whose model or flags have this in them; no page is written")
    parser.add_argument("--meshes", action="store_true", help="the rows of the page's section on --tp and --sp alone")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--rows", type=Path, default=ROWS, help="where rows are kept; those of another code are left")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    began, code = time.perf_counter(), digest()
    wanted = list(mesh_cases()) if given.meshes else cases()
    rows = {(row.model, row.flags, row.ranks): row for row in kept(given.rows, code)}
    with tempfile.TemporaryDirectory() as folder:
        pool = Ranks(Path(folder))
        try:
            for case in wanted:
                if given.seconds and time.perf_counter() - began > given.seconds:
                    break
                if case in rows or (given.only and given.only not in " ".join(map(str, case))):
                    continue
                row = point(pool, Path(folder) / "run", *case)
                if row is None:
                    continue
                rows[case] = row
                keep(given.rows, code, row)
                print(*case, row.problem or f"{row.error:+.2%}", sep="  ", flush=True)
        finally:
            pool.close()
    found = [rows[case] for case in wanted if case in rows]
    before, _, section = given.page.read_text().partition(MESHES_BEGIN)
    if found and given.meshes and not given.only:
        write_page(given.page, f"{before}{MESHES_BEGIN}\n{of_meshes(found)}")
    elif found and not given.only:
        write_page(given.page, f"{page(found, time.perf_counter() - began)}{MESHES_BEGIN}{section}")
        picture([row for row in found if not row.problem], given.page.with_suffix(".png"))


def digest() -> str:
    """Of the code that plans and runs: rows of another are not measured by this one."""
    found = hashlib.sha256("".join(versions()).encode())
    rooms = (ROOT / "fsdp2", ROOT / "fsdp2_extra", ROOT / "fsdp2_tools" / "plan")
    for file in sorted([*(path for room in rooms for path in room.rglob("*.py")), Path(__file__)]):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def kept(file: Path, code: str) -> Iterator[Row]:
    for line in file.read_text().splitlines() if file.exists() else ():
        content = json.loads(line)
        if content.pop("code") == code:
            yield Row(**{**content, "taken": tuple(content["taken"]), "allocated": tuple(content["allocated"])})


def keep(file: Path, code: str, row: Row) -> None:
    file.parent.mkdir(exist_ok=True)
    with open(file, "a") as out:
        print(json.dumps({"code": code, **dataclasses.asdict(row)}), file=out)


def cases() -> list[tuple[str, str, int]]:
    """(model, flags, ranks), in an order that is mixed and always the same: how many are run is a matter of time."""
    found = list(dict.fromkeys(all_cases()))
    random.Random(0).shuffle(found)
    return found


def all_cases() -> Iterator[tuple[str, str, int]]:
    """Every single flag, families of transformers, and pairs of flags dealt to models in turn."""
    for model, flags in itertools.product(MODELS, FLAGS):
        yield model, flags, 4 if "replicas" in flags else 2
    for number, (family, flags) in enumerate(itertools.product(FAMILIES, OF_FAMILIES)):
        yield f"hf {family}", flags, (2, 4, 3)[number % 3]
    yield TIED
    pairs = [" ".join(pair) for pair in itertools.combinations(FLAGS[1:], 2)]
    for number, flags in enumerate(random.Random(1).sample(pairs, PAIRS)):
        yield list(MODELS)[number % len(MODELS)], flags, 4 if number % 2 or "replicas" in flags else 2


def mesh_cases() -> Iterator[tuple[str, str, int]]:
    """Those of the section on meshes."""
    for number, (mesh, flags) in enumerate(itertools.product(MESHES, OF_MESHES)):
        model = "llama debug" if number % 2 or mesh == "--tp=2 --sp=2" else "llama 10m"  # its 6 heads aren't 4 parts
        yield model, f"{mesh} {flags}".strip(), 4


def flags_of(model: str, folder: Path) -> str:
    """Those that choose a model and its batches."""
    if model in MODELS:
        return MODELS[model]
    from transformers import AutoConfig

    family = model.removeprefix("hf ")
    place = folder / family.replace(" ", "-")
    sizes = FAMILIES.get(family) or FAMILIES_TIED[family]
    AutoConfig.for_model(family.split()[0], **sizes).save_pretrained(place)
    return f"--model=hf:{place} --init-from=scratch {HF}"


def weights_of(pool: Ranks, folder: Path, model: str) -> Path:
    """A run that has trained one step and left its weights, which adapters need."""
    run = folder / f"weights {model}"
    if not run.exists():
        words = [*flags_of(model, folder).split(), "--threads=1", "--device=cpu", "--max-steps=1", "--save-model"]
        pool.run(main_in_ranks, [*words, f"--run-dir={run}"], ranks=1)
    return run


def point(pool: Ranks, run: Path, model: str, flags: str, ranks: int) -> Row | None:
    """A row; None for two values of one flag."""
    if len({one.partition("=")[0] for one in flags.split()}) < len(flags.split()):
        return None
    words = [*flags_of(model, run.parent).split(), *flags.split(), "--threads=1", "--device=cpu"]
    words += [
        "--no-save-model",
        "--checkpoint-every=never",
        f"--max-steps={STEPS}",
        "--memory-snapshot",
        f"--run-dir={run}",
    ]
    if "--lora" in flags:
        words.append(f"--init-from={weights_of(pool, run.parent, model)}")
    line = list({word.partition("=")[0]: word for word in words}.values())  # a flag in place of the model's own
    row = Row(model, flags, ranks)
    if "--tp" in flags or "--sp" in flags:
        pool.close()  # torch keeps what it has made of a mesh for the life of a process
    try:
        config = parse(line)
        there = plan(config, ranks, None, None)
        allocated = pool.run(allocated_by, line, ranks=ranks)
        found = tuple(taken(run / f"rank{rank}_memory_timeline.json.gz") for rank in range(ranks))
    except ConfigError as error:
        return dataclasses.replace(row, problem=str(error))
    except pytest.fail.Exception as error:  # of a rank; the pool has new ones for the next point
        return dataclasses.replace(row, problem=str(error).strip().splitlines()[-1])
    finally:
        shutil.rmtree(run, ignore_errors=True)
    return dataclasses.replace(
        row,
        planned=there.tensors,
        with_gloo=there.bytes,
        phase=there.memory.peak.phase,
        taken=found,
        allocated=tuple(allocated),
    )


def allocated_by(flags: list[str]) -> int:
    """The most bytes that torch's CPU allocator gives this rank at once beyond the data, as torch's profiler tells."""
    load_data = data.load

    def marked(*arguments: Any, **settings: Any) -> Dataset:
        loaded = load_data(*arguments, **settings)
        with record_function(DATA_IS_THERE):
            return loaded

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(data, "load", marked):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
            main_in_ranks(flags)
        told.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    began = max(event["ts"] for event in events if event.get("name") == DATA_IS_THERE)
    memory = sorted((event["ts"], event["args"]["Total Allocated"]) for event in events if event["name"] == "[memory]")
    before = [total for when, total in memory if when <= began][-1]
    return max(total for when, total in memory if when > began) - before


def taken(file: Path) -> int:
    """The most that a rank held in its steps and evaluations; a checkpoint is apart."""
    line = load(file.read_bytes())
    total = most = 0
    for when, change, _ in line.changes():
        total += change
        if total > most and line.phase_at(when).name not in ("checkpoint", "full model", "between"):
            most = total
    return most


if __name__ == "__main__":
    with ending.exit_status():
        main()
