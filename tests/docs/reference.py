"""The reference pages of the documentation, made from the code:  python -m tests.docs.reference"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable
from pathlib import Path

from fsdp2 import models
from fsdp2.config import parser
from fsdp2.options.parser import SHORT
from tests.docs import commands, figures, shown_code

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MADE = "Made by `python -m tests.docs.reference`; a test compares it with the code.\n"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def flags_page() -> str:
    """Every flag of fsdp2.train by section, those of the other commands, and every named size of every model."""
    parts = [
        "# Commands, flags and sizes\n",
        "The flags of `fsdp2.train` are the same under torchrun, through Ray, in a file for `--config`, and as the "
        "fields of `fsdp2.config.Config`, with `_` for `-`. A wrong flag, value or combination ends a command before "
        "it starts anything, in a line that names the flag and the fix. `--help` after any command prints its list. "
        "[The other commands](#the-other-commands) and [the sizes of models](#sizes-model-size) stand below.\n",
        MADE,
    ]
    for group in parser()._action_groups:
        actions = [action for action in group._group_actions if "--help" not in action.option_strings]
        if not actions:
            continue
        title = (group.title or "").removesuffix(":")
        parts.append(f"## {title[0].upper()}{title[1:]}\n" if title != "options" else "## General\n")
        parts.append(_flag_table(actions))
    parts += _other_commands()
    parts.append("## Sizes: `--model-size`\n")
    parts.append("The first of each table is the default. Parameters are counted; tied weights once.\n")
    for name in models.NAMES:
        spec = models.get(name)
        rows = [
            [f"`{size}`", f"{sum(p.numel() for p in spec.on_meta(size).parameters()):,}", _numbers(numbers)]
            for size, numbers in spec.sizes.items()
        ]
        parts += [f"### `--model {name}`\n", table(["size", "parameters", "numbers"], rows)]
    return "\n".join(parts)


def _other_commands() -> list[str]:
    """What each other command is for, and the flags that it alone has."""
    parts = ["## The other commands\n", "Each after `python -m`.\n"]
    of_others: dict[str, set[str]] = {}
    for one in commands.parsers():
        assert one.description, f"{one.prog} --help doesn't say what it is for"
        actions = [action for action in one._actions if action.dest != "help"]
        flags = {flag for action in actions for flag in action.option_strings}
        taken = [name for name, known in of_others.items() if known <= flags]
        inherited = set().union(*(of_others[name] for name in taken))
        own = [action for action in actions if not inherited & set(action.option_strings)]
        if one.prog != commands.FIRST:
            text = _plain(" ".join(one.description.partition(SHORT)[0].split())).rstrip(".")
            beside = f" It also takes the flags of `{taken[-1].removeprefix('python -m ')}`." if taken else ""
            parts += [
                f"### `{one.prog.removeprefix('python -m ')}`\n",
                f"{text[0].upper()}{text[1:]}.{beside}\n".replace("?.", "?"),
            ]
            parts += [_flag_table(own)] if own else []
        if one.prog in (commands.FIRST, commands.RAY):
            of_others[one.prog] = flags
    return parts


def _flag_table(actions: list[argparse.Action]) -> str:
    mute = [_flag(action) for action in actions if not action.help]
    assert not mute, f"flags without a word of help: {mute}"
    return table(["flag", "what it does"], [[_flag(action), _plain(action.help or "")] for action in actions])


def _flag(action: argparse.Action) -> str:
    name = (action.option_strings or [str(action.metavar or action.dest)])[0]
    if not action.option_strings:
        return ", ".join(f"`{one}`" for one in name.split("|")) + (" …" if action.nargs == "+" else "")
    if isinstance(action, argparse.BooleanOptionalAction):
        return f"`{name}`, `{action.option_strings[1]}`"
    if action.nargs == 0:
        return f"`{name}`"
    value = str(action.metavar or ("|".join(map(str, action.choices)) if action.choices else "VALUE"))
    if "|" in value:  # which a table would take for the end of a cell
        bare = " alone, or with" if action.nargs == "?" else ""
        return f"`{name}`{bare} " + ", ".join(f"`{one}`" for one in value.split("|"))
    return f"`{name} [{value}]`" if action.nargs == "?" else f"`{name} {value}`"


def _plain(text: str) -> str:
    text = text.replace("%%", "%")
    return re.sub(r"(?<![\w`])(--[a-z][a-z0-9_-]+(?: (?:[A-Z]{2,}\b|cpu\b|\w+:\w*))?)", r"`\1`", text)


def _numbers(numbers: object) -> str:
    assert hasattr(numbers, "items")
    return ", ".join(f"{key} {value}" for key, value in numbers.items())


# kind -> field -> what it is. A field in brackets stands in some records of that kind alone.
RECORDS: dict[str, dict[str, str]] = {
    "start": {
        "header": "the lines that open a run on the console",
        "step": "optimizer steps done before it",
        "epoch": "epochs done before it",
        "random_state_restored": "whether each rank goes on with its own random state",
        "note": "lines about what was cleaned, set aside or left out, or null",
        "[bad_samples]": "by place, how many `--bad-samples drop` leaves out: `too_long`, `no_answer`, `refused`",
    },
    "resume": {
        "header, step, epoch, random_state_restored, note, [bad_samples]": "as in `start`",
        "checkpoint": "the checkpoint that was loaded",
        "restore_seconds": "how long that took",
    },
    "train": {
        "step": "counted from 1, in optimizer steps",
        "epoch": "counted from 0",
        "step_in_epoch": "counted from 1",
        "loss": "mean over the global batch, in full precision",
        "lr": "learning rate of the first parameter group",
        "grad_norm": "over all ranks, before clipping",
        "samples": "in this step over all ranks",
        "step_ms": "wall time, without evaluations and saves",
        "samples_per_second": "over all ranks",
        "[tokens_per_second]": "of language models, without what conversations leave empty of a sequence",
        "[tflops], [mfu]": "of each GPU",
        "[loss_scale], [skipped]": "of fp16's gradient scaler; `skipped` also with `--on-nonfinite skip`",
        "peak_memory_bytes": "of rank 0: allocated on its GPU, else resident in its process",
    },
    "eval": {
        "step, epoch": "as in `train`",
        "loss": "mean over the test set",
        "accuracy": "from 0 to 1",
        "count": "targets that were evaluated",
        "[perplexity]": "of language models",
    },
    "checkpoint": {
        "step, epoch": "of the state that was saved",
        "path": "where it is",
        "seconds": "until it was committed",
        "stall_seconds": "that training waited",
    },
    "checkpoint_skipped": {"step": "of the save that was skipped", "reason": "why"},
    "anomaly": {
        "step": "after which it was found",
        "about": "`loss` or `grad_norm` for a jump, `replicas` that differ, `pace` for a rank that others wait for",
        "what": "a line about it",
        "[ranks]": "that it names; one about `pace` is an event of rank 0 alone",
    },
    "compiled": {
        "step": "after which it was counted: with `--compile` the first of a process, and each with something new in "
        "`left_out`",
        "graphs": "that torch has compiled of rank 0's blocks so far; 0: the model runs as without `--compile`",
        "left_out": "why blocks, or parts of them, are not compiled: a list of torch's reasons",
        "what": "a line about it",
    },
    "failure": {
        "[rank], [step]": "where it was noticed; of a peer that rank 0 lost, that rank's own line has the cause",
        "error": "the message",
        "[continues]": "true if training goes on",
    },
    "end": {
        "step, epoch": "reached",
        "steps": "of this process",
        "reason": "`finished`, `already finished`, a signal's name, or `the launcher (torchrun) has gone`; `, on "
        "another node` follows if no rank of rank 0's node was asked",
        "accuracy": "of the last evaluation, or null",
        "run_dir": "path or URL",
        "full_model_left_out_bytes": "size of the full model if it was too large to be written unasked, else null",
        "left": "`full model` (and checkpoints), `checkpoint` or `adapters` (without a full model), or null: nothing, "
        "by `--checkpoint-every never`",
        "seconds": "from the first line to the last",
        "nonfinite_steps": "steps whose loss or gradient norm was NaN or infinite",
        "peak_memory_bytes": "as in `train`",
    },
}

VARIABLES = {
    "FSDP2_REMOTE_ATTEMPTS": "6: how often an operation on an object store is tried",
    "FSDP2_REMOTE_TIMEOUT": "60: seconds until a silent connection to a store is given up",
    "FSDP2_LEASE_SECONDS": "30: after this time without a sign of life a run at a URL is taken over",
    "AWS_ENDPOINT_URL_S3": "the S3 server, if it isn't Amazon's; then `AWS_ENDPOINT_URL`",
    "TMPDIR": "where a shard is collected before it is uploaded",
    "XDG_CACHE_HOME": "downloads and tokenised text are below its folder `fsdp2`; unset, below `~/.cache`",
    "CUDA_VISIBLE_DEVICES": "which GPUs a process sees",
    "CUBLAS_WORKSPACE_CONFIG": "`--deterministic` sets it to `:4096:8` unless you do",
    "OMP_NUM_THREADS": "threads of a rank where `--threads` is unset; of several ranks 1 doesn't count, as "
    "torchrun sets it. Setting it keeps torchrun from warning",
    "CC": "the C compiler of `--compile` on a GPU",
    "CXX": "the C++ compiler of `--compile` on a CPU, and of DeepSpeed",
    "WANDB_MODE": "`offline`: `--track wandb` writes a folder and needs no login; with `WANDB_API_KEY`, "
    "`WANDB_BASE_URL`, `WANDB_DIR`, `WANDB_ENTITY` and `WANDB_PROJECT` as W&B reads them",
    "MLFLOW_TRACKING_URI": "where `--track mlflow` writes; with `MLFLOW_TRACKING_TOKEN`, `MLFLOW_TRACKING_USERNAME`, "
    "`MLFLOW_TRACKING_PASSWORD`, `MLFLOW_EXPERIMENT_ID` and `MLFLOW_EXPERIMENT_NAME` as MLflow reads them",
    "RANK": "with `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`: set by torchrun",
}

FILES = """\
```text
RUN/
  config.json                 flags and environment; --config reads the flags back, except run-dir and resume
  plan.json                   what python -m fsdp2.plan --run-dir said, if it was asked
  metrics.jsonl               one JSON object a line
  hang.txt                    where each rank stood, if the run hung
  checkpoints/step-00000120/  __0_0.distcp …, .metadata, and COMMIT.json, written last
  full_model/                 full-model.pt, full-optimizer.pt, and their COMMIT.json
  model/                      the model's configuration and tokenizer
  tokenizer/                  with --tokenizer, that one
  tracking.json               with --track, the id by which a resume goes on in the trackers' runs
  tensorboard/, wandb/, mlruns/                                   with --track, where nothing else says where
  rank0_memory_timeline.json.gz, rank0_memory_snapshot.pickle     with --memory-snapshot
  rank0_trace.json.gz, rank0_memory_profile.html                  with --profile
```
"""

EXIT = [
    ["0", "the run ended by itself, or was stopped by a signal to its ranks and has saved"],
    ["1", "the run stopped: a failed save, NaN or infinity, a rank that failed, a launcher that is gone; a check that "
     "found a difference (`checkpoint verify`, `checkpoint diff`, `migrate check`, `migrate prove`)"],
    ["2", "refused before anything was started: one line names the flag, what would go wrong and the fix"],
    ["3", "a step took far longer than those before: a line names the rank that the others waited for"],
    ["130", "Ctrl-C before the first step, in a tool, or under Ray"],
]  # fmt: skip


TRACK = """\
```bash
pip install -e '.[wandb,mlflow,tensorboard]'   # those that you use
torchrun --nproc_per_node 2 -m fsdp2.train --track wandb,mlflow --run-name first --tag data=digits
```

