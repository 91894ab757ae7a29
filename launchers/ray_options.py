"""The options that Ray adds to those of `fsdp2.train`, and what they mean for a Config. No Ray here."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp2.config import Config
from fsdp2.config import parser as train_parser
from fsdp2.options import ConfigError, add_options, check_values, one_of, option, read_values, text, whole


@dataclass(frozen=True)
class RayOptions:
    num_workers: int = option(2, "ranks, each on a CPU of Ray's", whole(1))
    use_gpu: str = option("auto", "a GPU for each worker: auto, yes or no", one_of("auto", "yes", "no"))
    max_failures: int = option(1, "how often workers that died are started again", whole(0))
    storage_path: str | None = option(None, "where runs are kept: a folder that all nodes see", text)
    name: str | None = option(None, "of the run; the same name and storage resumes", text)
    address: str | None = option(None, "a running cluster, such as 10.0.0.1:6379; unset = one on this machine", text)

    def __post_init__(self) -> None:
        check_values(self)


def parse(arguments: Sequence[str] | None, prog: str) -> tuple[RayOptions, Config]:
    """Both from one command line. Raises ConfigError, with the texts of `fsdp2.train`."""
    parser = train_parser(prog)
    add_options(parser.add_argument_group("Ray"), RayOptions)
    given = vars(parser.parse_args(arguments))
    ray = RayOptions(**{f.name: given.pop(f.name) for f in dataclasses.fields(RayOptions) if f.name in given})
    return ray, Config(**read_values(Config, given))


def place(options: RayOptions, config: Config) -> tuple[str, str, Config]:
    """Ray's storage path and name, and the Config of a run there: its run directory is `storage/name`.

    Raises ConfigError if that is said twice, or for a URL.
    """
    if config.run_dir is not None:
        for flag, value in (("--storage-path", options.storage_path), ("--name", options.name)):
            if value is not None:
                raise ConfigError(f"{flag} {value}: --run-dir says it already, as {config.run_dir}; give one of them")
        storage, _, name = config.run_dir.rstrip("/").rpartition("/")
    else:
        storage = options.storage_path or "runs"
        name = options.name or f"fsdp_{config.dataset.replace('-', '_')}_{uuid.uuid4().hex[:8]}"
    if "://" in storage:
        raise ConfigError(f"--storage-path {storage}: runs at a URL go through torchrun alone; give a folder")
    storage = str(Path(storage).absolute())
    return storage, name, dataclasses.replace(config, run_dir=f"{storage}/{name}")
