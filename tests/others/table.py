"""Every architecture that the installed transformers knows, one after the other; writes docs/models.md.

    python -m tests.others.table [--kinds causal,masked] [--only llama,gpt2] [--minutes 30]

For each a tiny model is made, saved as a user has it, trained by a plain loop in one process, and by `fsdp2.train` on
two ranks from its folder; then resumed, exported, and loaded by a process that doesn't know this package.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp2 import models
from fsdp2.checkpoint.__main__ import main as checkpoint_command
from fsdp2.parallel.groups import shard_groups
from tests.harness import Ranks, losses, main_in_ranks
from tests.others.common import SEED, flags, plain_losses
from tests.others.tiny import tiny

ROOT = Path(__file__).parents[2]
AUTO = {
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "image": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
}
KINDS = (*AUTO, "timm")
# The smallest model of each of fifty of timm's modules.
TIMM = [
    "coat_tiny",
    "convit_tiny",
    "cpubone_nano",
    "crossvit_tiny_240",
    "cs3darknet_focus_s",
    "cspnext_tiny",
    "deit_tiny_patch16_224",
    "densenet121",
    "dla46x_c",
    "edgenext_xx_small",
    "efficientformerv2_s0",
    "efficientvim_m1",
    "efficientvit_b0",
    "efficientvit_m0",
    "ese_vovnet19b_slim_dw",
    "eva02_tiny_patch14_224",
    "fasternet_t0",
    "fastvit_t8",
    "ghostnet_050",
    "gmlp_ti16_224",
    "halonet_h1",
    "hardcorenas_b",
    "hgnetv2_b0",
    "iformer_t",
    "inception_next_atto",
    "lcnet_035",
    "lcnetv2_small",
    "levit_128s",
    "mnasnet_small",
    "mobilevit_xxs",
    "pit_ti_224",
    "pvt_v2_b0",
    "regnetx_002",
    "repghostnet_050",
    "repvit_m1",
    "resnet10t",
    "rexnet_100",
    "shvit_s1",
    "starnet_s050",
    "swiftformer_xs",
    "test_byobnet",
    "test_coatnet",
    "test_convnext",
    "test_mambaout",
    "test_nfnet",
    "test_vit",
    "test_vit_relpos",
    "tiny_vit_5m_224",
    "vit_tiny_r_s16_p8_224",
    "xcit_nano_12_p8_224",
]
STEPS, LARGEST = 5, 30_000_000

# In a process without this package: from_pretrained of what was exported, beside what the plain loop has trained.
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
        theirs, ours = torch.load(one["trained"]), model.state_dict()
        gaps = [float((ours[n].double() - theirs[n].double()).abs().max()) for n in theirs if theirs[n].numel()]
        wrong = [str(name) for names in info.values() for name in names]
        print(json.dumps({"gap": max(gaps, default=0.0), "wrong": wrong}), flush=True)
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
    apart: float | None = None  # the largest relative difference of a loss from the plain loop's
    resumed: bool | None = None
    checkpointed: bool | None = None
    bf16: bool | None = None
    exported: float | None = None  # the largest difference of an exported weight from the plain loop's
    failed: str = ""
    plain: bool = True  # whether it trains in plain transformers
    notes: list[str] = field(default_factory=list)


def one_line(error: BaseException | str) -> str:
    text = str(error) or type(error).__name__
    lines = [line for line in text.splitlines() if "Error" in line or "error:" in line] or text.splitlines()
    return " ".join(lines[-1].split())[:160]


def of_transformers(row: Row, folder: Path) -> tuple[str, nn.Module]:
    """How `--model` calls a tiny model of an architecture, and that model in plain transformers."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    auto = getattr(transformers, AUTO[row.kind][0])
    config = tiny(CONFIG_MAPPING[row.name])
    config.use_cache = False
    if row.kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True  # else an encoder's tokens see those that they are to predict
    if row.kind == "image":
        config.num_labels = 10
    with torch.device("meta"):
        row.parameters = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if row.parameters > LARGEST:
        raise ValueError(f"its smallest configuration here has {row.parameters:,} parameters")
    torch.manual_seed(0)
    auto.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    return f"hf:{folder / 'model'}", auto.from_pretrained(folder / "model", dtype=torch.float32)


def of_timm(row: Row) -> tuple[str, nn.Module]:
    """The same of a model of timm, with the initial values that a run's seed gives it."""
    import timm

    torch.manual_seed(SEED)
    plain: nn.Module = timm.create_model(row.name, in_chans=1, num_classes=10)
    row.parameters = sum(parameter.numel() for parameter in plain.parameters())
    return f"timm:{row.name}", plain


