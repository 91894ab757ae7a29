"""Every architecture that the installed transformers knows, one after the other; writes docs/models.md.

    python -m tests.others.table [--kinds causal,masked] [--only llama,gpt2] [--minutes 30]

For each a tiny model is made, saved as a user has it, trained by a plain loop in one process, and by `fsdp2.train` on
two ranks from its folder; then resumed, exported, and loaded by a process that doesn't know this package.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import nn

from fsdp2 import models, train
from fsdp2.data.splits import Dataset, Images
from fsdp2.parallel.groups import shard_groups
from fsdp2_tools.checkpoint.__main__ import main as checkpoint_command
from tests.harness import Ranks, losses, main_in_ranks, same
from tests.others.common import BATCH, SEED, aligned, contents, flags, plain_losses, started
from tests.others.page import KINDS, page, passed
from tests.others.tiny import TIMM, tiny

ROOT = Path(__file__).parents[2]
AUTO = {
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "image": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    "audio": ("AutoModelForAudioClassification", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES"),
}
STEPS, LARGEST = 5, 30_000_000
ROOT_GRANULARITY = "--shard-granularity root"
LIMIT = 300  # seconds of a run

# In a process without this package: from_pretrained of what was exported, beside the full model that the run left and
# beside what the plain loop has trained.
FRESH = """
import json, sys, torch, transformers
transformers.logging.set_verbosity_error()
for line in sys.stdin:
    one = json.loads(line)
    try:
        if "timm" in one:
            import timm, safetensors.torch
            model, info = timm.create_model(one["timm"], in_chans=1, num_classes=10), {}
            model.load_state_dict(safetensors.torch.load_file(one["exported"] + "/model.safetensors"))
        else:
            auto = getattr(transformers, one["auto"])
            model, info = auto.from_pretrained(one["exported"], dtype=torch.float32, output_loading_info=True)
        run, plain, loaded = torch.load(one["run"]), torch.load(one["plain"]), model.state_dict()
        equal = run.keys() == loaded.keys() and all(torch.equal(run[name], loaded[name]) for name in run)
        gaps = [float((loaded[n].double() - plain[n].double()).abs().max()) for n in plain if plain[n].numel()]
        wrong = [str(name) for names in info.values() for name in names]
        print(json.dumps({"equal": equal, "gap": max(gaps, default=0.0), "wrong": wrong}), flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:200]}), flush=True)
