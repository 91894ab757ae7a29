"""Each causal architecture of transformers by tensor parallelism: every gradient beside plain autograd's.

    python -m tests.others.splits [--only llama,gpt2] [--rows FILE]     # all of them: writes a table of docs/models.md

A tiny model is made in plain transformers and saved as a user has it. Then `fsdp2.train` makes it for `--tp 2` on two
ranks, and for `--tp 2` beside FSDP2 on four, and takes the gradients of the same samples.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import train
from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.run.process import runtime
from tests.harness import Ranks, forget_models, same
from tests.others.common import flags
from tests.others.page import text, versions
from tests.others.sections import PAGE, put
from tests.others.table import LIMIT, Row, of_transformers, one_line

MESHES = {"tp": 2, "tp x FSDP2": 4}  # by the number of ranks
EQUAL = 1e-5  # relative: sums are made in another order
SMALLEST = 1e-4  # of the largest gradient of a model: what is smaller, such as a key's bias, may be rounding alone
SAMPLES, TOKENS = 4, 16
NO_PLAN = "transformers has no plan"


def samples(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Tokens, with those that models take for padding among them, and their targets, with some to be left out."""
    rows = torch.randint(vocab_size, (SAMPLES, TOKENS + 1), generator=torch.Generator().manual_seed(2))
    inputs, targets = rows[:, :-1].clone(), rows[:, 1:].clone()
    inputs[:, 3], inputs[:, 5], targets[0, :5] = 0, vocab_size // 2, -100
    return inputs, targets


def moved(model: Any) -> Any:
    """The model with numbers in all its parameters: many begin with biases of 0 and norms of 1, which hide errors."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def wanted(model: nn.Module, training: bool = True) -> dict[str, Tensor]:
    """Gradients of the mean loss by plain autograd, by the names of parameters."""
    inputs, targets = samples(vars(model)["config"].get_text_config().vocab_size)
    model.zero_grad()
    logits = model.train(training)(input_ids=inputs).logits
    (F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (targets >= 0).sum()).backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def gradients(line: list[str], training: bool = True) -> dict[str, Tensor]:
    """The same by a run's own model and engine, each gathered. To be run by `Ranks`."""
    config, world = parse(line), runtime.world()
    engine = train.make_engine(config, world, torch.device("cpu"), restoring=False)
    inputs, targets = samples(config.spec.sizes["own"]["vocab_size"])
    share = world.share(config.tp, config.sp)
    each = SAMPLES // share.of
    mine = slice(share.index * each, (share.index + 1) * each)
    engine.model.train(training)
    with engine.losses():
        outputs = config.spec.call(engine.model, SimpleNamespace(inputs=inputs[mine], targets=targets[mine]))
        loss = config.spec.loss(outputs, targets[mine])
        engine.backward(loss * share.of / (targets >= 0).sum(), last_microbatch=True)
    found = {}
    for name, parameter in engine.model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh.mesh_dim_names == ("shard", "tp")
        if parameter.grad is not None:
            assert isinstance(parameter.grad, DTensor)
            found[name] = parameter.grad.full_tensor()
    dist.barrier()
    return found


def rounding(model: nn.Module, expected: dict[str, Tensor], training: bool) -> float:
    """How far plain gradients move if each number of the model is rounded once more: by a unit in its last place."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.randint(2, parameter.shape, generator=generator).bool()
            towards = torch.where(up, torch.inf, -torch.inf)
            parameter.copy_(torch.nextafter(parameter, towards.to(parameter.dtype)))
    return apart(wanted(model, training), expected)[0]


def apart(found: dict[str, Tensor], plain: dict[str, Tensor]) -> tuple[float, str]:
    """How far the farthest gradient is, relative to its largest number, and its name. One that isn't there is 0."""
    largest = max(float(one.abs().max()) for one in plain.values() if one.numel())
    gaps = []
    for name in found.keys() | plain.keys():
        zeros = torch.zeros_like(found[name] if name in found else plain[name])
        ours, theirs = found.get(name, zeros), plain.get(name, zeros)
        if zeros.numel():
            scale = max(float(theirs.abs().max()), SMALLEST * largest)
            gaps.append((float((ours - theirs).abs().max()) / scale, name))
    return max(gaps, key=lambda gap: (gap[0] != gap[0], gap[0]))  # no number is farther than any


