"""Look at checkpoints and convert them:  python -m fsdp2.checkpoint {list,verify,show,diff,export,import}

One process, without a GPU or a process group. No more than one tensor is in memory.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdp2.run.process import early
from fsdp2_tools.checkpoint.options import FOLDERS, FORMATS, parse

if __name__ == "__main__":
    early.answer(parse, "fsdp2.checkpoint")

from fsdp2 import models
from fsdp2.checkpoint.meaning import TOKENIZER
from fsdp2.checkpoint.refusal import Refused, refusal, without_links
from fsdp2.checkpoint.store import DamagedCheckpoint
from fsdp2.data.errors import UnusableText
from fsdp2.models.spec import ModelSpec
from fsdp2.options.errors import ConfigError
from fsdp2.options.settings_file import read_bytes, read_table
from fsdp2.units import printable
from fsdp2_extra.text.tokenizer_file import tokenizer_files
from fsdp2_tools.checkpoint.adapters import ALONE, FILE, TASKS, Adapters, read_adapters
from fsdp2_tools.checkpoint.card import base_on_hub, card
from fsdp2_tools.checkpoint.diff import diff
from fsdp2_tools.checkpoint.export import MAX_SHARD_SIZE, export
from fsdp2_tools.checkpoint.import_ import import_
from fsdp2_tools.checkpoint.push import destination, push
from fsdp2_tools.checkpoint.show import list_checkpoints, show, verify_checkpoints

MODEL_FILES = "model"  # the folder of a run with its model's configuration and tokenizer


def model_file(place: str, name: str) -> Path | None:
    """A file that a run keeps with its model, for the run or a checkpoint of it; None if there is none."""
    path = Path(place).absolute()
    files = (run / MODEL_FILES / name for run in (path, *path.parents[:2]))
    return next((file for file in files if os.path.lexists(file)), None)  # what is no file, its reader refuses


def hf_spec(place: str) -> ModelSpec:
    """The model of a run, or of a checkpoint of one, as transformers has it. Raises Refused."""
    file = model_file(place, "config.json")
    if file is None:
        raise Refused(
            f"{place}: has no {MODEL_FILES}/config.json, which runs of --model hf: and llama have; use --format "
            "safetensors"
        )
    without_links(file.parent)
    try:
        return models.get(f"hf:{file.parent}")
    except ValueError as error:
        raise Refused(f"--format hf: {error}") from None


def tokenizer_of(place: str) -> tuple[Mapping[str, bytes] | None, str]:
    """The files of the tokenizer that a run was given, and a note if they aren't there. Raises Refused.

    None = it was trained with its model's own; {} = with bytes, or by a version that kept no copy.
    """
    file = model_file(place, "config.json")
    if file is None:
        return None, ""
    run = file.parents[1]
    kept = run / TOKENIZER
    for folder in (kept, *kept.glob("*/")):
        without_links(folder)
    if os.path.lexists(kept / "tokenizer.json"):
        try:
            return tokenizer_files(str(kept)), ""
        except UnusableText as error:
            raise Refused(str(error)) from None
    given = _flags(run / "config.json").get("tokenizer")
    if given is None:
        return None, ""
    why = "the run was trained on bytes" if given == "bytes" else f"the run keeps no copy of --tokenizer {given}"
    return {}, f"no tokenizer, because {why}"


def _said(file: Path) -> Mapping[str, Any]:
    """A run's config.json; empty if there is no such file. Raises Refused."""
    if not os.path.lexists(file):
        return {}
    try:
        return read_table(str(file))
    except ValueError as error:
        raise Refused(f"{file}: {error}") from None


def _flags(file: Path) -> Mapping[str, Any]:
    """The flags of a run by its config.json; none if there is no such file. Raises Refused."""
    flags = _said(file).get("flags", {})
    return flags if isinstance(flags, dict) else {}


def may_talk(place: str) -> bool:
    """Return whether the data of a run may be conversations: tables in `datasets:` are, by their columns, and pairs of
    answers. May raise Refused."""
    file = model_file(place, "config.json")
    if file is None or not (flags := _flags(file.parents[1] / "config.json")):
        return file is not None
    dataset = str(flags.get("dataset"))
    return "chat:" in dataset or "datasets:" in dataset


