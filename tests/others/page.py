"""docs/models.md, from the rows of `tests.others.table`."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.others.table import Row

LOSSES = 1e-5  # relative; where it isn't bit for bit, sums are made in another order
KINDS = {
    "causal": "Causal language models of transformers",
    "masked": "Masked language models of transformers",
    "seq2seq": "Sequence to sequence models of transformers",
    "image": "Image classification models of transformers",
    "audio": "Audio classification models of transformers",
    "timm": "Image models of timm",
}
# What was reported elsewhere -> where, and the tests that hold it here.
UPSTREAM = [
    (
        "A tied weight is two after `to_empty`: the embedding gets half of its gradient, and no error tells",
        ["verl-project/verl#7834", "huggingface/accelerate#4171", "pytorch/torchtitan#2495"],
        [
            "tests/others/test_start.py::test_own_initial_values_are_those_of_the_seed_for_every_strategy",
            "tests/others/test_training.py::test_losses_are_those_of_a_plain_loop_and_of_a_resumed_run",
            "tests/test_weights.py::test_a_tied_weight_is_written_once",
        ],
    ),
    (
        "Buffers that no state dict holds, such as rotary tables, are garbage after `to_empty`",
        ["huggingface/transformers#45902", "NovaSky-AI/SkyRL#1709"],
        [
            "tests/others/test_start.py::test_the_weights_of_a_folder_are_there_on_any_number_of_ranks",
            "tests/others/test_start.py::test_a_buffer_that_is_made_of_a_parameter_is_an_error_and_never_garbage",
        ],
    ),
    (
        "Each rank loads the whole model into its memory",
        ["huggingface/transformers#43749", "huggingface/accelerate#2100", "pytorch/pytorch#104755"],
        [
            "tests/test_weights.py::test_a_rank_reads_what_it_keeps",
            "tests/test_weights.py::test_what_was_read_is_memory_of_the_process_no_longer",
        ],
    ),
    (
        "Optimizer state beside frozen parameters is dropped, or can't be loaded",
        ["pytorch/pytorch#192202", "huggingface/peft#338", "huggingface/transformers#31892"],
        [
            "tests/test_lora.py::test_it_goes_on_bit_for_bit",
            "tests/test_equalities.py::test_a_frozen_part_stays_as_it_was_under_every_strategy",
        ],
    ),
    (
        "The norm of gradients is a rank's own part of it",
        ["pytorch/pytorch#170862", "pytorch/pytorch#149768", "ByteDance-Seed/VeOmni#184"],
        [
            "tests/test_step.py::test_the_norm_is_that_of_the_full_gradients_also_on_several_meshes",
            "tests/test_step.py::test_clipping_bounds_the_norm_on_every_rank",
        ],
    ),
    (
        "`generate` finds shards where it needs weights: mixed torch.Tensor and DTensor",
        ["huggingface/transformers#42436", "huggingface/trl#4550"],
        [
            "tests/others/test_generate.py::test_generate_gives_the_tokens_of_one_process",
            "tests/others/test_generate.py::test_a_method_that_a_spec_lists_finds_its_parameters",
        ],
    ),
    (
        "The loss is a mean of means, where ranks or microbatches have unequal numbers of tokens",
        ["huggingface/transformers#24725", "huggingface/transformers#34191"],
        ["tests/test_text.py::test_the_loss_is_the_mean_over_all_targets_however_uneven"],
    ),
    (
        "Experts that one rank's tokens don't choose hang all ranks",
        ["pytorch/pytorch#158719", "pytorch/torchtitan#2747"],
        ["tests/others/test_experts.py::test_experts_that_one_rank_never_calls"],
    ),
]


def passed(row: Row) -> bool:
    """Whether all that a plain model does is done here, and the same."""
    in_bf16 = _close(row.bf16) or not row.plain_bf16
    recomputed = row.checkpointed or not row.plain_recompute
    found = row.started and _close(row.apart) and row.resumed and recomputed and in_bf16 and row.exported
    return not row.failed and bool(found)


def _close(gap: float | None) -> bool:
    return gap is not None and gap <= LOSSES


def page(rows: Sequence[Row]) -> str:
    """The page, of any number of rows; the last of an architecture counts."""
    rows = list({(row.kind, row.name): row for row in rows}.values())
    return "\n".join([*_head(rows), *_tables(rows), *_upstream()])


def _head(rows: Sequence[Row]) -> list[str]:
    lines = [
        "# Models of transformers and timm, one by one",
        "",
        f"`make models` writes this page ({sum(row.seconds for row in rows) / 60:.0f} minutes on {_machine()}). Last:",
        f"{datetime.date.today()}, {_versions()}, two gloo ranks. Every model is tiny; no line of `fsdp2/` is",
        "particular to one of them. Models of audio stand behind a function of one's own, which makes what they hear",
        "of pictures: `tests/others/audio.py`.",
        "",
        "| | known | train in the plain library | pass here | losses bit for bit |",
        "|---|---:|---:|---:|---:|",
    ]
    for kind, title in KINDS.items():
        mine = [row for row in rows if row.kind == kind]
        trains, good = [row for row in mine if row.plain], [row for row in mine if passed(row)]
        equal = sum(row.apart == 0.0 for row in good)
        share = f"{len(good)} ({100 * len(good) / len(trains):.1f} %)" if trains else "0"
        lines.append(f"| {title} | {len(mine)} | {len(trains)} | {share} | {equal} |")
    lines += [
        "",
        "What the columns say:",
        "",
        "A model passes with yes in each of them. Recomputation and bf16 count where the plain library has them.",
        "",
        "- *groups*: on how many sets of modules `fully_shard` was called, the root included.",
        "- *start*: every parameter and buffer, also one that no state dict holds, is on both ranks that of the plain",
        "  model before the first step. Memory is NaN until it is set.",
        "- *losses*: five steps on two ranks beside a plain loop of the library in one process: `=` is bit for bit, a",
        "  number is the largest relative difference.",
        "- *resume*: steps 4 and 5 from the checkpoint of step 3, bit for bit. *recompute*: all five with",
        "  `--activation-checkpointing`, bit for bit.",
        "- *bf16*: all five with `--mixed-precision` beside a plain loop that rounds its fp32 weights to bf16 for each",
        "  forward; as for losses.",
        "- *export*: a process without this package loads what was exported, a model of transformers by",
        "  `from_pretrained`, and each tensor is that of the run, bit for bit.",
        "- *weights*: the largest difference of a parameter that it loads from one that the plain loop has trained.",
        "  Adam divides by the size of a gradient: where that is rounding alone, the step isn't.",
        "",
    ]
    return lines


def _tables(rows: Sequence[Row]) -> list[str]:
    lines: list[str] = []
    for kind, title in KINDS.items():
        mine = sorted((row for row in rows if row.kind == kind), key=lambda row: row.name)
        if not mine:
            continue
        lines += [f"## {title}", ""]
        if tried := [row for row in mine if row.plain]:
            lines += [
                "| | parameters | groups | start | losses | resume | recompute | bf16 | export | weights | |",
                "|---|---:|---:|---|---|---|---|---|---|---|---|",
                *map(_line, tried),
                "",
            ]
        if others := [row for row in mine if not row.plain]:
            lines += ["Not tried, since the plain library doesn't train what a small configuration makes of it:", ""]
            lines += [*(f"- {row.name}: {_text(row.failed)}" for row in others), ""]
    return lines


def _line(row: Row) -> str:
    cells: list[Any] = [row.name, f"{row.parameters:,}", row.groups or "", _yes(row.started), _gap(row.apart)]
    why = "; ".join(filter(None, (row.failed, *row.notes)))
    cells += [_yes(row.resumed), _yes(row.checkpointed), _gap(row.bf16), _yes(row.exported)]
    cells += [_gap(row.trained), _text(why)]
    return "| " + " | ".join(map(str, cells)) + " |"


def _upstream() -> list[str]:
    lines = [
        "## Reported elsewhere, held here",
        "",
        "Faults that others met with models like these, and the tests that would fail if this repository had them:",
        "",
        "| | where | tests |",
        "|---|---|---|",
    ]
    for what, places, tests in UPSTREAM:
        links = (
            f"[{place}](https://github.com/{place.replace('#', '/pull/' if place in PULLS else '/issues/')})"
            for place in places
        )
        lines.append(f"| {what} | {', '.join(links)} | {', '.join(f'`{test}`' for test in tests)} |")
    return lines


PULLS = {"huggingface/accelerate#4171", "huggingface/transformers#42436", "huggingface/transformers#34191"}


def _machine() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else platform.machine()}"


def _versions() -> str:
    import timm
    import transformers

    return f"transformers {transformers.__version__}, timm {timm.__version__}, torch {torch.__version__}"


def _gap(value: float | None) -> str:
    return "" if value is None else "=" if value == 0 else f"{value:.0e}"


def _yes(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "**no**"


def _text(why: str) -> str:
    return why[:200].replace("|", "/").replace("<", "‹").replace(">", "›")
