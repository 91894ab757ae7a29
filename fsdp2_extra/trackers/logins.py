"""The checks of `--track` on the machine: libraries and logins, as far as they are known without a network."""

from __future__ import annotations

import netrc
import os
from contextlib import suppress
from typing import Any

from fsdp2.options.checks import trackers_of
from fsdp2.options.errors import ConfigError, require

# What their libraries read, for workers that are started elsewhere.
VARIABLES = {f"WANDB_{name}" for name in ("API_KEY", "BASE_URL", "DIR", "ENTITY", "MODE", "PROJECT")}
VARIABLES |= {f"MLFLOW_TRACKING_{name}" for name in ("URI", "TOKEN", "USERNAME", "PASSWORD")}
VARIABLES |= {f"MLFLOW_EXPERIMENT_{name}" for name in ("ID", "NAME")}


def require_trackers(config: Any) -> None:
    """Raises ConfigError if one that is asked for can't be written to from this process, which is rank 0's."""
    for name in trackers_of(config):
        require(name, name, flag := f"--track {name}" if name in config.track else "--tensorboard")
        if name == "wandb" and not _logs_in():
            raise ConfigError(
                f"{flag}: no login is known here, and a run never asks for one; wandb login, set WANDB_API_KEY, or "
                "WANDB_MODE=offline, which needs none"
            )


def _logs_in() -> bool:
    """Return whether W&B's library finds a key, or needs none. `wandb login` writes one for a `user` of its host."""
    if os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled"):
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    for place in (os.environ.get("NETRC", "~/.netrc"), "~/_netrc"):
        with suppress(OSError, netrc.NetrcParseError):  # nobody can log in by such a file
            if any(login == "user" for login, _, _ in netrc.netrc(os.path.expanduser(place)).hosts.values()):
                return True
    return False