"""


@dataclass
class Row:
    """What was found of an architecture; `failed` is the first thing that went wrong."""

    name: str
    kind: str
    parameters: int = 0
    groups: int = 0
    started: bool | None = None  # every parameter and buffer before the first step is the plain model's
    apart: float | None = None  # the largest relative difference of a loss from the plain loop's
    resumed: bool | None = None
    checkpointed: bool | None = None
    bf16: float | None = None  # the largest relative difference of a loss from a plain loop's with rounded weights
    exported: bool | None = None  # what from_pretrained loads is what the run was left with
    trained: float | None = None  # the largest difference of an exported weight from the plain loop's
    failed: str = ""
    plain: bool = True  # whether it trains in plain transformers
    plain_bf16: bool = True  # the same with weights that are rounded to bf16
    plain_recompute: bool = True  # the same with what transformers calls gradient checkpointing
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Fresh:
    """A process that runs `FRESH`."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", FRESH]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")

    def answer(self, question: dict[str, str]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        answered: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answered


def one_line(error: BaseException | str) -> str:
    """What a traceback ends with, else the first line: what comes after it is advice."""
    lines = str(error).splitlines() or [type(error).__name__]
    told = [line for line in lines if "Error" in line or "error:" in line] if len(lines) > 1 else []
    return " ".join((told or list(filter(str.strip, lines)))[-1 if told else 0].split())[:500]


def of_transformers(row: Row, folder: Path) -> tuple[str, nn.Module]:
    """How `--model` calls a tiny model of an architecture, and that model in plain transformers."""
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    auto = getattr(transformers, AUTO[row.kind][0])
    config = tiny(CONFIG_MAPPING[row.name])
    config.use_cache = False
    named = getattr(modeling_auto, AUTO[row.kind][1])[row.name]
    config.architectures = [named if isinstance(named, str) else named[0]]  # some have a second class, for a teacher
    if row.kind in ("image", "audio"):
        config.num_labels = 10
    with torch.device("meta"):
        row.parameters = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if row.parameters > LARGEST:
        raise ValueError(f"its smallest configuration here has {row.parameters:,} parameters")
    torch.manual_seed(0)
    made = auto.from_config(config, dtype=torch.float32)
    made.save_pretrained(folder / "model")
    name = f"tests.others.audio:{row.name.replace('-', '_')}" if row.kind == "audio" else f"hf:{folder / 'model'}"
    loaded = aligned(auto.from_pretrained(folder / "model", dtype=torch.float32))
    for parameter, constructed in zip(loaded.parameters(), made.parameters(), strict=True):
        parameter.requires_grad_(constructed.requires_grad)  # from_pretrained forgets what its class freezes
    return name, loaded


def of_timm(row: Row) -> tuple[str, nn.Module]:
    """The same of a model of timm, with the initial values that a run's seed gives it."""
    import timm

    torch.manual_seed(SEED)
    plain: nn.Module = timm.create_model(row.name, in_chans=1, num_classes=10)
    row.parameters = sum(parameter.numel() for parameter in plain.parameters())
    return f"timm:{row.name}", plain


def refused_rightly(name: str, plain: nn.Module, ranks: Ranks, folder: Path) -> str:
    """Why a run refuses a model whose logits a later token changes; nothing for one that is causal.

    Fails as a test does if the run trains it.
    """
    tokens = (torch.arange(16) % 8 + 3).repeat(2, 1)
    tokens[1, 12] = 2
    with torch.no_grad():
        logits = copy.deepcopy(plain).eval()(input_ids=tokens).logits[:, :12]
    if torch.allclose(logits[0], logits[1], rtol=0, atol=1e-6):
        return ""
    line = flags(name, folder / "refused", "--dataset=random-tokens", "--max-steps=1", "--no-save-model")
    with contextlib.suppress(ValueError):
        if models.get(name).task != "causal":  # one class for several tasks
            return ""
    with pytest.raises(pytest.fail.Exception, match="sees the tokens that it is to predict"):
        ranks.run(main_in_ranks, line, timeout=LIMIT)
    return "refused: a later token changes its logits, so it sees the tokens that it is to predict"


def run_of_few(line: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """`main_in_ranks`, which tests a few images instead of hundreds: how good a model is isn't asked here."""
    load = train.load_data

    def few(*arguments: Any) -> Dataset:
        dataset: Dataset = load(*arguments)
        test = copy.copy(dataset.test)
        if isinstance(test, Images):
            test.pixels, test.labels = test.pixels[: 2 * BATCH], test.labels[: 2 * BATCH]
        return replace(dataset, test=test)

    with mock.patch.object(train, "load_data", few):
        return main_in_ranks(line)


def prove(row: Row, ranks: Ranks, folder: Path, *always: str) -> dict[str, str]:
    """Fill a row but for `exported`, for which it returns what a fresh process needs. Raises whatever goes wrong.

    Args:
        always: flags of each run.
    """
    row.plain = False
    name, plain = of_timm(row) if row.kind == "timm" else of_transformers(row, folder)
    if row.kind == "causal" and (why := refused_rightly(name, plain, ranks, folder)):
        raise ValueError(why)
    spec = models.get(name)
    before, again = copy.deepcopy(contents(plain)), copy.deepcopy(plain)
    expected = plain_losses(plain, STEPS, spec)
    # Running statistics are one process's own: it sees two microbatches where each rank sees one.
    torch.save({name: one.detach() for name, one in plain.named_parameters()}, folder / "plain.pt")
    if not all(map(math.isfinite, expected)):
        raise ValueError("its losses are no numbers in the plain loop")
    row.plain = True
    data = [] if spec.kind == "image" else ["--dataset=random-tokens"]
    if row.kind == "audio":
        safetensors.torch.save_file(before["state"], folder / "start.safetensors")  # in the model's own names
        data = [f"--init-from={folder / 'start.safetensors'}"]

    def line(place: str, *more: str) -> list[str]:
        return flags(spec.name, folder / place, *data, f"--max-steps={STEPS}", *always, *more)

    def run(place: str, *more: str) -> list[float]:
        return losses(ranks.run(run_of_few, line(place, *more), timeout=LIMIT)[0])

    ours = spec.on_meta("own")
    row.groups = len(shard_groups(ours, spec.blocks(ours), 1)) + 1
    row.started = all(same(found, before) for found in ranks.run(started, line("start"), timeout=LIMIT))
    found = run("whole", "--checkpoint-every=3")
    row.apart = apart(found, expected)
    at_3 = folder / "whole" / "checkpoints" / "step-00000003"
    row.resumed = run("rest", f"--resume={at_3}", "--no-save-model") == found[3:]
    try:
        row.checkpointed = run("recomputed", "--activation-checkpointing", "--no-save-model") == found
    except pytest.fail.Exception as error:
        row.checkpointed = False
        row.plain_recompute = bool(getattr(plain, "supports_gradient_checkpointing", True))
        row.notes.append(f"recompute: {'' if row.plain_recompute else 'not in transformers either: '}{one_line(error)}")
    try:
        rounded = plain_losses(again, STEPS, spec, torch.bfloat16)
    except Exception as error:
        row.plain_bf16 = False
        row.notes.append(f"bf16: not in the plain library either: {one_line(error)}")
    else:
        try:
            row.bf16 = apart(run("bf16", "--mixed-precision", "--no-save-model"), rounded)
        except pytest.fail.Exception as error:
            row.notes.append(f"bf16: {one_line(error)}")
    form = "safetensors" if row.kind in ("timm", "audio") else "hf"
    with contextlib.redirect_stdout(sys.stderr):
        if checkpoint_command(["export", str(folder / "whole"), str(folder / "exported"), "--format", form]) != 0:
            raise RuntimeError("export failed")
    if row.kind == "audio":
        shutil.copy(folder / "model" / "config.json", folder / "exported")
    full = folder / "whole" / "full_model" / "full-model.pt"
    how = {"timm": row.name} if row.kind == "timm" else {"auto": AUTO[row.kind][0]}
    return {"exported": str(folder / "exported"), "plain": str(folder / "plain.pt"), "run": str(full), **how}


def apart(found: list[float], expected: list[float]) -> float:
    """The largest relative difference of a loss."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--only", default="", help="names of architectures, with commas between them")
    parser.add_argument("--minutes", type=float, default=240)
    parser.add_argument(
        "--rows", type=Path, help="a file of the rows that are done, to go on with; each is added to it"
    )
    parser.add_argument("--again", action="store_true", help="try those that did not pass a second time")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "models.md")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    import transformers
    from transformers.models.auto import modeling_auto

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    began, rows = time.monotonic(), list[Row]()
    if arguments.rows is not None and arguments.rows.exists():
        rows = [Row(**json.loads(line)) for line in arguments.rows.read_text().splitlines()]
    done = {(row.kind, row.name) for row in rows if passed(row) or not arguments.again}
    known = {kind: TIMM if kind == "timm" else sorted(getattr(modeling_auto, AUTO[kind][1])) for kind in KINDS}
    todo = [(kind, name) for kind in arguments.kinds.split(",") for name in known[kind] if (kind, name) not in done]
    only = set(filter(None, arguments.only.split(",")))
    with tempfile.TemporaryDirectory() as place:
        fresh, ranks = Fresh(), Ranks(Path(place))
        for kind, name in todo:
            if time.monotonic() - began > 60 * arguments.minutes:
                break
            if only and name not in only:
                continue
            rows.append(row_of(kind, name, ranks, fresh, Path(place)))
            line = json.dumps(asdict(rows[-1]))
            print(line, flush=True)
            if arguments.rows is not None:
                with open(arguments.rows, "a") as file:
                    print(line, file=file)
        ranks.close()
        fresh.process.kill()
    arguments.out.write_text(page(rows) + "\n")


def row_of(kind: str, name: str, ranks: Ranks, fresh: Fresh, place: Path) -> Row:
    """All that is tried of an architecture; whatever it raises is in the row."""
    began = time.monotonic()
    row = tried(kind, name, ranks, fresh, place)
    if ROOT_GRANULARITY in row.failed:  # what the refusal advises
        advised = tried(kind, name, ranks, fresh, place, *ROOT_GRANULARITY.split())
        row.notes.append(f"with {ROOT_GRANULARITY} it {'passes' if passed(advised) else 'fails as well'}")
    row.seconds = round(time.monotonic() - began, 1)
    return row


def tried(kind: str, name: str, ranks: Ranks, fresh: Fresh, place: Path, *always: str) -> Row:
    row, folder = Row(name, kind), place / f"{kind}-{name}"
    folder.mkdir()
    try:
        answer = fresh.answer(prove(row, ranks, folder, *always))
        if answer.get("error") or answer["wrong"]:
            raise RuntimeError(answer.get("error") or f"from_pretrained misses {answer['wrong'][:3]}")
        row.exported, row.trained = answer["equal"], answer["gap"]
    except (Exception, SystemExit, pytest.fail.Exception) as error:
        row.failed = one_line(error)
    shutil.rmtree(folder)
    return row


if __name__ == "__main__":
    main()
