"""How far what `fsdp2.plan` says of time and memory is from what others have measured on GPUs: make plan-published

Each row of published.toml is planned with its configuration. `--fit` prints the efficiencies that suit the rows marked
`fit` best; the rows that aren't marked are the test.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
from tables import write_page

sys.path.insert(0, str(Path(__file__).parent.parent))

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fsdp2.compare.report import markdown_table
from fsdp2.config import Config, parse
from fsdp2.models import llama
from fsdp2.options.parser import Parser
from fsdp2.parallel import activation_checkpointing
from fsdp2.parallel.optimizer import FUSED
from fsdp2.plan.device import TABLE, Gpu, gpu_of, terms
from fsdp2.plan.execute import STEPS
from fsdp2.plan.memory import Runs, memory_of, run
from fsdp2.plan.steptime import StepTime, step_time
from fsdp2.plan.work import COMPUTE, COPY_OUT, KERNEL, REDUCE_IN
from fsdp2.run import ending

PUBLISHED = Path(__file__).with_name("published.toml")
PAGE = Path(__file__).parent.parent / "docs" / "notes" / "plan-published.md"
GIB = 2**30


@dataclasses.dataclass
class Row:
    """A point that was planned. `runs` are kept for a fit."""

    point: Mapping[str, Any]
    config: Config
    gpu: Gpu
    runs: Runs
    time: StepTime
    bytes: int

    @property
    def tokens(self) -> float:
        assert self.time.tokens_per_second is not None
        return self.time.tokens_per_second / self.point["ranks"]

    @property
    def error(self) -> float:
        return float(self.tokens / self.point["tokens"] - 1)


def main() -> None:
    parser = Parser(prog="benchmarks/plan_published.py", allow_abbrev=False)
    parser.add_argument("--only", help="points whose source, GPU or shape has this in them")
    parser.add_argument("--fit", action="store_true", help="fit efficiencies too; writes no page")
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    content = tomllib.loads(PUBLISHED.read_text())
    gpus = tables(content["gpus"])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for point in content["point"]:
            if given.only and given.only not in f"{point['source']} {point['gpu']} {point['shape']}":
                continue
            if given.fit and not point.get("fit"):
                continue
            rows.append(row(point, content["shapes"], gpus, Path(folder), keep=given.fit))
            print(line(rows[-1]), flush=True)
    if given.fit:
        fit(rows)
    elif rows:
        print("\n".join(summary(rows)))
        if not given.only:
            write_page(given.page, page(rows))


def tables(own: Mapping[str, Any]) -> dict[str, Gpu]:
    """GPUs of the planner's table, and those of the file that are like one of them."""
    known = tomllib.loads(TABLE.read_text())
    for name, values in own.items():
        known[name] = {**known[values["like"]], **{key: value for key, value in values.items() if key != "like"}}
    return {name: gpu_of(name, values, name) for name, values in known.items()}


def row(
    point: Mapping[str, Any], shapes: Mapping[str, Any], gpus: Mapping[str, Gpu], folder: Path, *, keep: bool
) -> Row:
    config = parse([*model(point, shapes, folder), *point["flags"].split(), "--test-batch-size=1"])
    config = dataclasses.replace(config, fused_optimizer=config.optimizer in FUSED)
    gpu, ranks = gpus[point["gpu"]], point["ranks"]
    assert gpu.speed is not None, f"{gpu.name} has no rates"
    with ExitStack() as changed:
        if point.get("op_keeps") == "every second":
            changed.enter_context(every_second())
        runs = run(config, ranks, 0, gloo=False)
    memory = memory_of(config, 0, runs, offload_apart=True)
    used = memory.peak.bytes + sum(term.bytes for term in terms(config, ranks, memory))
    found = Row(point, config, gpu, runs, step_time(config, ranks, runs, gpu.speed), used)
    if not keep:
        found.runs = Runs(found.runs.longer, None, 0)
        found.runs.longer.work.clear()
    return found


def model(point: Mapping[str, Any], shapes: Mapping[str, Any], folder: Path) -> list[str]:
    """Flags that choose a point's model."""
    name = point["shape"]
    shape = shapes.get(name, {})
    if "gpt2" not in shape:
        llama.SIZES.update({name: shape["llama"]} if shape else {})
        return ["--model=llama", f"--model-size={name}"]
    from transformers import GPT2Config

    length = next(flag.partition("=")[2] for flag in point["flags"].split() if flag.startswith("--seq-len="))
    numbers = {"vocab_size": 50368, "activation_function": "gelu", "n_positions": int(length)}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    GPT2Config(**shape["gpt2"], **numbers, **drops).save_pretrained(folder / f"{name}-{length}")
    return [f"--model=hf:{folder / f'{name}-{length}'}", "--init-from=scratch"]


