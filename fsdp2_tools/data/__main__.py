"""Make tokens of text before a run, or look at what a run would learn of them:

python -m fsdp2.data prepare PATH… --tokenizer DIR --out FOLDER
python -m fsdp2.data show --model llama --dataset text:PATH …

One process, without a GPU. After a kill, the same command begins again.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp2.run.process import early
from fsdp2_tools.data.options import parse

if __name__ == "__main__":
    early.answer(parse, "fsdp2.data")

from fsdp2.config import Config
from fsdp2.data import OWN
from fsdp2.data.errors import UnusableText
from fsdp2.options.errors import ConfigError
from fsdp2.options.parser import read_values
from fsdp2.run.dataset import open_data, reading_of
from fsdp2.run.preflight import check_data
from fsdp2.units import printable
from fsdp2_extra.text import header_lines
from fsdp2_extra.text.mixture import opened
from fsdp2_extra.text.prepared import NAMED, places
from fsdp2_extra.text.preparing import prepare
from fsdp2_extra.text.text import found
from fsdp2_tools.data.pairs import shown_pairs
from fsdp2_tools.data.shown import lengths, samples


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Prepare or show, and return counts by split, as the folder's meta.json has them. Raises ConfigError."""
    arguments = parse(argv)
    if arguments.command == "show":
        given = {name: value for name, value in vars(arguments).items() if name not in ("command", "samples")}
        return show(Config(**read_values(Config, given)), arguments.samples)
    name = arguments.places[0] if arguments.published else f"{'chat' if arguments.chat else 'text'}:"
    out = Path(arguments.out).absolute()
    try:
        ((_, encoder),) = opened(name, arguments.tokenizer, arguments.text_field, arguments.bos, arguments.chat_fields)
        files = [file for place in arguments.places for file in found(place, encoder.suffixes)]
        meta = prepare(files, out, encoder, say=_say)
        warnings = header_lines.warnings({**meta, **encoder.about}, encoder.tokenizer.names)
        kind, what = encoder.kind, {"chat": "conversations", "text": "documents"}[encoder.kind]
    except UnusableText as error:
        raise ConfigError(str(error)) from None
    documents, tokens = (sum(meta[name].values()) for name in ("documents", "tokens"))
    if meta["refused"]:
        some = places(meta["unread"]) + ", …" * (meta["refused"] > NAMED)
        print(f"warning: {meta['refused']:,} can't be read ({some}), and a run needs --bad-samples drop")
        print(f"  {printable(meta['refusal'])}")
    if unlearned := meta["unlearned"]:
        some = places(unlearned[:NAMED]) + ", …" * (len(unlearned) > NAMED)
        print(f"warning: no answer to learn ({some}); a run needs --bad-samples drop to leave them out")
    print(*warnings, f"prepared {documents:,} {what}, {tokens:,} tokens: {out}", sep="\n")
    next_line = f"torchrun --nproc_per_node 2 -m fsdp2.train --dataset {shlex.quote(f'{kind}:{out}')}"
    for flag, usual in (("--tokenizer", None), ("--bos", "auto"), ("--text-field", "text"), ("--chat-fields", None)):
        value = vars(arguments)[flag[2:].replace("-", "_")]
        next_line += "" if value == usual else f" {flag} {shlex.quote(value)}"
    print(f"next: {next_line}")
    return meta


def show(config: Config, count: int) -> dict[str, Any]:
    """Print a run's lines about its data, and its first sequences; the counts. Of pairs, what examples/dpo.py learns.

    Raises ConfigError.
    """
    if not config.dataset.startswith(OWN):
        raise ConfigError(f"--dataset {config.dataset}: only {', '.join(OWN)} are shown; give one of them")
    try:
        if (found := shown_pairs(config, count)) is not None:
            print(*found, sep="\n")
            return {}
    except UnusableText as error:
        raise ConfigError(f"--dataset {config.dataset}: {error}") from None
    check_data(config)
    dataset = open_data(config)
    try:
        encoders = [one for _, one in opened(config.dataset, **reading_of(config))]
        print(*header_lines.lines(dataset), sep="\n")
        parts = [one for _, one, _ in dataset.about.get("mixed", [("", dataset, 0)])]
        for part, encoder in zip(parts, encoders[: len(parts)], strict=True):
            print(*samples(part, encoder.tokenizer.decode, count), *lengths(part), sep="\n")
    except UnusableText as error:
        raise ConfigError(f"--dataset {config.dataset}: {error}") from None
    return dataset.about


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def cli(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0; 2 for what is refused; 130 after Ctrl-C."""
    try:
        main(argv)
    except ConfigError as error:
        print(f"fsdp2.data: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nfsdp2.data: interrupted; nothing was made, and the same command begins again", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


if __name__ == "__main__":
    sys.exit(cli())
