"""Look at checkpoints and convert them:  python -m fsdp2.checkpoint {list,verify,show,diff,export,import}

One process, without a GPU or a process group. No more than one tensor is in memory.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from fsdp2 import models
from fsdp2.checkpoint.refusal import Refused, empty_word, is_name, refusal, without_links
from fsdp2.checkpoint.sources.opening import KINDS
from fsdp2.checkpoint.store import DamagedCheckpoint
from fsdp2.units import byte_count, printable
from fsdp2_tools.checkpoint.adapters import FILE, Adapters, read_adapters
from fsdp2_tools.checkpoint.diff import diff
from fsdp2_tools.checkpoint.export import DTYPES, MAX_SHARD_SIZE, export
from fsdp2_tools.checkpoint.import_ import import_
from fsdp2_tools.checkpoint.show import list_checkpoints, show, verify_checkpoints

MODEL_FILES = "model"  # the folder of a run with its model's configuration and tokenizer

NEXT = {
    "pt": "torch.load({out!r}, weights_only=True)",
    "safetensors": "safetensors.torch.load_file, or from_pretrained({out!r}) beside a config.json",
    "hf": "AutoModel….from_pretrained({out!r})",
    "peft": "PeftModel.from_pretrained(model, {out!r})",
    "dcp": "dcp.load(model.state_dict(), checkpoint_id={out!r})",
}


PATH = "a checkpoint, a run (its newest checkpoint), a .pt file, or safetensors"


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise Refused(refusal(f"{message}; see {self.prog} --help"))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        wrong = empty_word(words) or next((word for word in words if not is_name(word)), None)
        if wrong is not None:
            self.error(f"{wrong}: is empty, or no UTF-8 text; give a value, or drop it")
        return super().parse_args(words, namespace)


def byte_size(text: str) -> int:
    """`byte_count` for argparse, which shows no other error's reason."""
    try:
        return byte_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:80]} {error}") from None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments of the command line. Raises Refused."""
    parser = Parser(
        prog="python -m fsdp2.checkpoint", description="Look at checkpoints and convert them.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help, description=help, allow_abbrev=False)

    listing = command("list", "list a run's checkpoints, with their sizes and whether their hashes match")
    listing.add_argument("run", metavar="RUN", help="folder or URL of a run")
    listing.add_argument("--quick", action="store_true", help="compare only sizes, not hashes")
    verifying = command("verify", "compare every hash, and check that every tensor is complete and readable")
    verifying.add_argument("place", metavar="RUN|PATH", help="a run (all its committed checkpoints) or one checkpoint")
    showing = command("show", "print each tensor's shape and dtype, plain values and totals, without loading a tensor")
    showing.add_argument("place", metavar="PATH", help=PATH)
    differing = command("diff", "print how two checkpoints or files differ; exit status 0 if they are equal, 1 if not")
    differing.add_argument("a", metavar="A", help=PATH)
    differing.add_argument("b", metavar="B", help="the same")
    exporting = command("export", "write the model's weights, with plain names, in another format")
    exporting.add_argument("place", metavar="PATH", help=PATH)
    exporting.add_argument("out", metavar="OUT", help="a new file for pt, a new folder for the others")
    exporting.add_argument(
        "--format", required=True, choices=tuple(NEXT), help="of the output; hf and peft need a run of such a model"
    )
    exporting.add_argument(
        "--ema", action="store_true", help="take the average of the weights, which a run with --ema keeps"
    )
    exporting.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        help="cast floating-point tensors; unset = hf: as the model's config.json says",
    )
    exporting.add_argument(
        "--max-shard-size", type=byte_size, metavar="SIZE", help="largest safetensors file (default: 4GB)"
    )
    importing = command("import", "make a checkpoint, from which training resumes, of weights in another format")
    importing.add_argument("place", metavar="SOURCE", help="a .pt, safetensors, or DCP directory")
    importing.add_argument("out", metavar="OUT", help="the new checkpoint's directory")
    importing.add_argument(
        "--from", dest="kind", default="auto", choices=("auto", *KINDS), help="format of SOURCE (default: auto)"
    )
    arguments = parser.parse_args(argv)
    has_shards = arguments.command == "export" and arguments.format in ("safetensors", "hf")
    if arguments.command == "export" and arguments.max_shard_size and not has_shards:
        raise Refused(f"--max-shard-size with --format {arguments.format}: only safetensors has shards; drop it")
    return arguments


def model_file(place: str, name: str) -> Path | None:
    """A file that a run keeps with its model, for the run or a checkpoint of it; None if there is none."""
    path = Path(place).absolute()
    files = (run / MODEL_FILES / name for run in (path, *path.parents[:2]))
    return next((file for file in files if file.is_file()), None)


def hf_model(place: str) -> tuple[Any, Mapping[str, bytes]]:
    """The model on meta of a run, or of a checkpoint of one, and the files that go with it. Raises Refused."""
    file = model_file(place, "config.json")
    if file is None:
        raise Refused(
            f"{place}: has no {MODEL_FILES}/config.json, which runs of --model hf: and llama have; use --format "
            "safetensors"
        )
    without_links(file.parent)
    try:
        spec = models.get(f"hf:{file.parent}")
    except ValueError as error:
        raise Refused(f"--format hf: {error}") from None
    size = next(iter(spec.sizes))
    return spec.on_meta(size), spec.files(size)


def adapters_of(place: str, to: str) -> Adapters | None:
    """Read the adapters' description in a run, None if it has no adapters. Raises Refused for `peft` then."""
    file = model_file(place, FILE)
    if file is not None:
        return read_adapters(file.read_bytes(), place)
    if to == "peft":
        raise Refused(f"--format peft: {place} has no {MODEL_FILES}/{FILE}, which runs with --lora have; use hf")
    return None


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
        limit = arguments.max_shard_size or MAX_SHARD_SIZE
        like = hf_model(arguments.place) if arguments.format == "hf" else None
        if arguments.format == "safetensors" and model_file(arguments.place, "config.json") is not None:
            with suppress(Refused):  # what is tied is written twice then, as the checkpoint has it
                like = hf_model(arguments.place)
        line = export(
            arguments.place,
            arguments.out,
            arguments.format,
            dtype=arguments.dtype,
            max_shard_size=limit,
            like=like,
            adapters=adapters_of(arguments.place, arguments.format),
            average=arguments.ema,
        )
        print(f"wrote {line}\nread it: {NEXT[arguments.format].format(out=arguments.out)}")
        return 0
    for line in import_(arguments.place, arguments.out, arguments.kind):
        print(printable(line))
    print(f"next: torchrun --nproc_per_node 2 -m fsdp2.train --run-dir NEW --resume {arguments.out}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0; 1 where `verify` finds something bad or `diff` a difference; 2 for what is refused."""
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
    except (Refused, DamagedCheckpoint, OSError) as error:
        print(f"fsdp2.checkpoint: error: {refusal(str(error))}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
