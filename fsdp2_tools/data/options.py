"""The flags of `python -m fsdp2.data`, without what prepares and shows."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fsdp2 import config as training
from fsdp2.data import BOS
from fsdp2.options.errors import ConfigError
from fsdp2.options.parser import Parser
from fsdp2.options.values import chat_fields, checked, dataset_name, location, one_of, or_off, text, whole
from fsdp2_extra.text.places import PUBLISHED


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line. Raises ConfigError."""
    description = "Prepare data before a run, or look at it."
    parser = Parser(prog="python -m fsdp2.data", description=description, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{prepare,show}")
    words = "print the first sequences of a run's text or conversations, what is learned of them marked, and counts"
    common = training.parser(add_help=False)
    showing = commands.add_parser("show", help=words, description=words, parents=[common], allow_abbrev=False)
    showing.add_argument("--samples", default="3", metavar="N", help="how many sequences to print (default: 3)")
    words = "tokenize text once, for --dataset text:FOLDER"
    preparing = commands.add_parser("prepare", help=words, description=words, allow_abbrev=False)
    preparing.add_argument(
        "places", nargs="+", metavar="PATH", help="a file, a folder or a pattern; or datasets:PATH[:SPLIT] alone"
    )
    preparing.add_argument("--tokenizer", required=True, metavar="DIR", help="folder with tokenizer.json, or bytes")
    preparing.add_argument("--out", required=True, metavar="FOLDER", help="a new folder for the tokens")
    preparing.add_argument(
        "--text-field", default="text", metavar="NAME", help="field or column that holds the text (default: text)"
    )
    preparing.add_argument(
        "--chat-fields", metavar="OURS=THEIRS,…", help="how conversations name their fields and roles, as of a run"
    )
    preparing.add_argument(
        "--bos",
        default="auto",
        metavar="|".join(BOS),
        help="whether a token begins each document; auto = as the tokenizer's post-processor (default: auto)",
    )
    preparing.add_argument("--chat", action="store_true", help="the files are conversations, for --dataset chat:FOLDER")
    arguments = parser.parse_args(argv)
    if arguments.command == "show":
        arguments.samples = checked("--samples", arguments.samples, whole(0, 10**6))
        return arguments
    own = dataset_name((), (PUBLISHED,))
    arguments.published = any(place.startswith(PUBLISHED) for place in arguments.places)
    if arguments.published and (len(arguments.places) > 1 or arguments.chat):
        raise ConfigError(f"PATH: {PUBLISHED}PATH stands alone, and its columns say what it is; drop the rest")
    arguments.places = [checked("PATH", place, own if arguments.published else location) for place in arguments.places]
    for flag, value in (("--tokenizer", arguments.tokenizer), ("--out", arguments.out)):
        checked(flag, value, location)
    checked("--text-field", arguments.text_field, text)
    if arguments.chat_fields is not None:
        arguments.chat_fields = checked("--chat-fields", arguments.chat_fields, or_off(chat_fields))
        if not (arguments.chat or arguments.published):
            raise ConfigError("--chat-fields: only conversations have them; add --chat")
    checked("--bos", arguments.bos, one_of(*BOS))
    if arguments.chat and arguments.text_field != "text":
        raise ConfigError("--text-field with --chat: conversations are in the field messages; drop it")
    return arguments
