"""`make mutants`: put faults of the public kind into a copy of fsdp2, one at a time, and see that a cell notices each.

Without a word about a fault in the suite, a cell that is equal would only show that both sides are wrong alike. Writes
the table of docs/compositions.md; ends with 1 where a fault goes unnoticed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.compositions.cells import FEATURES, Cell, named
from tests.compositions.page import PAGE, run, wrong
from tests.others.sections import put

ROOT = Path(__file__).parents[2]
GITHUB = "https://github.com/"


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        fault: in a few words.
        edits: (file, text, other text); each text stands in its file once.
        cell: the features of the cell that is to notice it; one that the suite runs.
        report: a public report of the kind, as owner/name#number; "" where none is known.
    """

    fault: str
    edits: tuple[tuple[str, str, str], ...]
    cell: str
    report: str = ""


def _of(fault: str, file: str, text: str, other: str, cell: str, report: str = "") -> Mutant:
    return Mutant(fault, ((file, text, other),), cell, report)


_SCALE = "loss * (share.of * share.pieces / batch.target_count * batch.valid)"
_TRAIN, _FSDP2, _MESH = "fsdp2/train.py", "fsdp2/parallel/fully_sharded.py", "fsdp2/parallel/mesh.py"
_TENSOR, _SEQUENCE, _PIECES = "fsdp2/parallel/tensor.py", "fsdp2/parallel/sequence.py", "fsdp2/data/pieces.py"
_LLAMA, _LORA = "fsdp2/models/llama.py", "fsdp2_extra/models/lora.py"
MUTANTS = (
    _of(
        "ranks' gradients averaged, where the loss is of all targets",
        _TRAIN,
        _SCALE,
        "loss * (1 / batch.target_count * batch.valid)",
        "",
        "meta-pytorch/torchtune#2172",
    ),
    _of(
        "targets counted for each rank of a sequence",
        _TRAIN,
        _SCALE,
        "loss * (share.of / batch.target_count * batch.valid)",
        "SP",
        "NVIDIA/Megatron-LM#906",
    ),
    _of(
        "the loss multiplied by all ranks, those that split a layer too",
        _TRAIN,
        _SCALE,
        "loss * (world.world_size / batch.target_count * batch.valid)",
        "TP",
    ),
    _of(
        "the mean of each microbatch's mean",
        _TRAIN,
        _SCALE,
        "loss * (batch.valid / (batch.targets != -100).sum() / config.grad_accumulation)",
        "microbatches, documents apart",
        "meta-pytorch/torchtune#1875",
    ),
    _of(
        "a loss counted by each rank of a layer",
        _TRAIN,
        "loss.detach() if batch.valid and share.counts else",
        "loss.detach() if batch.valid else",
        "TP",
        "huggingface/transformers#48167",
    ),
    _of(
        "ranks that split a layer have other samples",
        "fsdp2/run/process/runtime.py",
        "index, within = divmod(self.rank, tp * sp)",
        "index, within = divmod(self.rank % (self.world_size // tp), sp)",
        "TP",
        "modelscope/twinkle#30",
    ),
    _of(
        "the norm of one dimension",
        _FSDP2,
        "for dim in dims:",
        "for dim in dims[:1]:",
        "TP, clipped",
        "pytorch/torchtitan#766",
    ),
    _of(
        "the norm counts what ranks hold alike once for each",
        _FSDP2,
        "for dim, one in enumerate(gradient.placements) if not one.is_replicate())",
        "for dim, one in enumerate(gradient.placements))",
        "HSDP",
        "NVIDIA-NeMo/RL#3788",
    ),
    _of(
        "gradients of replicas never averaged",
        "fsdp2/parallelize.py",
        "mesh=of_fsdp(mesh),",
        'mesh=mesh["shard"],',
        "HSDP",
        "verl-project/verl#7493",
    ),
    _of(
        "microbatches before the last reduced by nobody",
        _FSDP2,
        "        self._exchange_all(last_microbatch)\n        try:",
        "        self._exchange_all(last_microbatch)\n"
        '        if self.accumulation_sync == "last" and not last_microbatch:\n            return\n        try:',
        "microbatches, reduced once",
        "pytorch/pytorch#125484",
    ),
    Mutant(
        "the gradient of a weight that all have left a part of its sum",
        (
            (_LLAMA, '        "model.layers.*.input_layernorm": SequenceParallel(),\n', ""),
            (_TENSOR, "    if whole:\n", "    if False:\n"),
        ),
        "TP",
        "NVIDIA-NeMo/RL#3716",
    ),
    _of(
        "a tied head trained alone",
        _TENSOR,
        "    share(model, tied)\n",
        "",
        "TP, tied",
        "verl-project/verl#7834",
    ),
    _of(
        "what is frozen trained",
        _TENSOR,
        "parameter.requires_grad_(name not in frozen)",
        "parameter.requires_grad_(parameter.requires_grad)",
        "TP, frozen",
    ),
    _of(
        "the rows of a strided shard taken for a plain one's",
        "fsdp2/models/initial.py",
        "    return bool(strided.split_factor == math.prod(inner))\n",
        "    return False\n",
        "TP",
        "pytorch/torchtitan#1483",
    ),
    _of(
        "keys that backward doesn't reach",
        _SEQUENCE,
        "(heads_for_tokens(one, group) for one in (query, key, value))",
        "(heads_for_tokens(one, group) for one in (query, key.detach(), value))",
        "SP",
        "huggingface/diffusers#14265",
    ),
    _of(
        "heads in another order on the way back",
        _SEQUENCE,
        "return torch.cat(list(_Exchange.apply(sent, group)), dim=1)",
        "return torch.cat(list(_Exchange.apply(sent, group))[::-1], dim=1)",
        "SP",
    ),
    _of(
        "attention within a piece",
        _SEQUENCE,
        "module.attend = partial(attend_over, group, module.attend)",
        "pass",
        "SP",
    ),
    _of(
        "pieces exchanged with ranks that have other samples",
        _MESH,
        '["pieces"]',
        '["samples"]',
        "SP",
    ),
    _of(
        "the label at the cut lost",
        _PIECES,
        "        inputs, targets = self.split.__getitems__(indices)\n",
        "        inputs, targets = self.split.__getitems__(indices)\n"
        "        targets = targets.clone()\n"
        "        targets[:, targets.shape[1] // self.of - 1] = -100\n",
        "SP",
        "hiyouga/LlamaFactory#10475",
    ),
    _of(
        "positions that begin again in each piece",
        _PIECES,
        '"position_ids": _part(places, number, of)',
        '"position_ids": _part(places, 0, of)',
        "SP, documents apart",
        "huggingface/nanoVLM#201",
    ),
    _of(
        "documents that see each other",
        "fsdp2/models/attention.py",
        "    return same.tril().unsqueeze(1)",
        "    return torch.ones_like(same).tril().unsqueeze(1)",
        "documents apart",
        "alex-hh/profam#495",
    ),
    _of(
        "the last chunk of a loss left out",
        "fsdp2/models/chunked.py",
        "total = torch.stack(sums).sum(dim=0)",
        "total = torch.stack(sums[:-1]).sum(dim=0)",
        "chunked loss",
    ),
    _of(
        "adapters that count alpha times",
        _LORA,
        "lora_alpha=self.alpha,",
        "lora_alpha=self.alpha * self.rank,",
        "LoRA",
        "Blaizzy/mlx-vlm#986",
    ),
    _of(
        "weights beside adapters trained",
        _LORA,
        "parameter.requires_grad_(False)",
        "parameter.requires_grad_(True)",
        "LoRA",
    ),
    _of(
        "samples that don't divide left out",
        "fsdp2/data/sampler.py",
        "    mine = batch.tensor_split(world_size)[rank]\n",
        "    mine = batch[rank * (len(batch) // world_size) :][: len(batch) // world_size]\n",
        "uneven",
    ),
    _of(
        "an update with each microbatch",
        _TRAIN,
        "        losses.append(loss.detach()",
        "        _ = batch.last or engine.step()\n        losses.append(loss.detach()",
        "microbatches",
    ),
)


