"""Models by name. A model's file holds its sizes, its blocks, its initial values and its loss; no sharding."""

from __future__ import annotations

import importlib
from functools import cache

from fsdp2.models.spec import ModelSpec

NAMES = ("vit", "cnn", "transformer")

__all__ = ["NAMES", "ModelSpec", "get"]


@cache
def get(name: str) -> ModelSpec:
    """The specification of a model; imports only that model's file."""
    spec: ModelSpec = importlib.import_module(f"fsdp2.models.{name}").SPEC
    return spec
