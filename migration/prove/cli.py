"""python -m fsdp2.migrate prove: the command line, what is printed, and the exit status."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fsdp2.options.errors import ConfigError
from fsdp2.options.values import checked, whole
from fsdp2.units import printable
from fsdp2_tools import results
from fsdp2_tools.compare.report import terminal
from migration.prove.against_one import Fault, Incomparable, faults, larger, notes, scales
from migration.prove.compare import FAULT, Verdict, compare, require_a_move
from migration.prove.launch import SPAWNS, Failed, Program
from migration.prove.record import Record

LINE = "{:>6}" + "  {:>20}" * 4


def run(given: argparse.Namespace) -> int:
    """The exit status. Raises ConfigError for what is refused."""
    programs = [Path(program) for program in given.programs]
    if given.parameters and not given.against_one:
        raise ConfigError("--parameters: gradients have a scale beside those of one rank; add --against-one")
    if len(programs) != (1 if given.against_one else 2):
        need = "one program with --against-one" if given.against_one else "BEFORE and AFTER, or --against-one and one"
        raise ConfigError(f"prove {' '.join(given.programs)}: needs {need}; what is for the programs goes after --")
    for program in programs:
        if not program.is_file():
            raise ConfigError(f"prove {program}: there is no such file; give the script that torchrun would start")
    ranks = checked("--nproc", given.nproc, whole(2 if given.against_one else 1, 64))
    steps = checked("--steps", given.steps, whole(1, 100_000))
    timeout = float(checked("--timeout", given.timeout, whole(1, 10**6)))
    gpus = checked("--devices-per-node", given.devices_per_node or str(ranks), whole(1, ranks)) if given.stand_in else 0
    if (given.devices_per_node and not given.stand_in) or (gpus and ranks % gpus):
        raise ConfigError(
            f"--devices-per-node {given.devices_per_node}: needs --stand-in and a divisor of --nproc {ranks}"
        )
    kept = Path(given.keep) if given.keep else None
    if kept is not None and os.path.lexists(kept):
        raise ConfigError(f"--keep {kept}: exists; name a new folder")
    if kept is not None:
        results.folder(kept, "--keep")
    folder = Path(tempfile.mkdtemp(prefix="prove-"))
    try:
        if given.against_one:
            alone, several = (Program(programs[0], divided(given.arguments, n), n, timeout, gpus) for n in (1, ranks))
            found = against_one(alone, several, steps, folder, parameters=given.parameters)
            print(json.dumps(found.as_json()) if given.json else found.text())
            return found.status
        before, after = (Program(program, given.arguments, ranks, timeout, gpus) for program in programs)
        verdict = two(before, after, steps, folder)
        print(json.dumps(verdict.as_json()) if given.json else text(verdict))
        return verdict.status
    except Failed as error:
        for line in error.printed:
            print(f"    {printable(line)}", file=sys.stderr)
        raise ConfigError(f"prove: {error}") from None
    finally:
        if kept is not None:
            shutil.copytree(folder, kept, dirs_exist_ok=True)
        shutil.rmtree(folder)


def divided(arguments: list[str], ranks: int) -> list[str]:
    """Numbers in braces, {64}, as one rank's part. Raises ConfigError if there is a remainder."""

    def part(match: re.Match[str]) -> str:
        number = int(match[1])
        if number % ranks:
            raise ConfigError(f"{match[0]}: isn't divisible by {ranks} ranks; take another number")
        return str(number // ranks)

    return [re.sub(r"\{([0-9]+)\}", part, argument) for argument in arguments]


@dataclass
class AgainstOne:
    """`enlarged`: by what the batches of loaders were multiplied on one rank, so that the global batch is the same.
    `parameters`: with --parameters, of each its gradient's scale and its dtypes. `notes`: of what is no fault."""

    steps: int
    ranks: int
    faults: list[Fault]
    enlarged: int
    parameters: list[dict[str, Any]]
    notes: list[Fault]

    @property
    def status(self) -> int:
        return 1 if self.faults else 0

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": "different" if self.faults else "equal to rounding", "status": self.status}

    def text(self) -> str:
        lines = [f"{self.steps} steps on 1 rank and on {self.ranks}, without dropout, whose masks depend on the rank"]
        if self.enlarged > 1:
            lines.append(f"one rank's loaders take {self.enlarged} times the batch, as {self.enlarged} ranks do")
        lines += [f"{fault.kind}: {fault.text}" for fault in self.faults]
        lines += [f"note: {note.kind}: {note.text}" for note in self.notes]
        if self.parameters:
            rows = [row.values() for row in self.parameters]
            words = [[f"{one:.6g}" if isinstance(one, float) else one or "-" for one in row] for row in rows]
            lines.append(terminal([*self.parameters[0]], words))
        return "\n".join([*lines, f"verdict: {'different' if self.faults else 'equal to rounding'}"])


def against_one(alone: Program, several: Program, steps: int, folder: Path, *, parameters: bool = False) -> AgainstOne:
    """Raises Failed, also where the global batch isn't the same and nothing else is wrong."""
    many = several.record(folder / "several", steps=steps, without_dropout=True)
    name = several.script
    if (folder / "several" / SPAWNS).exists():
        raise Failed(
            f"{name}: starts its own ranks, whatever number it is given; --against-one needs torchrun's variables"
        )
    how: dict[str, Any] = {"steps": steps, "without_dropout": True, "cuts": many.cuts()}
    one, enlarged = alone.record(folder / "alone", **how), 1
    if (factor := len(many.readers)) == larger(one, many) > 1:
        one, enlarged = alone.record(folder / "enlarged", **how, batch_times=factor), factor
    try:
        rows = _parameters(one, many) if parameters else []
        found = faults(one, many)
        return AgainstOne(min(one.steps, many.steps), several.ranks, found, enlarged, rows, notes(one, many))
    except Incomparable as error:
        right = "what needs no comparison with one rank is right: weights, replicas, norms, buffers, settings"
        raise Failed(f"{name}: {error}; {right}") from None


def _parameters(one: Record, several: Record) -> list[dict[str, Any]]:
    """A row for each parameter; no scale where gradients can't be compared, as with other samples."""
    known, columns = scales(one, several), ("gradient_scale", "off")
    return [
        {"parameter": name, **dict(zip(columns, known.get(name, (None, None)), strict=True)), **row}
        for name, row in several.dtypes().items()
    ]


def two(before: Program, after: Program, steps: int, folder: Path) -> Verdict:
    """Run both and compare them; where a cause can be taken away, once more without it. Raises Failed."""
    first = before.record(folder / "before", steps=steps)
    if (folder / "before" / SPAWNS).exists():  # what the rewriter makes of it does so too, or runs under torchrun
        after = replace(after, bare=True)
    try:
        second = after.record(folder / "after", steps=steps)
    except Failed:
        if not after.bare:
            raise
        after = replace(after, bare=False)
        second = after.record(folder / "after-torchrun", steps=steps)
    verdict = compare(first, second)
    if (cure := verdict.cure) is not None:
        first = before.record(folder / "before-cured", steps=steps, cure=cure)
        if cure in ("seed", "slow"):  # which AFTER may be as well
            second = after.record(folder / "after-cured", steps=steps, cure=cure)
        cured = compare(first, second)
        if cured.status == 0:
            verdict.verdict = FAULT
        verdict.cause = (
            f"{verdict.cause}; without it {cured.first.line() if cured.status and cured.first else cured.verdict}"
        )
    require_a_move(verdict, first, second)
    return verdict


def text(verdict: Verdict) -> str:
    """The steps around the first difference, the difference, the verdict."""
    first = verdict.first
    shown = {1, verdict.steps} | ({first.step - 1, first.step, first.step + 1} if first else set())
    lines = [LINE.format("step", "loss before", "loss after", "norm before", "norm after")]
    for row in verdict.table:
        if row["step"] in shown:
            values = ["-" if value is None else repr(value) for value in (*row["loss"], *row["norm"])]
            lines.append(LINE.format(row["step"], *values))
    if first is not None:
        lines.append(f"first difference: {first.line()}")
        lines += [f"beyond rounding: {one.line()}" for one in [verdict.beyond] if one and one != first]
        from_there = verdict.parameter and verdict.parameter.line()
        lines.append(f"parameters: {f'different since {from_there}' if from_there else 'bit-equal in every step'}")
        lines.append(f"cause: {verdict.cause or 'none that is known'}")
    lines += [f"note: {what}" for what in verdict.lacks]
    lines.append(f"losses: at most {verdict.loss_apart:.1e} apart in {verdict.steps} steps")
    lines.append(f"verdict: {verdict.verdict}")
    return "\n".join(lines)
