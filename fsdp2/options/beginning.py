"""Defaults that depend on where a run begins: with drawn weights, with trained ones, or with adapters beside those."""

from __future__ import annotations

from typing import Any

# As the tutorials that this project follows.
FROM_NOTHING = {"epochs": 12, "optimizer": "adam", "lr": 1e-3, "schedule": "step", "warmup_steps": 0}
FROM_NOTHING |= {"clip_grad_norm": None, "seq_len": 128, "batch_size": 64}
# As transformers, TRL and axolotl: few passes and small steps, since most of what is wanted is in the weights already.
FROM_WEIGHTS = {"epochs": 3, "optimizer": "adamw", "lr": 2e-5, "schedule": "cosine", "warmup_steps": 0.03}
FROM_WEIGHTS |= {"clip_grad_norm": 1.0, "seq_len": 1024, "batch_size": 8}  # a microbatch has as many tokens as above
WITH_ADAPTERS = {**FROM_WEIGHTS, "lr": 2e-4}


def unset(name: str) -> str:
    """The end of an option's help: its defaults, by where a run begins."""
    nothing, weights, adapters = (table[name] for table in (FROM_NOTHING, FROM_WEIGHTS, WITH_ADAPTERS))
    return f"; unset = {nothing}, from weights {weights}" + (f", --lora {adapters}" if adapters != weights else "")


def complete(config: Any) -> None:
    """Set those of a Config that are unset. Its model is known by then."""
    weights, positions = config.weights is not None, config.spec.positions
    table: dict[str, Any] = (WITH_ADAPTERS if config.lora is not None else FROM_WEIGHTS) if weights else FROM_NOTHING
    if config.spec.kind == "image":
        table = {**table, **{name: FROM_NOTHING[name] for name in ("seq_len", "batch_size")}}
    elif weights and positions:  # a power of two, as some models count two that are no token's
        table = {**table, "seq_len": min(table["seq_len"], 1 << (positions.bit_length() - 1))}
    for name, value in table.items():
        if getattr(config, name) == ("auto" if name == "clip_grad_norm" else None):  # whose None is off
            object.__setattr__(config, name, value)
