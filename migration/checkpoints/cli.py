"""python -m fsdp2.migrate checkpoint SRC DST"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.store import DamagedCheckpoint
from fsdp2.options.errors import ConfigError
from fsdp2.options.settings_file import parse_json, read_bytes
from fsdp2.options.values import checked, location, whole
from fsdp2.run.directory.marker import shapes_of
from fsdp2.units import printable
from migration.checkpoints.back import back
from migration.checkpoints.code import Code, optimizer_class
from migration.checkpoints.convert import Converted, convert
from migration.checkpoints.detect import is_fsdp1s
from migration.checkpoints.flat import Recover
from migration.checkpoints.origin import Choice
from migration.checkpoints.prove import Differs
from migration.checkpoints.resume_runs import RANKS, Task, compare_runs

PAGE = "docs/migration-checkpoints.md"
OF_FSDP1 = ("optimizer", "no_optimizer", "model_key", "optimizer_names")
OF_THE_CODE = ("model", "model_size", "wrap", "loss", "prove", "optimizer_class")


def run(given: argparse.Namespace) -> None:
    """Do what the command line says. Raises ConfigError for what is refused; exits with 1 for what differs."""
    try:
        _run(given)
    except (Refused, DamagedCheckpoint, OSError) as error:
        raise ConfigError(f"checkpoint: {printable(str(error))}") from None
    except Differs as error:
        print(f"differs: {printable(str(error))}", flush=True)
        sys.exit(1)


def _run(given: argparse.Namespace) -> None:
    for flag, value in (
        ("SRC", given.source),
        ("DST", given.out),
        ("--optimizer", given.optimizer),
        ("--optimizer-names", given.optimizer_names),
    ):
        if value is not None:
            checked(flag, value, location)
    if given.no_optimizer and (given.optimizer or given.optimizer_names):
        raise ConfigError("--no-optimizer with --optimizer or --optimizer-names: drop one of them")
    for flag in (*OF_THE_CODE, *OF_FSDP1 * (not is_fsdp1s(given.source))) if given.to == "fsdp1-full" else ():
        if getattr(given, flag):
            raise ConfigError(f"--{flag.replace('_', '-')} with --to fsdp1-full: has no effect there; drop it")
    code = _code(given)
    steps = 0 if given.prove is None else int(checked("--prove", given.prove, whole(1, 10_000)))
    choice = Choice(
        model_key=given.model_key,
        optimizer_file=Path(given.optimizer) if given.optimizer else None,
        with_optimizer=not given.no_optimizer,
        order=_names(given.optimizer_names) if given.optimizer_names else None,
    )
    if given.to == "fsdp1-full":
        lines, proof = back(given.source, given.out, choice)
        _print(*lines, f"proven: {proof.line()}")
        return
    if code is not None:
        model = code.on_meta()
        names = [name for name, _ in model.named_parameters()]
        choice = replace(
            choice, parameters=names, shapes=shapes_of(model), recover=Recover(code, choice.with_optimizer)
        )
    done = convert(Path(given.source), given.out, choice)
    start = f"--init-from {given.out}" if done.narrow else _resume(given.out)
    own = f"in a script of your own: dcp.load({{'app': state}}, checkpoint_id={str(done.target)!r}), as {PAGE} shows"
    _print(*done.lines, own, f"next: torchrun --nproc_per_node 2 -m fsdp2.train {start}")
    proven = done.proof.line()
    if code is not None and steps:
        task = Task(code, *_optimizer(given, done), steps, Path(given.source), choice, done.target)
        losses = compare_runs(task)
        _print(f"{task.optimizer}, {RANKS} ranks, losses of rank 0: {' '.join(map(repr, losses))}")
        proven += f"; the losses of {steps} steps are bit-equal, FSDP1 from the source and FSDP2 from the result"
    _print(f"proven: {proven}")


def _resume(out: str) -> str:
    """The flags that go on from a checkpoint: in a run's folder it is found there."""
    path = Path(out)
    return f"--run-dir {path.parent.parent}" if path.parent.name == "checkpoints" else f"--run-dir NEW --resume {out}"


def _code(given: argparse.Namespace) -> Code | None:
    if given.model is None:
        for flag in OF_THE_CODE[1:]:
            if getattr(given, flag):
                raise ConfigError(f"--{flag.replace('_', '-')} without --model: is about the model's code; give it")
        return None
    wrap = tuple(given.wrap.split(",")) if given.wrap else ()
    code = Code(given.model, given.model_size, wrap, given.loss)
    code.check(needs_loss=given.prove is not None)
    if given.prove is None and (given.loss or given.optimizer_class):
        raise ConfigError(f"--{'loss' if given.loss else 'optimizer-class'} without --prove: does nothing; drop it")
    return code


def _optimizer(given: argparse.Namespace, done: Converted) -> tuple[str, list[dict[str, Any]]]:
    """The optimizer of both sides: the checkpoint's, or a plain one where it has none."""
    if done.groups:
        return optimizer_class(given.optimizer_class, done.groups, done.kinds), done.groups
    return given.optimizer_class or "SGD", [{"params": done.parameters, "lr": 1e-2}]


def _names(file: str) -> list[str]:
    try:
        names = parse_json(read_bytes(file))
    except ValueError as error:
        raise ConfigError(f"--optimizer-names {file}: {error}") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"--optimizer-names {file}: must hold a list of names, in the optimizer's order")
    return names


def _print(*lines: str) -> None:
    for line in lines:
        print(printable(line), flush=True)
