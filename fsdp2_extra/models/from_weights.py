"""The defaults of a run that begins with trained weights, for its header."""

from __future__ import annotations

from typing import Any

from fsdp2.options.own_model import FROM_WEIGHTS


def line(config: Any) -> str:
    """A line for the header of a run that begins with trained weights."""
    warm, decay = config.warmup_steps, config.weight_decay
    words = [
        f"{config.epochs} epoch{'s' * (config.epochs > 1)}"
        + f" ({config.max_steps} steps at most)" * bool(config.max_steps)
    ]
    words += [f"{config.optimizer}, lr {config.lr:g}", config.schedule]
    words += [f"warm-up of {f'{warm:.0%} of the steps' if warm < 1 else f'{warm} steps'}"] * bool(warm)
    words += [f"weight decay {0.01 if decay is None else decay:g}"] * (config.optimizer == "adamw")
    words += [] if config.clip_grad_norm is None else [f"gradients clipped to norm {config.clip_grad_norm:g}"]
    if config.spec.kind == "language":
        most = "up to " * (config.global_batch_size is not None)
        words.append(f"{most}{config.batch_size} sequences of {config.seq_len} tokens a rank and microbatch")
        if (known := config.spec.positions) and config.seq_len > known:
            words[-1] += f" (warning: its weights were trained for {known:,} positions)"
        elif known and config.seq_len < FROM_WEIGHTS["seq_len"] and 2 * config.seq_len > known:
            words[-1] += f" (it has {known:,} positions)"
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in FROM_WEIGHTS)
    return f"from weights: {', '.join(words)}; {flags} change them"
