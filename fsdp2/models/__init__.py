"""Models by name. A model's file holds its sizes, its blocks, its initial values and its loss; no sharding.

Beside our own: `hf:DIR_OR_NAME`, `timm:NAME`, and `package.module:function` for a function of one's own.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from fsdp2.models.names import ATTENTIONS, LIBRARIES, NAMES
from fsdp2.units import install

if TYPE_CHECKING:
    from torch import nn

    from fsdp2.models.spec import ModelSpec
    from fsdp2_extra.models.lora import Lora

__all__ = ["ATTENTIONS", "LIBRARIES", "NAMES", "get", "is_function"]


def is_function(name: str) -> bool:
    """Return whether a model's name is that of a function, whose module `get` imports."""
    library, colon, _ = name.partition(":")
    return bool(colon) and library not in LIBRARIES


@cache
def get(
    name: str,
    *,
    trust_remote_code: bool = False,
    lora: Lora | None = None,
    chunk_tokens: int | None = None,
    attention: str = "auto",
) -> ModelSpec:
    """The specification of a model, with adapters or a loss in chunks if asked for; imports only that model's file.

    Args:
        attention: how a model attends that can choose; others follow `attention.kernels`.

    Raises ValueError, in one line, if there is no such model or it can't be used.
    """
    if chunk_tokens is not None:
        from fsdp2.models.chunked import chunked

        whole = get(name, trust_remote_code=trust_remote_code, lora=lora, attention=attention)
        return chunked(whole, chunk_tokens)
    if lora is not None:
        return _adapted(get(name, trust_remote_code=trust_remote_code, attention=attention), lora)
    plain = made_once(name, trust_remote_code)
    if attention == "auto" or "flex" not in plain.attentions:
        return plain
    return dataclasses.replace(plain, make=partial(plain.make, attention=attention))


@cache
def made_once(name: str, trust_remote_code: bool) -> ModelSpec:
    """The specification that flags change. A stranger's model is tried once: before any tensor is fake, by a Config."""
    library, colon, rest = name.partition(":")
    if not colon:
        spec: ModelSpec = importlib.import_module(f"fsdp2.models.{name}").SPEC
        return spec
    if library == "hf":
        from fsdp2_extra.models import hf

        return hf.spec(rest, trust_remote_code=trust_remote_code)
    if library == "timm":
        from fsdp2_extra.models import timm_models

        return timm_models.spec(rest)
    from fsdp2_extra.models import function

    return function.spec(name)


def _adapted(spec: ModelSpec, lora: Lora) -> ModelSpec:
    """A specification of the same model with adapters. Raises ValueError without peft."""
    try:
        import peft  # noqa: F401
    except ImportError:
        raise ValueError(f"--lora: peft isn't installed; {install('peft')}") from None
    from fsdp2_extra.models.lora import FILE

    def make(**size: Any) -> nn.Module:
        model = spec.make(**size)
        lora.adapt(model, spec.blocks(model))
        return model

    def files(size: str) -> Mapping[str, bytes]:
        model = spec.on_meta(size)
        facts = lora.adapt(model, spec.blocks(model))
        return {**spec.files(size), FILE: (json.dumps(facts, indent=1) + "\n").encode()}

    return dataclasses.replace(spec, make=make, files=files, lora=lora)
