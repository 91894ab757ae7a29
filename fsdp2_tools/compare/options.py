"""The flags of a comparison, without what compares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp2.config import Config
from fsdp2.options.errors import ConfigError, flag_of, shown, unknown
from fsdp2.options.parser import make_parser, read_values
from fsdp2.options.strategies import STRATEGIES
from fsdp2.options.values import checked, location, whole
from fsdp2.units import byte_count
from fsdp2_tools.compare.variants import VARIANTS

# What a comparison decides itself.
OURS = ("strategy", "run_dir", "resume", "resume_partial", "max_steps", "epochs", "memory_snapshot", "save_model")
INSTEAD = {"strategy": "--strategies", "max_steps": "--steps", "epochs": "--steps"}


def parse(arguments: Sequence[str] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The comparison's own options and the training's."""
    parser = make_parser(
        Config,
        prog="fsdp2.compare",
        description="Train the same model with several strategies, and compare losses, time and memory.",
    )
    own = parser.add_argument_group("the comparison")
    own.add_argument("--strategies", metavar="A,B", help=f"of {', '.join(STRATEGIES)} (default: ddp,fsdp1,fsdp2)")
    own.add_argument("--variants", metavar="A,B", help=f"sets of flags: {', '.join(VARIANTS)} (default: default)")
    own.add_argument("--nproc", metavar="N", help="ranks on this machine (default: 2)")
    own.add_argument("--steps", metavar="N", help="optimizer steps of a run (default: 20)")
    own.add_argument("--repeats", metavar="N", help="runs of each row (default: 3)")
    own.add_argument("--budget", metavar="BYTES", help="memory that a rank may use (default: its share of the device)")
    own.add_argument("--out", metavar="DIR", help="where the results go (default: comparisons/<time>)")
    given = vars(parser.parse_args(arguments))
    for name in OURS:
        if name in given:
            instead = f", or use {INSTEAD[name]}" if name in INSTEAD else ""
            raise ConfigError(f"{flag_of(name)}: a comparison decides this itself; drop it{instead}")
    defaults = {"strategies": "ddp,fsdp1,fsdp2", "variants": "default", "nproc": 2, "steps": 20, "repeats": 3}
    values: dict[str, Any] = {"budget": None, "out": None, **defaults}
    values |= {name: given.pop(name) for name in list(values) if name in given}
    for name, parse in (
        ("nproc", whole(1, 256)),
        ("steps", whole(2, 10**6)),
        ("repeats", whole(1, 1000)),
        ("budget", byte_count),
        ("out", location),
    ):
        if values[name] is not None:
            values[name] = checked(f"--{name}", values[name], parse)
    for name in ("strategies", "variants"):
        values[name] = list(dict.fromkeys(part.strip() for part in values[name].split(",")))
    for strategy in values["strategies"]:
        if strategy not in STRATEGIES:
            raise ConfigError(f"--strategies {shown(strategy)}: {unknown(shown(strategy), list(STRATEGIES))}")
    training = read_values(Config, given)
    if training.get("checkpoint_every") == "never":
        raise ConfigError("--checkpoint-every never: a comparison measures saves and loading too; drop it")
    return values, training