def cell_of(mutant: Mutant) -> Cell:
    """The cell that is to notice it."""
    rest, found = mutant.cell, set()
    for feature in sorted(FEATURES, key=len, reverse=True):  # of two names one begins another
        if feature in rest:
            found.add(feature)
            rest = rest.replace(feature, "")
    assert not rest.strip(", "), rest
    return frozenset(found)


def changed(mutant: Mutant, root: Path) -> None:
    """Put the fault into the files below a folder. Raises ValueError for a text that isn't there once."""
    for file, text, other in mutant.edits:
        before = (root / file).read_text()
        if before.count(text) != 1:
            raise ValueError(f"{mutant.fault}: {file} has {text!r} {before.count(text)} times")
        (root / file).write_text(before.replace(text, other))


def noticed(mutant: Mutant) -> str:
    """How its cell notices a fault; "" if it doesn't."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for folder in ("fsdp2", "fsdp2_extra", "tests"):
            shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
        changed(mutant, root)
        line = [sys.executable, "-m", "tests.compositions.mutants", "--look", json.dumps(sorted(cell_of(mutant)))]
        environment = {**os.environ, "PYTHONPATH": name}
        done = subprocess.run(line, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{mutant.fault}: {done.stderr[-2000:]}")
        return done.stdout.strip().splitlines()[-1] if done.returncode else ""


def look(cell: Cell) -> int:
    """Run a cell, say in a line what isn't as it should be, and return whether something was found."""
    try:
        lines = wrong(run([cell]))
    except pytest.fail.Exception as error:
        said = str(error).partition("\n---")[0].strip().splitlines()
        kind, _, why = re.sub(r"/\S*/", "", said[-1]).partition(": ")
        lines = [f"{named(cell)}: {f'{kind.rpartition(chr(46))[2]}: {why}'[:110]}…"]
    except AssertionError as error:
        lines = [f"{named(cell)}: {error}"]
    print("; ".join(lines))
    return bool(lines)


def main() -> int:
    """Write the table, or look at the cell that `--look` names; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--look", help=argparse.SUPPRESS)
    if (cell := parser.parse_args().look) is not None:
        return look(frozenset(json.loads(cell)))
    rows = []
    for mutant in MUTANTS:
        how = noticed(mutant)
        print(f"{mutant.fault}: {how or 'UNNOTICED'}", file=sys.stderr, flush=True)
        owner, _, number = mutant.report.partition("#")
        report = f"[{mutant.report}]({GITHUB}{owner}/issues/{number})" if mutant.report else ""
        rows.append(f"| {mutant.fault} | {report} | {how.partition(';')[0] or '**unnoticed**'} |")
    table = ["| fault | a public report of the kind | noticed by |", "|---|---|---|", *rows]
    PAGE.write_text(put(PAGE.read_text(), "mutants", table))
    return any("**unnoticed**" in row for row in rows)


if __name__ == "__main__":
    sys.exit(main())