def prove(row: Row, ranks: Ranks, folder: Path) -> dict[str, str]:
    """Fill a row but for `exported`, for which it returns what a fresh process needs. Raises whatever goes wrong."""
    row.plain = False
    name, plain = of_timm(row) if row.kind == "timm" else of_transformers(row, folder)
    spec = models.get(name)
    expected = plain_losses(plain, STEPS, spec)
    torch.save({name: tensor.clone() for name, tensor in plain.state_dict().items()}, folder / "trained.pt")
    if not all(map(math.isfinite, expected)):
        raise ValueError("its losses are no numbers in the plain loop")
    row.plain = True
    data = [] if spec.kind == "image" else ["--dataset=random-tokens"]

    def run(place: str, *more: str) -> list[float]:
        few = ["--test-batch-size=45"] if spec.kind == "image" else []
        line = flags(spec.name, folder / place, *data, *few, f"--max-steps={STEPS}", *more)
        return losses(ranks.run(main_in_ranks, line, timeout=150)[0])

    ours = spec.on_meta("own")
    row.groups = len(shard_groups(ours, spec.blocks(ours), 1)) + 1
    found = run("whole", "--checkpoint-every=3")
    row.apart = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    at_3 = folder / "whole" / "checkpoints" / "step-00000003"
    row.resumed = run("rest", f"--resume={at_3}", "--no-save-model") == found[3:]
    row.checkpointed = run("recomputed", "--activation-checkpointing", "--no-save-model") == found
    rounded = run("bf16", "--mixed-precision", "--no-save-model")
    row.bf16 = all(abs(a - b) < 0.1 * abs(b) for a, b in zip(rounded, expected, strict=True))
    form = "safetensors" if row.kind == "timm" else "hf"
    if checkpoint_command(["export", str(folder / "whole"), str(folder / "exported"), "--format", form]) != 0:
        raise RuntimeError("export failed")
    how = {"timm": row.name} if row.kind == "timm" else {"auto": AUTO[row.kind][0]}
    return {"exported": str(folder / "exported"), "trained": str(folder / "trained.pt"), **how}


def passed(row: Row) -> bool:
    close = row.apart is not None and row.apart <= 1e-5
    return not row.failed and close and bool(row.resumed and row.checkpointed and row.bf16) and row.exported is not None


def page(rows: list[Row], seconds: float) -> str:
    """docs/models.md."""
    import transformers

    lines = [
        "# Models of transformers and timm, one by one",
        "",
        f"`make models` has written this page in {seconds / 60:.0f} minutes: transformers {transformers.__version__},",
        f"torch {torch.__version__}, two gloo ranks, tiny configurations. For none of these was anything written here.",
        "",
        "- *groups*: what `fully_shard` was called on, the root included.",
        "- *losses*: five steps on two ranks beside a plain loop of transformers in one process: `=` is bit for bit,",
        "  a number the largest relative difference.",
        "- *resume*: from the third step, bit for bit. *recompute*: with `--activation-checkpointing`, bit for bit.",
        "  *bf16*: with `--mixed-precision`, within 10 % of fp32.",
        "- *export*: the largest difference between a weight that `from_pretrained` loads, in a process without this",
        "  package, and the one that the plain loop has trained; `=` is none.",
        "",
    ]
    for kind in KINDS:
        mine = [row for row in rows if row.kind == kind]
        trains = [row for row in mine if row.plain]
        good = [row for row in trains if passed(row)]
        equal = [row for row in good if row.apart == 0.0]
        if not mine:
            continue
        share = f"{len(good)} of {len(trains)} ({100 * len(good) / max(1, len(trains)):.0f} %)"
        lines += [
            f"## {kind}: {share} that train in plain transformers; {len(equal)} bit-equal",
            "",
            "| architecture | parameters | groups | losses | resume | recompute | bf16 | export | |",
            "|---|---:|---:|---|---|---|---|---|---|",
        ]
        for row in mine:
            cells = [row.name, f"{row.parameters:,}", row.groups or "", _gap(row.apart)]
            cells += [
                "" if one is None else "yes" if one else "**no**" for one in (row.resumed, row.checkpointed, row.bf16)
            ]
            why = row.failed if row.plain else f"not tried: {row.failed}"
            lines.append("| " + " | ".join(map(str, [*cells, _gap(row.exported), why.replace("|", "/")])) + " |")
        lines.append("")
    return "\n".join(lines)


def _gap(value: float | None) -> str:
    return "" if value is None else "=" if value == 0 else f"{value:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rows", type=Path, help="a file with the rows that are done, to go on with")
    parser.add_argument("--only", default="")
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "models.md")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    import transformers
    from transformers.models.auto import modeling_auto

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    began, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as place:
        fresh = subprocess.Popen(
            [sys.executable, "-c", FRESH], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=place
        )
        assert fresh.stdin is not None
        assert fresh.stdout is not None
        ranks = Ranks(Path(place))
        todo = [
            (kind, name)
            for kind in arguments.kinds.split(",")
            for name in (TIMM if kind == "timm" else sorted(getattr(modeling_auto, AUTO[kind][1])))
        ]
        if arguments.rows is not None and arguments.rows.exists():
            rows = [Row(**json.loads(line)) for line in arguments.rows.read_text().splitlines()]
        done = {(row.kind, row.name) for row in rows}
        for kind, name in todo:
            if (kind, name) in done or (arguments.only and name not in arguments.only.split(",")):
                continue
            if time.monotonic() - began > 60 * arguments.minutes:
                break
            row, folder = Row(name, kind), Path(place) / f"{kind}-{name}"
            folder.mkdir()
            try:
                print(json.dumps(prove(row, ranks, folder)), file=fresh.stdin, flush=True)
                answer: dict[str, Any] = json.loads(fresh.stdout.readline())
                if answer.get("error") or answer["wrong"]:
                    raise RuntimeError(answer.get("error") or f"from_pretrained misses {answer['wrong'][:3]}")
                row.exported = answer["gap"]
            except (Exception, SystemExit) as error:  # also what pytest.fail raises: each architecture on its own
                row.failed = one_line(error)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                row.failed = one_line(error)
            subprocess.run(["rm", "-rf", str(folder)], check=True)
            rows.append(row)
            print(json.dumps(asdict(row)), flush=True)
            if arguments.rows is not None:
                with open(arguments.rows, "a") as file:
                    print(json.dumps(asdict(row)), file=file)
        ranks.close()
        fresh.kill()
    arguments.out.write_text(page(rows, time.monotonic() - began) + "\n")


if __name__ == "__main__":
    main()
