"""A cell, run on real ranks by its command line and compared with the judge; or the line that refuses it."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.run.preflight import check_world
from fsdp2.run.process.runtime import World
from tests.compositions import alone
from tests.compositions.cells import (
    CLIP,
    FROZEN,
    SIZES,
    STEPS,
    TEXTS,
    WINDOW,
    Cell,
    documents,
    flags_of,
    mesh_of,
    ranks_of,
    samples_of,
    size_of,
    write_text,
)
from tests.harness import Ranks, losses, main_in_ranks, of_kind, relative

LR = 0.02
# A step so long that the gradients are the larger part of the weights after it, and their difference but for a bit.
GRADIENT_LR = 512.0
MEASURED = ("gradients", "norms", "losses", "parameters")
# Relative, of a tensor to its largest number. Ranks add in another order than one process; in bf16 each of their sums
# is rounded to 8 bits, and ten steps go on from there.
EXACT = 1e-5
ROUNDED = {"gradients": 0.05, "norms": 0.02, "losses": 0.01, "parameters": 0.02}
BOUNDS = {False: dict.fromkeys(MEASURED, EXACT), True: ROUNDED}
# The features that change what is computed; of all others the judge knows nothing.
NUMBERS = frozenset({"LoRA", "clipped", "bf16", "documents apart", "tied", "frozen", "uneven"})


def farthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """How far the farthest number is, relative to the largest of its tensor; of zeros, whether they're zeros."""
    found = 0.0
    for name, wanted in theirs.items():
        largest = float(wanted.abs().max()) or 1.0
        found = max(found, float((ours[name].float() - wanted).abs().max()) / largest)
    return found


@dataclass(frozen=True)
class Outcome:
    """What came of a cell.

    Attributes:
        refused: the line, or "" for what ran.
        apart: by `MEASURED`, how far the run is from the judge.
        bits: a hash of losses, norms and parameters.
    """

    refused: str = ""
    apart: dict[str, float] | None = None
    bits: str = ""


class Composer:
    """Runs cells in a folder. The ranks are closed where the mesh changes, of which torch keeps what it has made."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.ranks, self.folder, self._mesh, self._runs = ranks, folder, (0, list[str]()), 0
        self._known: dict[Cell, alone.Trained] = {}
        self._drawn: dict[Cell, dict[str, Tensor]] = {}
        for name, size in SIZES.items():
            torch.save(alone.start_of(size), folder / f"{name}.pt")
        for count in TEXTS:
            write_text(folder / f"{count}.jsonl", count)

    def outcome(self, cell: Cell) -> Outcome:
        """Run it for a step and for ten; or what refuses it, before any rank meets another."""
        line, count = self._line(cell), ranks_of(cell)
        try:
            check_world(parse(line), World(0, count, 0, count))
        except ConfigError as error:
            return Outcome(refused=str(error))
        theirs = self._judged(cell)
        _, stepped = self._run(cell, [*line, f"--lr={GRADIENT_LR}", "--max-steps=1", "--on-anomaly=report"])
        events, trained = self._run(cell, [*line, f"--lr={LR}", f"--max-steps={STEPS}"])
        before = self._weights(cell) | (self._adapters(cell) or {})
        gradients = {name: (before[name] - stepped[name].float()) / GRADIENT_LR for name in theirs.gradients}
        norms = [event["grad_norm"] for event in of_kind(events, "train")]
        apart = {
            "gradients": farthest(gradients, theirs.gradients),
            "norms": relative(norms, theirs.norms),
            "losses": relative(losses(events), theirs.losses),
            "parameters": farthest({name: trained[name] for name in theirs.parameters}, theirs.parameters),
        }
        for name in trained.keys() - theirs.parameters.keys():
            source = "model.embed_tokens.weight" if name == "lm_head.weight" and "tied" in cell else name
            same = trained[source] if source in theirs.parameters else before[source]
            assert torch.equal(trained[name], same), f"{name} isn't trained, and changed"
        bits = hashlib.sha256(repr((losses(events), norms)).encode())
        for name in sorted(trained):
            bits.update(trained[name].float().numpy().tobytes())
        return Outcome(apart=apart, bits=bits.hexdigest()[:16])

    def _line(self, cell: Cell) -> list[str]:
        text, weights = self.folder / f"{samples_of(cell)}.jsonl", self.folder / f"{size_of(cell)}.pt"
        return [*flags_of(cell), f"--dataset=text:{text}", f"--init-from={weights}"]

    def _run(self, cell: Cell, line: list[str], ranks: int = 0) -> tuple[list[Any], dict[str, Tensor]]:
        """rank 0's events, and what the run trained, read from its checkpoint by torch alone."""
        count, dimensions = mesh_of(cell)
        mesh = ranks or count, dimensions
        if self._mesh != mesh:
            self.ranks.close()
        self._mesh, self._runs = mesh, self._runs + 1
        run, whole = self.folder / f"run{self._runs}", self.folder / "whole.pt"
        line = [*line, f"--run-dir={run}", "--checkpoint-every=1000", "--no-save-model"]
        events = self.ranks.run(main_in_ranks, line, ranks=mesh[0])[0]
        (checkpoint,) = (run / "checkpoints").glob("step-*")
        dcp_to_torch_save(checkpoint, whole)
        trained: dict[str, Tensor] = torch.load(whole, weights_only=False)["app"]["model"]
        shutil.rmtree(run)
        return events, trained

    def _judged(self, cell: Cell) -> alone.Trained:
        """The judge's training, once for all cells that change no number of it."""
        cell &= NUMBERS
        if cell not in self._known:
            samples = samples_of(cell)
            self._known[cell] = alone.train(
                SIZES[size_of(cell)],
                self._weights(cell),
                alone.sequences(documents(samples), samples, WINDOW, apart="documents apart" in cell),
                steps=STEPS,
                lr=LR,
                clip=CLIP if "clipped" in cell else None,
                bf16="bf16" in cell,
                frozen=FROZEN if "frozen" in cell else (),
                adapters=self._adapters(cell),
            )
        return self._known[cell]

    def _weights(self, cell: Cell) -> dict[str, Tensor]:
        found: dict[str, Tensor] = torch.load(self.folder / f"{size_of(cell)}.pt", weights_only=True)
        return found

    def _adapters(self, cell: Cell) -> dict[str, Tensor] | None:
        """Those that a run of one process draws: a step of almost no length leaves A, which counts as B is zero."""
        if "LoRA" not in cell:
            return None
        cell = frozenset({"LoRA"}) | (cell & {"tied", "uneven"})
        if cell not in self._drawn:
            line = [*self._line(cell), "--strategy=none", "--lr=1e-30", "--max-steps=1"]
            drawn = self._run(cell, line, ranks=1)[1]
            self._drawn[cell] = {name: one * (".lora_A." in name) for name, one in drawn.items()}
        return self._drawn[cell]