`--track` also writes a run to Weights & Biases, MLflow or TensorBoard. Each is told the flags, the run's name and
tags, the numbers of every `train` and `eval` record as `train/loss`, `eval/accuracy` and so on, and those of `end`.
Rank 0 alone writes, in threads of its own: losses are the same bit for bit, and training doesn't wait.
**`metrics.jsonl` stays the truth.** A tracker that fails is left out, in a line on stderr that says why and what to
do; at the end of a run one that doesn't answer is waited for 30 seconds. What a tracker's library keeps to itself,
such as a figure that its server drops, isn't noticed here.
"""

TRACKERS = [
    [
        "`wandb`",
        "the project `WANDB_PROJECT`, else `fsdp2`; its own files in `RUN/wandb`, or `WANDB_DIR`",
        "`WANDB_MODE=offline`, and later `wandb sync` with the folder that the run prints",
    ],
    [
        "`mlflow`",
        "the server or `file:` folder `MLFLOW_TRACKING_URI`, else `RUN/mlruns`; the experiment "
        "`MLFLOW_EXPERIMENT_NAME`, else `fsdp2`",
        "unset, or `file:/some/folder`; what reads it needs `MLFLOW_ALLOW_FILE_STORE=true`",
    ],
    ["`tensorboard`", "`RUN/tensorboard`; name, tags and flags are a text there", "always"],
]

RESUMED = """\
A run never asks for a login: without one `--track wandb` is refused before anything is started. So are a name that no
tracker has, a missing extra, and `--tag` or `--run-name` without a tracker. For a run at a URL, `RUN` is [its local
folder](remote.md). Under Ray, workers take over the [variables](#environment-variables) of a run's trackers, keys
included, from the program that starts them.

**A resume goes on in the same runs**, on any number of ranks, also after a kill: `tracking.json` in the run directory
has an id by which they are found again, and nothing else is read from it. `--resume never` and `--resume-partial`
begin other ones. Of steps that are done again TensorBoard shows the later figures; W&B and MLflow have both at the
same step, the later one last (W&B's axis is `step`). MLflow can't change a parameter: a flag that a resume changes is
the tag `fsdp2-FLAG`. Offline, W&B has a folder for each start; `wandb sync` uploads those of one run in their order.
The tests run the three without a network; against a server of W&B or MLflow nothing was tried.
"""


def run_page() -> str:
    """The run directory, metrics.jsonl, environment variables and exit codes."""
    parts = [
        "# Run directory, metrics, environment variables, exit codes\n",
        MADE,
        "## The run directory\n",
        FILES,
        "A run makes its directory, `runs/<model>-<time>` unless `--run-dir` names one. **It keeps the three newest "
        "checkpoints and deletes older ones**: `--keep` and `--keep-every` change that. [What is in a "
        "checkpoint](state-dicts.md), [how it is committed](notes/commit.md), [a run at a URL](remote.md).\n",
        "## `metrics.jsonl`\n",
        "Each line has a `kind`, and the `time` of its writing in seconds since 1970. A line may "
        "be written one step late, so that a GPU isn't kept waiting. A resume cuts "
        "the file back to its checkpoint, so each step stands in it once. NaN and infinity are written as `null`.\n",
    ]
    for kind, fields in RECORDS.items():
        rows = [[re.sub(r"\w+", lambda name: f"`{name[0]}`", names), text] for names, text in fields.items()]
        parts += [f"### `{kind}`\n", table(["field", "what it is"], rows)]
    parts.append("In brackets: only in some records.\n")
    parts += ["## Trackers\n", TRACK, table(["tracker", "where it writes", "without a network"], TRACKERS), RESUMED]
    parts.append("## Environment variables\n")
    parts.append(table(["variable", "default and meaning"], [[f"`{name}`", text] for name, text in VARIABLES.items()]))
    parts.append("## Exit codes\n")
    parts.append(table(["status", "of `python -m fsdp2.…`"], EXIT))
    parts.append(
        "torchrun ends with 1 if a rank ended with anything but 0, and prints a summary of its own below the line of "
        "rank 0. [Which signal does what](notes/signals.md).\n"
    )
    return "\n".join(parts)


RESULTS = {
    "A step": ("step-benchmark.md", "benchmarks/steps.py"),
    "A save": ("checkpoint-benchmark.md", "benchmarks/checkpoint.py"),
    "Memory savers": ("savers-benchmark.md", "fsdp2.compare"),
    "Ray beside torchrun": ("ray-benchmark.md", "benchmarks/ray_cost.py"),
}


def benchmarks_page() -> str:
    """The first table of each result page."""
    parts = [
        "# Benchmarks\n",
        MADE,
        "Each table is taken from the page that its benchmark writes, with its date, machine and versions. **Nothing "
        "was measured on a GPU**: `make bench-gpu` [does it](notes/gpu.md). Times of a CPU that other programs share "
        "tell ratios, not speed.\n",
    ]
    for title, (name, script) in RESULTS.items():
        text = (DOCS / "notes" / name).read_text()
        date = re.search(r"^- Date: (.*)$", text, re.MULTILINE)
        machine = re.search(r"^- Machine: (.*)$", text, re.MULTILINE)
        versions = re.search(r"^- Versions: (.*)$", text, re.MULTILINE)
        first = re.search(r"^\|.*\n\|[ :|-]+\n(?:\|.*\n?)+", text, re.MULTILINE)
        assert date
        assert machine
        assert versions
        assert first
        parts += [
            f"## {title}\n",
            f"`{script}`, {date[1]}; {machine[1]}; {versions[1]}. [The whole page](notes/{name}).\n",
            first[0],
        ]
    parts.append(
        "More: [strategies and memory savers](comparison.md), [many ranks](notes/scale.md), "
        "[architectures](models.md).\n"
    )
    return "\n".join(parts)


PAGES: dict[str, Callable[[], str]] = {
    "flags.md": flags_page,
    "run-directory.md": run_page,
    "benchmarks.md": benchmarks_page,
    **{page: functools.partial(figures.filled, page) for page in figures.TABLES},
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
    for name in shown_code.NOTEBOOKS:
        try:
            (DOCS / name).write_text(shown_code.printed_again(name))
        except ImportError as error:
            print(f"docs/{name}: its code isn't printed again ({error})")
