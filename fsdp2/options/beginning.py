"""Defaults that depend on where a run begins: with drawn weights, with trained ones, or with adapters beside those."""

from __future__ import annotations

from typing import Any

# As the tutorials that this project follows.
FROM_NOTHING = {"epochs": 12, "optimizer": "adam", "lr": 1e-3, "schedule": "step", "warmup_steps": 0}
# As transformers, TRL and axolotl: few passes and small steps, since most of what is wanted is in the weights already.
FROM_WEIGHTS = {"epochs": 3, "optimizer": "adamw", "lr": 2e-5, "schedule": "cosine", "warmup_steps": 0.03}
WITH_ADAPTERS = {**FROM_WEIGHTS, "lr": 2e-4}


def unset(name: str) -> str:
    """The end of an option's help: its defaults, by where a run begins."""
    nothing, weights, adapters = (table[name] for table in (FROM_NOTHING, FROM_WEIGHTS, WITH_ADAPTERS))
    return f"; unset = {nothing}, from weights {weights}" + (f", --lora {adapters}" if adapters != weights else "")


def complete(config: Any) -> None:
    """Set those of a Config that are unset. Its model is known by then."""
    weights = config.weights is not None
    table = (WITH_ADAPTERS if config.lora is not None else FROM_WEIGHTS) if weights else FROM_NOTHING
    for name, value in table.items():
        if getattr(config, name) is None:
            object.__setattr__(config, name, value)


def line(config: Any) -> list[str]:
    """A line for the header of a run that begins with trained weights."""
    if config.weights is None:
        return []
    warm, decay = config.warmup_steps, config.weight_decay
    words = [f"{config.epochs} epochs", f"{config.optimizer}, lr {config.lr:g}", config.schedule]
    words += [f"warm-up of {f'{warm:.0%} of the steps' if warm < 1 else f'{warm} steps'}"] * bool(warm)
    words += [f"weight decay {0.01 if decay is None else decay:g}"] * (config.optimizer == "adamw")
    return [f"from weights: {', '.join(words)}; --epochs, --optimizer, --lr, --schedule and --warmup-steps change them"]