def passed(found: Mapping[str, str]) -> bool:
    """True if all gradients are plain transformers'."""
    return all(mesh in found and "**" not in found[mesh] for mesh in MESHES)


def outcome(name: str, ranks: Ranks, folder: Path) -> dict[str, str]:
    """By mesh, how far the farthest gradient of an architecture is with `--tp 2`, or `refused` and why."""
    model, plain = of_transformers(Row(name, "causal"), folder)
    moved(plain).save_pretrained(folder / "model")
    forget_models()
    line = flags(model, folder / "run", "--dataset=random-tokens", "--tp=2")
    try:
        parse(line)
    except ConfigError as error:
        return {"refused": str(error).partition(": ")[2]}
    training = same(wanted(plain), wanted(plain))  # a router may draw numbers while it is trained
    expected, said = wanted(plain, training), dict[str, str]()
    for mesh, count in MESHES.items():
        ranks.close()  # torch keeps what it has made of a mesh for the life of a process
        gap, farthest = max(
            apart(found, expected) for found in ranks.run(gradients, line, training, ranks=count, timeout=LIMIT)
        )
        said[mesh] = f"{gap:.0e}"
        if gap > EQUAL:
            own = rounding(copy.deepcopy(plain), expected, training)
            said[mesh] += f" (rounding: {own:.0e})" if gap <= 2 * own else f" **{farthest}** {own:.0e}"
    return said


def tried(name: str, ranks: Ranks, folder: Path) -> dict[str, str]:
    """`outcome`, whatever it raises."""
    folder.mkdir()
    try:
        return outcome(name, ranks, folder)
    except (Exception, SystemExit, pytest.fail.Exception) as error:
        return {"failed": one_line(error)}
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of architectures, with commas between them")
    parser.add_argument("--rows", type=Path, help="a file of the rows that are done, to go on with; each is added")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, str]] = {}
    if arguments.rows is not None and arguments.rows.exists():
        rows = dict(json.loads(line) for line in arguments.rows.read_text().splitlines())
    only = list(filter(None, arguments.only.split(",")))
    with tempfile.TemporaryDirectory() as place:
        ranks = Ranks(Path(place))
        for name in only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
            if name not in rows:
                rows[name] = tried(name, ranks, Path(place) / name)
                print(json.dumps([name, rows[name]]), flush=True)
                if arguments.rows is not None:
                    with open(arguments.rows, "a") as file:
                        print(json.dumps([name, rows[name]]), file=file)
        ranks.close()
    if not only:
        PAGE.write_text(put(PAGE.read_text(), "splits", section(rows)))


def section(rows: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The table, of those that have a plan; the others are counted."""
    tried = {name: row for name, row in sorted(rows.items()) if "failed" not in row}
    without = [name for name, row in tried.items() if NO_PLAN in row.get("refused", "")]
    table = {
        name: row
        for name, row in tried.items()
        if name not in without and "sees the tokens that it is to predict" not in row.get("refused", "")
    }
    right, refused = sum(map(passed, table.values())), sum("refused" in row for row in table.values())
    return [
        "## Tensor parallelism",
        "",
        f"transformers has a plan for {len(table)} causal architectures. With `--tp 2` {right} have plain",
        f"transformers' gradients, and {refused} are refused. Each number is the largest distance of a gradient",
        "from plain autograd's in fp32, relative to the largest number in that gradient, which counts as at least",
        f"{SMALLEST:.0e} of the model's largest. *tp* is two ranks, *tp x FSDP2* is four.",
        "*Rounding*, where one is beyond 1e-05, is how far plain transformers' move if each weight moves by a unit in",
        f"its last place; up to twice that is right. `python -m tests.others.splits` writes this table ({versions()}).",
        "",
        "| | tp | tp x FSDP2 | |",
        "|---|---|---|---|",
        *(_line(name, row) for name, row in table.items()),
        "",
        f"Without a plan, and refused: {', '.join(without)}.",
    ]


def _line(name: str, row: Mapping[str, str]) -> str:
    why = row.get("refused", "").partition("; ")[0].partition(" (")[0]
    return f"| {name} | {' | '.join(row.get(mesh, 'refused') for mesh in MESHES)} | {text(why)} |"


if __name__ == "__main__":
    main()
