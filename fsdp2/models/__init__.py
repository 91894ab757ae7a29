"""Models by name. A model's file holds its sizes, its blocks, its initial values and its loss; no sharding.

Beside our own: `hf:DIR_OR_NAME`, `timm:NAME`, and `package.module:function` for a function of one's own.
"""

from __future__ import annotations

import importlib
from functools import cache

from fsdp2.models.chunked import chunked
from fsdp2.models.lora import Lora, adapted
from fsdp2.models.spec import ModelSpec

NAMES = ("vit", "cnn", "transformer", "llama")

__all__ = ["NAMES", "Lora", "ModelSpec", "get"]


@cache
def get(
    name: str, *, trust_remote_code: bool = False, lora: Lora | None = None, chunk_tokens: int | None = None
) -> ModelSpec:
    """The specification of a model, with adapters or a loss in chunks if asked for; imports only that model's file.

    Raises ValueError, in one line, if there is no such model or it can't be used.
    """
    if chunk_tokens is not None:
        return chunked(get(name, trust_remote_code=trust_remote_code, lora=lora), chunk_tokens)
    if lora is not None:
        return adapted(get(name, trust_remote_code=trust_remote_code), lora)
    library, colon, rest = name.partition(":")
    if not colon:
        spec: ModelSpec = importlib.import_module(f"fsdp2.models.{name}").SPEC
        return spec
    if library == "hf":
        from fsdp2.models import hf

        return hf.spec(rest, trust_remote_code=trust_remote_code)
    if library == "timm":
        from fsdp2.models import timm_models

        return timm_models.spec(rest)
    from fsdp2.models import function

    return function.spec(name)
