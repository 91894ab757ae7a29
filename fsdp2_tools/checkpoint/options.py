"""The flags of `python -m fsdp2.checkpoint`, without what reads and writes."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from fsdp2.checkpoint.refusal import Refused, is_name
from fsdp2.options.errors import shown
from fsdp2.options.parser import Parser
from fsdp2.units import byte_count

FORMATS = {
    "pt": "torch.load({out!r}, weights_only=True)",
    "safetensors": "safetensors.torch.load_file, or from_pretrained({out!r}) beside a config.json",
    "hf": "AutoModel….from_pretrained({out!r})",
    "peft": "PeftModel.from_pretrained(model, {out!r})",
    "dcp": "dcp.load(model.state_dict(), checkpoint_id={out!r})",
}
DTYPES = ("bf16", "fp16", "fp32")
KINDS = ("pt", "safetensors", "dcp")
FOLDERS = ("hf", "peft")  # that the hub's libraries load: with a card and a tokenizer
REPOSITORY = re.compile(r"(?=.{3,96}$)\w[\w.-]*/\w[\w.-]*", re.ASCII)  # as the hub names them
PATH = "a checkpoint, a run (its newest checkpoint), a .pt file, or safetensors"


def byte_size(text: str) -> int:
    """`byte_count` for argparse, which shows no other error's reason."""
    try:
        return byte_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:80]} {error}") from None


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line. Raises ConfigError or Refused."""
    words = list(sys.argv[1:] if argv is None else argv)
    if odd := next((word for word in words if word and not is_name(word)), None):
        raise Refused(f"{shown(odd)}: is no UTF-8 text; give another name")
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
        "--format", required=True, choices=tuple(FORMATS), help="of the output; hf and peft need a run of such a model"
    )
    exporting.add_argument(
        "--ema", action="store_true", help="take the average of the weights, which a run with --ema keeps"
    )
    exporting.add_argument(
        "--dtype", choices=DTYPES, help="cast floating-point tensors; unset = hf: as the model's config.json says"
    )
    exporting.add_argument("--base", metavar="PATH", help="the weights that adapters go beside; unset = the run's")
    exporting.add_argument("--max-shard-size", type=byte_size, metavar="SIZE", help="largest file (default: 4GB)")
    exporting.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="then upload it to the hub, private, under a new name, after a confirmation",
    )
    exporting.add_argument("--yes", action="store_true", help="--push without being asked")
    importing = command("import", "make a checkpoint, from which training resumes, of weights in another format")
    importing.add_argument("place", metavar="SOURCE", help="a .pt, safetensors, or DCP directory")
    importing.add_argument("out", metavar="OUT", help="the new checkpoint's directory")
    importing.add_argument(
        "--from", dest="kind", default="auto", choices=("auto", *KINDS), help="format of SOURCE (default: auto)"
    )
    arguments = parser.parse_args(words)
    if arguments.command == "export" and arguments.max_shard_size and arguments.format not in ("safetensors", "hf"):
        raise Refused(f"--max-shard-size with --format {arguments.format}: only safetensors has shards; drop it")
    if arguments.command == "export":
        _check_push(arguments)
    return arguments


def _check_push(arguments: argparse.Namespace) -> None:
    if arguments.push is None:
        if arguments.yes:
            raise Refused("--yes: answers the question of --push; drop it, or give --push OWNER/NAME")
        return
    if not REPOSITORY.fullmatch(arguments.push):
        raise Refused(f"--push {arguments.push}: is no OWNER/NAME of the hub; give one such as ada/tuned-llama")
    if arguments.format not in FOLDERS:
        raise Refused(f"--push with --format {arguments.format}: nothing there loads that; use --format hf, or peft")
    if not arguments.yes and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise Refused("--push: nobody can be asked without a terminal; add --yes to upload without a question")
