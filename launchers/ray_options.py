"""The options that Ray adds to those of `fsdp2.train`, and what they mean for a Config. No Ray here."""

from __future__ import annotations

import argparse
import dataclasses
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fsdp2.config import TRAIN, Config
from fsdp2.config import parser as train_parser
from fsdp2.options.errors import ConfigError, flag_of, shown
from fsdp2.options.parser import add_options, read_values
from fsdp2.options.values import check_values, location, number, one_of, option, text, whole


class Workers(NamedTuple):
    """The least and the most ranks. They differ in an elastic run."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}:{self.most}"


MOST_WORKERS = 100_000
_count = whole(1, MOST_WORKERS)


def _workers(value: Any) -> Workers:
    least, colon, most = (value if isinstance(value, str) else shown(value)).partition(":")
    try:
        workers = Workers(_count(least), _count(most if colon else least))
    except ValueError:
        raise ValueError(f"must be a whole number from 1 to {MOST_WORKERS}, or two as MIN:MAX") from None
    if workers.least > workers.most:
        raise ValueError("must be MIN:MAX with MIN no greater than MAX")
    return workers


@dataclass(frozen=True)
class RayOptions:
    num_workers: Workers = option(  # noqa: RUF009 - a NamedTuple is as immutable as the others
        2, "ranks; MIN:MAX = as many as the cluster has room for, from MIN to MAX", _workers, metavar="N|MIN:MAX"
    )
    use_gpu: str = option("auto", "a GPU for each worker; auto = if the cluster has one", one_of("auto", "yes", "no"))
    max_failures: int = option(1, "how often Ray starts workers again after one has died", whole(0))
    resize_every: float = option(
        60, "with MIN:MAX workers, seconds between looks for new nodes", number(0, 10**7, open_minimum=True)
    )
    storage_path: str | None = option(None, "where runs are: a folder that all nodes see, or a URL", location)
    name: str | None = option(None, "the run directory's name; the same name and storage path resume its run", location)
    address: str | None = option(None, "a running cluster, such as 10.0.0.1:6379; unset = one on this machine", text)

    def __post_init__(self) -> None:
        check_values(self)
        if self.num_workers.least == self.num_workers.most and self.resize_every != RayOptions.resize_every:
            raise ConfigError(
                f"--resize-every {self.resize_every:g} with --num-workers {self.num_workers}: a fixed number is never "
                "resized; give --num-workers MIN:MAX or drop it"
            )


def parse(arguments: Sequence[str] | None, prog: str, description: str = TRAIN) -> tuple[RayOptions, Config]:
    """Both from one command line. Raises ConfigError, with the texts of `fsdp2.train`."""
    (options,), config = parse_groups(arguments, prog, {"Ray": RayOptions}, description)
    return options, config


def parse_groups(
    arguments: Sequence[str] | None, prog: str, groups: Mapping[str, type], description: str = TRAIN
) -> tuple[list[Any], Config]:
    """Dataclasses of options, each a titled group of flags, and the Config that all other flags make."""
    return read_groups(train_parser(prog, description=description), arguments, groups)[:2]


def read_groups(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    groups: Mapping[str, type],
    take: Callable[[dict[str, Any]], Any] = lambda given: None,
) -> tuple[list[Any], Config, Any]:
    """Parse groups by a parser that has further flags, which `take` takes out of the namespace and returns."""
    for title, options in groups.items():
        add_options(parser.add_argument_group(title), options)
    given = vars(parser.parse_args(arguments))
    taken = take(given)
    made = [
        options(**{f.name: given.pop(f.name) for f in dataclasses.fields(options) if f.name in given})
        for options in groups.values()
    ]
    return made, Config(**read_values(Config, given)), taken


def place(options: RayOptions, config: Config, *, prefix: str = "fsdp") -> tuple[str, str, Config]:
    """Ray's storage path and name, and the Config of a run there: its run directory is `storage/name`.

    Raises ConfigError if that is given twice or makes no path.
    """
    if config.run_dir is not None:
        for flag, value in (("--storage-path", options.storage_path), ("--name", options.name)):
            if value is not None:
                raise ConfigError(f"{flag} {value}: --run-dir sets it already, as {config.run_dir}; give one of them")
        # Absolute first: `rpartition` of /name would leave nothing above it, which is this folder.
        where = config.run_dir.rstrip("/") if "://" in config.run_dir else str(Path(config.run_dir).absolute())
        storage, _, name = where.rpartition("/")
        if storage.endswith(":/"):
            raise ConfigError(f"--run-dir {config.run_dir}: is a bucket; name a folder in it: {config.run_dir}/run")
        if not name:
            raise ConfigError(f"--run-dir {config.run_dir}: is the root of everything; name a folder in it")
        storage = storage or "/"
    else:
        storage = (options.storage_path or "runs").rstrip("/")
        name = options.name or f"{prefix}_{config.dataset.replace('-', '_')}_{uuid.uuid4().hex[:8]}"
        if "/" in name:
            raise ConfigError(f"--name {name}: is the name of one folder; put what is above it in --storage-path")
    if "://" not in storage:
        storage = str(Path(storage).absolute())
    return storage, name, dataclasses.replace(config, run_dir=f"{storage.rstrip('/')}/{name}")


# Flags of a run through Ray that make no sense for what leaves no run and is started once.
_OF_RUNS = {
    "storage_path": "it leaves no run there; drop it",
    "name": "it leaves no run of that name; drop it",
    "max_failures": "what dies is a result, and isn't started again; drop it",
}


def without_a_run(options: RayOptions) -> int:
    """The number of workers. Raises ConfigError for flags that only a run has a use for."""
    workers = options.num_workers
    if workers.least != workers.most:
        raise ConfigError(f"--num-workers {workers}: is measured on one number of workers; give {workers.most}")
    for name, why in _OF_RUNS.items():
        if getattr(options, name) != getattr(RayOptions, name):
            raise ConfigError(f"{flag_of(name)} {getattr(options, name)}: {why}")
    return workers.most


def same_global_batch(workers: Workers, config: Config) -> Config:
    """An elastic run's Config, whose optimizer steps are over the same samples with any number of workers."""
    if workers.least == workers.most:
        return config
    return dataclasses.replace(config, global_batch_size=config.global_batch(workers.most))
