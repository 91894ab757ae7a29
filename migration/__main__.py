"""From FSDP1 to FSDP2.  python -m fsdp2.migrate {options,check,rewrite,checkpoint,prove}

`options` prints what FSDP1's options mean in FSDP2: all of them, or those whose name or code holds NAME.
`check` finds every use of FSDP1 in code and configurations, `rewrite` moves it.
`checkpoint` converts a checkpoint of FSDP1, and proves that nothing changed.
`prove` runs two programs, or one on one rank and on several, and says where they differ and why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fsdp2.options.errors import ConfigError
from fsdp2.options.parser import Parser
from migration.checkpoints import flags as checkpoints
from migration.options import TABLE, listing
from migration.prove import flags as prove
from migration.rewriter import cli as code


def run_options(given: argparse.Namespace) -> None:
    """Raises ConfigError if nothing has such a name."""
    wanted = (given.name or "").lower()
    rows = [row for row in TABLE if wanted in row.name.lower() or wanted == row.code.lower()]
    if not rows:
        raise ConfigError(f"options {given.name}: FSDP1 has no option of that name; leave the name out to print all")
    print(listing(rows))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line; `--help` prints and exits. Raises ConfigError."""
    parser = Parser(prog="python -m fsdp2.migrate", description=(__doc__ or "").partition("  ")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    meaning = "what each option of FSDP1 means in FSDP2"
    options = commands.add_parser("options", help=meaning, description=meaning)
    options.add_argument("name", nargs="?", metavar="NAME", help="a part of a name, such as NO_SHARD or no_sync")
    options.set_defaults(run=run_options)
    code.add(commands)
    checkpoints.add_command(commands)
    prove.add_command(commands)
    words, for_programs = prove.split(sys.argv[1:] if arguments is None else arguments)
    return parser.parse_args(words, argparse.Namespace(arguments=for_programs))


def main_of_files() -> None:
    """Parse, and run what reads files alone: to import torch takes longer than most of that. Exits with its status."""
    given = parse()
    if given.command in ("options", "check", "rewrite"):
        sys.exit(given.run(given))


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises ConfigError for what is refused; exits with 1 for what is left to do, or differs."""
    given = parse(arguments)
    if status := given.run(given):
        sys.exit(status)
