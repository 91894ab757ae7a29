"""The run directory: where things lie in it, and the flags that a run was started with, written and read."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp2.checkpoint import meaning
from fsdp2.checkpoint.files import Files, LocalFiles, publish
from fsdp2.checkpoint.places import open_files
from fsdp2.checkpoint.store import INDEX, MARKER, DamagedCheckpoint, Store, read_marker, verify
from fsdp2.config import Config
from fsdp2.options.errors import ConfigError, shown
from fsdp2.options.parser import read_file, to_flags
from fsdp2.options.values import LONGEST_PATH
from fsdp2.run.directory.marker import environment

LINEAGE = "memory.json"  # which start of the run its checkpoints in memory belong to
_OURS = re.compile(r"(config|deepspeed|memory|plan|tracking)\.json|metrics\.jsonl|hang\.txt|rank[0-9]+_")


class RunDir:
    """The places of the parts of one run.

        config.json  metrics.jsonl  checkpoints/step-…/  full_model/full-model.pt

    For a run at a URL the checkpoints are there, and the rest is in a local folder, uploaded at each commit.
    """

    def __init__(self, place: str | Path) -> None:
        self.is_remote = "://" in str(place)
        self.path = _local_folder(str(place)) if self.is_remote else Path(place).absolute()
        self.place = str(place).rstrip("/") if self.is_remote else str(self.path)
        self.config = self.path / "config.json"
        self.metrics = self.path / "metrics.jsonl"
        self.full_folder = self.path / "full_model"
        self.full_model = self.full_folder / "full-model.pt"
        self.files = open_files(self.place)
        self.store = Store(self.files.at("checkpoints"))

    @property
    def full_weights(self) -> Path | None:
        """The place of the full model, if it is there: full-model.pt, or the folder of safetensors."""
        if self.full_model.is_file():
            return self.full_model
        has_safetensors = any((self.full_folder / name).is_file() for name in (INDEX, "model.safetensors"))
        return self.full_folder if has_safetensors else None

    def require_plain(self) -> None:
        """Raise ConfigError if something else is where a file or folder of the run belongs, or it can't be written.

        A FIFO would be waited for without end, and a link to a file would be written through, wherever it leads.
        """
        folders = [self.path / one for one in ("checkpoints", "full_model", "tensorboard", "wandb", "mlruns")]
        wrong = [(path, "folder") for path in folders if os.path.lexists(path) and not path.is_dir()]
        files = [path for path in _entries(self.path) if _OURS.match(path.name)]
        kept = (self.full_folder, self.path / "model", self.path / meaning.TOKENIZER)
        wrong += [(path, "folder of its own, but a link") for path in kept if path.is_symlink()]
        files += [path for folder in kept for path in _entries(folder)]
        for path in files:
            # A tokenizer may have templates in a folder, whose name has no suffix.
            if path.is_symlink() or not (path.is_file() or (path.is_dir() and not path.suffix)):
                wrong.append((path, "plain file"))
        if wrong:
            path, what = wrong[0]
            raise ConfigError(f"--run-dir {self.place}: {path} isn't a {what}; move it away or choose another folder")
        for path in folders:  # the last save and the full model would find it out
            if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
                raise ConfigError(
                    f"--run-dir {self.place}: {path} can't be written to; give this user the right to, or choose "
                    "another run directory"
                )

    def flags(self) -> Mapping[str, Any] | None:
        """The flags that the run was started with, by config.json; None if there is none, or it is no run's."""
        if not self.config.exists():
            return None
        from fsdp2.options.settings_file import read_table

        try:
            return dict(read_table(str(self.config))["flags"])
        except (ValueError, TypeError, KeyError):
            return None

    def require_own(self) -> None:
        """Raise ConfigError for what a run would replace here, though no run has written it."""
        there = [name for name in (self.config.name, self.metrics.name) if self.files.size(name)]
        there += [f"{name}/" for name in ("model", meaning.TOKENIZER, "full_model") if self.files.list(name)]
        converted = self.config.name not in there and self.store.committed()
        if there and not converted and self.flags() is None:
            why = f"{there[0]} there is no run's, or damaged, and a run would replace it"
            raise ConfigError(f"--run-dir {self.place}: {why}; move it away, or choose another folder")

    def upload_metrics(self, position: int) -> None:
        """Copy the metrics file up to `position` to a remote run's URL."""
        if self.is_remote:
            with open(self.metrics, "rb") as file:
                self.files.write(self.metrics.name, file.read(position))

    def upload_full_model(self) -> None:
        """Copy the full model and optimizer to a remote run's URL, and their marker last."""
        if self.is_remote:
            from fsdp2_extra.remote.copies import upload_full_model

            upload_full_model(*self.full_folders())

    def full_folders(self) -> tuple[LocalFiles, Files]:
        """The folder of the full model here, and at a remote run's URL; of a local run, both are the same."""
        return LocalFiles(self.full_folder), self.files.at(self.full_folder.name)

    def outdate_full_model(self) -> None:
        """Before training goes on: the full model is of an earlier state then, and has to be written again."""
        for folder in self.full_folders()[: 1 + self.is_remote]:
            if folder.size(MARKER) is not None:
                folder.unlink(MARKER)
                folder.fsync("")

    def has_full_model(self, step: int) -> bool:
        """Return whether the full model is there, of this step, and each file in its marker has its size."""
        folder = self.full_folders()[1]
        try:
            verify(folder, hashes=False)
            return bool(read_marker(folder)["step"] == step)
        except DamagedCheckpoint:
            return False

    def fetch(self) -> None:
        """Copy a remote run's metrics and config here, to go on with them."""
        if self.is_remote:
            for path in (self.metrics, self.config):
                if self.files.size(path.name) is not None:
                    path.write_bytes(self.files.read(path.name))


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _local_folder(url: str) -> Path:
    """The same folder for the same URL, so that a resumed run finds its own, and no other's for another."""
    url = url.rstrip("/")
    digest = hashlib.sha256(url.encode()).hexdigest()[:8]
    # The digest tells them apart; a file system takes no name of more than 255 bytes.
    return (Path("runs") / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', url)[:200]}-{digest}").absolute()


def default_path(model: str) -> Path:
    """`runs/<model>-<time>`."""
    name = re.split("[:/]", model.rstrip("/"))[-1][:100]  # of a folder or a function, its own
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def write_config(run: RunDir, config: Config, world_size: int) -> None:
    """config.json: the flags, which `--config` reads back, and the environment."""
    content = {"flags": to_flags(config), "environment": environment(world_size)}
    for files in (LocalFiles(run.path), *[run.files] * run.is_remote):  # by it all further files are known for a run's
        publish(files, run.config.name, (json.dumps(content, indent=1) + "\n").encode())


def read_config(run: RunDir, **named: Any) -> Config:
    """The Config that `write_config` wrote, at a folder or URL. Raises ConfigError without one that can be used.

    Args:
        named: options that take the place of the run's. Those that run code or ask a network count only if named here.
    """
    place = f"{run.place}/{run.config.name}"
    try:
        exists = run.files.size(run.config.name) is not None or os.path.lexists(run.config)
    except OSError as error:
        raise ConfigError(f"RUN {run.place}: can't be read ({error}); check the URL and access") from None
    if not exists:
        raise ConfigError(
            f"{run.place}: holds no {run.config.name}, so it is not a run of fsdp2.train; give one's folder or URL"
        )
    given = {name: value for name, value in named.items() if value not in (None, False)}
    values = read_file(Config, place, given, called="")
    if run.is_remote and values.get("tokenizer") not in (None, "bytes"):
        from fsdp2_extra.remote.copies import fetch_tokenizer

        copy = LocalFiles(run.path / meaning.TOKENIZER)
        if fetch_tokenizer(copy, run.files.at(meaning.TOKENIZER)):
            values["tokenizer"] = str(copy)
    try:
        return Config(**{**values, **given})
    except ConfigError as error:
        raise ConfigError(f"{shown(place, LONGEST_PATH)}: {error}") from None
