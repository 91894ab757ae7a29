"""Two flags of a run use a tool: `--doctor`, and `--profile` for its page. Nothing else of the book loads one."""

from __future__ import annotations

import importlib
from typing import Any

from fsdp2.options.errors import ConfigError


def tool(flag: str, module: str) -> Any:
    """A module of the tools beside the book, which its flag alone loads. Raises ConfigError where they are missing."""
    try:
        return importlib.import_module(f"fsdp2_tools.{module}")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{flag}: {error.name} is missing; put fsdp2_tools beside fsdp2, or drop {flag}") from None