def adapters_of(place: str) -> Adapters | None:
    """Read the adapters' description in a run, None if it has none. Raises Refused."""
    file = model_file(place, FILE)
    if file is None:
        return None
    try:
        content = read_bytes(str(file))
    except ValueError as error:
        raise Refused(f"{file}: {error}") from None
    return read_adapters(content, place)


def card_of(place: str, form: str, task: str | None, *, average: bool) -> Callable[[int | None], bytes] | None:
    """A function that makes a card for the weights of a run; None where there is no run. Raises Refused."""
    file = model_file(place, "config.json")
    if file is None or not (said := _said(file.parents[1] / "config.json")):
        return None
    library = "peft" if form == "peft" else "transformers"
    return lambda step: card(file.parents[1], said, step, library, task, average=average)


def named_for_peft(place: str, task: str | None) -> dict[str, str]:
    """Settings of adapter_config.json on a run's model: its task, and its name if it is the hub's. Raises Refused."""
    file = model_file(place, "config.json")
    base = None if file is None else base_on_hub(_flags(file.parents[1] / "config.json"))
    found = {"task_type": TASKS.get(task or ""), "base_model_name_or_path": base}
    return {key: value for key, value in found.items() if value is not None}


def run(arguments: argparse.Namespace) -> int:
    """Do what the command line says; the exit status. Raises Refused, DamagedCheckpoint or OSError."""
    if arguments.command == "list":
        return list_checkpoints(arguments.run, quick=arguments.quick)
    if arguments.command == "verify":
        return verify_checkpoints(arguments.place)
    if arguments.command == "show":
        return show(arguments.place)
    if arguments.command == "diff":
        return diff(arguments.a, arguments.b)
    if arguments.command == "export":
        to = destination(arguments.push) if arguments.push is not None else None
        spec, like = hf_spec(arguments.place) if arguments.format == "hf" else None, None
        unread = "the run has no model/config.json"
        if arguments.format in ("safetensors", "peft") and model_file(arguments.place, "config.json") is not None:
            try:
                spec = hf_spec(arguments.place)
            except Refused as error:  # what is tied is written twice then, as the checkpoint has it
                unread = f"transformers can't read the run's model ({error})"
        if spec is not None:
            like = spec.on_meta(size := next(iter(spec.sizes))), spec.files(size)
        task = None if spec is None else spec.task if spec.kind == "language" else spec.kind
        tokenizer, without = tokenizer_of(arguments.place) if arguments.format in FOLDERS else (None, "")
        if arguments.format == "peft" and spec is None:
            without = f"no tokenizer, because {unread}"
        line = export(
            arguments.place,
            arguments.out,
            arguments.format,
            dtype=arguments.dtype,
            max_shard_size=arguments.max_shard_size or MAX_SHARD_SIZE,
            like=like,
            tokenizer=tokenizer,
            adapters=adapters_of(arguments.place),
            base=arguments.base,
            average=arguments.ema,
            card=card_of(arguments.place, arguments.format, task, average=arguments.ema),
            peft=named_for_peft(arguments.place, task) if arguments.format == "peft" else {},
            talks=may_talk(arguments.place),
        )
        line += f"; {without}" if without else ""
        read = FORMATS[arguments.format].format(out=arguments.out)
        if arguments.format == "peft" and task in ALONE:
            read = f"{ALONE[task]}.from_pretrained({arguments.out!r}), or {read}"
        print(f"wrote {printable(line)}\nread it: {read}", flush=True)
        if to is not None and not push(to, Path(arguments.out).absolute(), agreed=arguments.yes):
            print(f"nothing was pushed; {printable(arguments.out)} stays")
            return 1
        return 0
    names = None
    if os.path.isfile(os.path.join(arguments.place, "config.json")):
        with suppress(ValueError):  # of a run, or of no model of transformers
            names = models.get(f"hf:{Path(arguments.place).absolute()}").on_meta("own").state_dict()
    for line in import_(arguments.place, arguments.out, arguments.kind, model=names):
        print(printable(line))
    print(f"next: torchrun --nproc_per_node 2 -m fsdp2.train --run-dir NEW --resume {arguments.out}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0; 1 for damage, a difference, or a push that nobody agrees to; 2 for what is refused."""
    try:
        status = run(parse(argv))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read has read enough; and nothing is flushed into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("fsdp2.checkpoint: stopped by Ctrl-C", file=sys.stderr)
        return 130
    except (ConfigError, Refused, DamagedCheckpoint, OSError) as error:
        print(f"fsdp2.checkpoint: error: {refusal(str(error))}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