@contextmanager
def every_second() -> Iterator[None]:
    """torchtitan's selective recomputation: as ours by operator, but of the matrix products it keeps every second."""

    def contexts(_: Any) -> Any:
        seen = {False: 0, True: 0}

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op == torch.ops.aten.mm.default:
                seen[ctx.is_recompute] += 1
                if seen[ctx.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            kept = op in activation_checkpointing.EXPENSIVE
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    with mock.patch.object(activation_checkpointing, "create_selective_checkpoint_contexts", contexts):
        yield


def line(row: Row) -> str:
    point = row.point
    inside = row.time.high >= row.time.milliseconds * row.tokens / point["tokens"] >= row.time.low
    return (
        f"{point['gpu']:16} {point['ranks']:4} {point['shape']:12} {row.tokens:8,.0f} of {point['tokens']:8,} "
        f"{row.error:+7.1%} {'' if inside else 'outside'} exposed {row.time.exposed_ms / row.time.milliseconds:.0%} "
        f"idle {row.time.idle_ms / row.time.milliseconds:.0%} {row.bytes / GIB:.1f} GiB {point.get('gib', '')} "
        f"{point.get('apart', '')} {'(fit)' * point.get('fit', False)}"
    )


# What a fit tries.
GRID = {
    "matrix": [x / 100 for x in range(44, 92, 2)],
    "attention": [x / 100 for x in range(14, 72, 3)],
    "memory": [x / 100 for x in range(45, 96, 5)],
}


def fit(rows: Sequence[Row]) -> None:
    """Print for each kind of GPU the efficiencies that leave the least sum of squared errors, all others as they are.

    Only the computation is fitted: in the points for it exchanges are hidden.
    """
    for kind in dict.fromkeys(row.point["gpu"].split("-")[0] for row in rows):
        some = [(row, operators(row)) for row in rows if row.point["gpu"].split("-")[0] == kind]
        best = min(
            (sum(math.log1p(off(row, table, values)) ** 2 for row, table in some), values)
            for values in itertools.product(*GRID.values())
        )[1]
        errors = ", ".join(f"{row.point['shape']} {off(row, table, best):+.1%}" for row, table in some)
        print(kind, dict(zip(GRID, best, strict=True)), errors)


def operators(row: Row) -> Any:
    """A row for each operator of the computation of a step: FLOPs, bytes, how often, and 0 to 2 by what bounds it."""
    found = []
    for done, times in ((row.runs.longer, 1 + row.runs.times), (row.runs.short, -row.runs.times)):
        if done is None:
            continue
        phases = done.timeline.phases
        starts = [i for i, phase in enumerate(phases) if (phase.step, phase.name) == (STEPS, "forward")]
        for work in done.work:
            phase = phases[work.phase]
            if phase.step == STEPS and phase.name != "evaluation" and work.role in (COMPUTE, COPY_OUT, REDUCE_IN):
                again = max(1, row.config.grad_accumulation - 2)
                often = again if len(starts) == 3 and starts[1] <= work.phase < starts[2] else 1
                assert row.gpu.speed is not None
                seconds = work.flops / row.gpu.speed.flops[work.dtype]
                found.append((seconds, work.bytes / row.gpu.speed.memory, often * times, list(GRID).index(work.kind)))
    return numpy.array(found, dtype=float)


def off(row: Row, table: Any, values: Sequence[float]) -> float:
    """The error of tokens/s with these efficiencies, as a part."""
    seconds, moved, often, kind = table.T
    computed = seconds / numpy.choose(kind.astype(int), values)
    total = (numpy.maximum(numpy.maximum(computed, moved / values[2]), KERNEL) * often).sum()
    config = row.config
    return float(config.batch_size * config.grad_accumulation * config.seq_len / total / row.point["tokens"] - 1)


def ranks_of(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    found = [0.0] * len(values)
    for rank, index in enumerate(order):
        found[index] = rank
    return found


def spearman(rows: Sequence[Row]) -> float:
    """Of the order of configurations by tokens: 1 if planned and measured are the same."""
    return statistics.correlation(ranks_of([r.tokens for r in rows]), ranks_of([r.point["tokens"] for r in rows]))


def summary(rows: Sequence[Row]) -> list[str]:
    """How far the plans are off: of the blind test, of all points that weren't fitted, and by source and GPU."""
    counted = [row for row in rows if "apart" not in row.point]
    tests = [row for row in counted if not row.point.get("fit")]
    blind = [row for row in tests if row.point.get("blind")]
    found = [
        f"- Points: {len(counted)}; {len(counted) - len(tests)} for the fit, {len(tests)} to test it, "
        f"of which {len(blind)} were planned for the first time when the fit was closed",
    ]
    for name, some in (("Blind test", blind), ("All test points", tests)):
        if some:
            found.append(f"- {name}: {errors(some)}")
    right = pairs(tests)
    found.append(
        f"- Pairs of test points of one model, GPU and source that differ by more than 5 %: {len(right)}, of which "
        f"{sum(right)} are planned in the right order"
    )
    for key, name in (("source", "By source"), ("gpu", "By GPU")):
        found.append(f"- {name}, test points:")
        groups = dict.fromkeys(row.point[key] for row in tests)
        found += [f"    - {group}: {errors([row for row in tests if row.point[key] == group])}" for group in groups]
    return found


def pairs(rows: Sequence[Row]) -> list[bool]:
    """Whether the order is right, for two settings of a model: models of different sizes are easily told apart."""
    return [
        (one.tokens > other.tokens) == (one.point["tokens"] > other.point["tokens"])
        for one, other in itertools.combinations(rows, 2)
        if all(one.point[key] == other.point[key] for key in ("shape", "gpu", "source"))
        and abs(math.log(one.point["tokens"] / other.point["tokens"])) > math.log(1.05)
    ]


def errors(rows: Sequence[Row]) -> str:
    """Of tokens/s: how large they are, whether they lie on one side, and whether the order of points is right."""
    sizes = [abs(row.error) for row in rows]
    worst = max((row.error for row in rows), key=abs)
    order = f", rank correlation {spearman(rows):.3f}" if len(rows) > 2 else ""
    return (
        f"{len(rows)} points, median error {statistics.median(sizes):.1%}, mean "
        f"{statistics.mean(row.error for row in rows):+.1%}, worst {worst:+.1%}, within 15 %: "
        f"{sum(size <= 0.15 for size in sizes)}, in the planned range: {sum(_inside(row) for row in rows)}{order}"
    )


def _inside(row: Row) -> bool:
    needed = row.time.milliseconds * row.tokens / row.point["tokens"]
    return row.time.low <= needed <= row.time.high


def page(rows: Sequence[Row]) -> str:
    def cells(row: Row) -> tuple[str, ...]:
        point, each = row.point, row.point["tokens"]
        role = "not counted" if "apart" in point else next((one for one in ("fit", "blind") if point.get(one)), "test")
        shown = " ".join(flag for flag in point["flags"].split() if not flag.startswith(COMMON))
        notes = [f"{point.get('apart')} is left out" * ("apart" in point), "keeps every second" * ("op_keeps" in point)]
        memory = f"{row.bytes / GIB:.1f} of {point['gib']}" if "gib" in point else f"{row.bytes / GIB:.1f}"
        what = f"`{shown}` {'; '.join(note for note in notes if note)}".strip()
        exposed = row.time.exposed_ms / row.time.milliseconds
        numbers = (f"{row.tokens:,.0f}", f"{each:,}", f"{row.error:+.1%}", f"{exposed:.0%}")
        return (point["gpu"], str(point["ranks"]), point["shape"], what, *numbers, role, memory)

    head = (
        "GPU",
        "ranks",
        "model",
        "flags",
        "planned tokens/s a GPU",
        "published",
        "error",
        "exposed",
        "role",
        "GiB planned",
    )
    sources = "\n".join(f"- {source}" for source in dict.fromkeys(row.point["source"] for row in rows))
    return f"""\
# Planned time beside published figures

Written by `make plan-published`, which plans each point of `benchmarks/published.toml` with its configuration.

{NEWLINE.join(summary(rows))}
- Date: {time.strftime("%Y-%m-%d")}
- Versions: torch {torch.__version__}; the published runs used those of their time, 2023 to 2026

Efficiencies of an H100 and an A100 were fitted on the points marked *fit*; an H200 has those of an H100. The flags
`--mixed-precision=bf16 --optimizer=adamw --clip-grad-norm`, which all points have, aren't repeated.

What stands against a figure:

- Several fits are nearly equal on the *fit* points. One was chosen with the errors of the *test* points in view. The
  *blind* points were added afterwards and have changed nothing: all rows of llm-foundry's table for 128 GPUs and more,
  and every sixth of those rows of its other tables in bf16 that weren't in use. They share their source with points of
  the fit; `By source` has the others.
- Nearly all points are bound by computation: `exposed` is the part of the planned step that waits for exchanges. No
  published figure of FSDP was found that is bound by exchanges and says its network, model, batch and recomputation.
- MPT is planned as GPT-2 of the same widths. llm-foundry ran it with FSDP1, and with a flash attention of 2023.
- torchtitan's selective recomputation keeps every second product of matrices; the plans do so too.
- The rows that use `torch.compile` are planned without it, shown, and not counted: a plan can't see what it fuses.
- The network's bandwidth is published for torchtitan's H100 and IBM's clusters, and assumed for the others.
- Left out are rows with tensor, context or pipeline parallelism or float8, which `fsdp2.train` doesn't have.
- The GiB planned are what a device holds, with the terms of [plan.md](../plan.md). Published is what a run reserved.

Sources:

{sources}

{markdown_table(head, [cells(row) for row in rows])}
"""


NEWLINE = "\n"
COMMON = ("--mixed-precision=bf16", "--optimizer=adamw", "--clip-grad-norm")


if __name__ == "__main__":
    with ending.exit_status():
        main()
