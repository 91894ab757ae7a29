"""The meaning of `--model` and the flags beside it: the model's specification, its weights, its defaults."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from fsdp2 import data, models
from fsdp2.models.names import on_hub
from fsdp2.options.errors import ConfigError, refused, shown, unknown
from fsdp2.options.values import LONGEST_PATH

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdp2.models.spec import ModelSpec

Config = Any  # fsdp2.config's, which is made of this room

# Defaults by where a run begins: with drawn weights, with trained ones, or with adapters beside those.
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


def spec(config: Config) -> ModelSpec:
    """The model that `--model` names, with the adapters that `--lora` asks for and the loss of `--chunked-loss`.

    Raises ValueError, in one line, if there is no such model or it can't be used.
    """
    chunks = {} if config.chunked_loss is None else {"chunk_tokens": config.chunked_loss}
    asked: dict[str, Any] = {"trust_remote_code": config.trust_remote_code, **chunks}
    if config.attention != "auto":
        asked["attention"] = config.attention
    if config.lora is None:
        return models.get(config.model, **asked)
    from fsdp2_extra.models.lora import Lora

    lora = Lora(
        rank=config.lora,
        alpha=2.0 * config.lora if config.lora_alpha is None else config.lora_alpha,
        targets=config.lora_targets,
        dropout=config.lora_dropout,
        base_dtype=base_dtype(config),
        weights=config.weights,
    )
    return models.get(config.model, lora=lora, **asked)


def base_dtype(config: Config) -> torch.dtype:
    """The dtype in which weights beside adapters are kept.

    FSDP2 casts them for each all-gather anyway: kept in that dtype, they give the same results, bit for bit.
    """
    from fsdp2.parallel.precision import DTYPES

    casts = config.strategy == "fsdp2" and config.mixed_precision is not None
    return DTYPES[config.mixed_precision if casts else "fp32"]


def code_flags(config: Config, *, reads_copy: bool = False) -> list[str]:
    """The words that a command needs beside a run's files, which run no code and ask no network: mostly none.

    Args:
        reads_copy: the command reads no weights but the run's, so of a folder of Hugging Face's the run's copy will do.
    """
    flags = ["model", "trust-remote-code", "dataset", "eval-dataset", "init-from"]
    if reads_copy and config.model.startswith("hf:") and config.lora is None and not config.trust_remote_code:
        flags.remove("model")
    values = {flag: getattr(config, flag.replace("-", "_")) for flag in flags}
    return [word for _, _, words in _beyond(values | {"data-root": config.data_root}) for word in words]


def require_named(values: Mapping[str, Any], given: Mapping[str, Any], where: str) -> None:
    """Refuse a run's flags if they would run a stranger's code or ask a network, and aren't on the command line too.

    Args:
        values: what the run's file says, by flag.
        given: what the command line says, by field.
        where: the file, as the refusal begins with it.

    Raises ConfigError.
    """
    named = {name.replace("_", "-"): value for name, value in given.items()}
    for flag, why, words in _beyond({**values, **named}):
        if flag not in named:
            line = f"{where}: its {shown(flag)} {why}, and a run's folder is data; if you trust that, add "
            raise ConfigError(line + shlex.join(words))


def _beyond(values: Mapping[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    """Flags for which what is installed, and this machine's files, aren't enough: why, and the words that name them."""
    for flag, value in values.items():
        is_text, named = isinstance(value, str), shown(value, LONGEST_PATH)
        needs_data = flag == "dataset" and value in data.ON_DISK and values.get("data-root") is None
        if flag in ("dataset", "eval-dataset") and is_text and value.startswith(data.OWN):
            from fsdp2_extra.text.places import absolute

            with suppress(ValueError):  # what isn't written as a dataset is refused for that
                value = absolute(value)  # a name on the hub becomes a URL
        if is_text and "://" in value:
            why = "is at a URL"
        elif is_text and flag == "model" and models.is_function(value):
            why = "is code"
        elif is_text and flag == "model" and value.startswith("hf:") and on_hub(value.removeprefix("hf:")):
            why = "is on a hub"
        elif flag == "trust-remote-code" and value is not False:
            why, named = "runs its model's Python files", ""
        elif needs_data and data.missing_files(value):
            why = "is to be downloaded"
        else:
            continue
        yield flag, f"{why}, {named or shown(values.get('model'))}", [f"--{shown(flag)}", *[named] * bool(named)]


def weights(config: Config) -> str | None:
    """The file or folder whose weights the run starts from, unless a checkpoint takes their place."""
    own = models.get(config.model, trust_remote_code=config.trust_remote_code).weights
    return None if config.init_from == "scratch" else config.init_from or (None if own is None else str(own))


def complete(config: Config) -> None:
    """Set options whose defaults the model or its weights decide. Raises ConfigError for no such model or size."""
    with refused(f"--model {shown(config.model, LONGEST_PATH)}"):
        found = config.spec
    if config.model_size is None:
        object.__setattr__(config, "model_size", next(iter(found.sizes)))
    elif config.model_size not in found.sizes:
        raise ConfigError(
            f"--model-size {shown(config.model_size)}: for {config.model} it "
            f"{unknown(shown(config.model_size), list(found.sizes))}"
        )
    if config.dataset is None:
        object.__setattr__(config, "dataset", data.DEFAULTS[found.kind])
    _set_by_beginning(config)
    if config.test_batch_size is None:
        # A forward of language gives a number for each token and each word of the vocabulary.
        object.__setattr__(config, "test_batch_size", 1000 if found.kind == "image" else config.batch_size)


def _set_by_beginning(config: Config) -> None:
    """Set options that are unset, by where the run begins. Its model is known by then."""
    weights, positions = config.weights is not None, config.spec.positions
    table: dict[str, Any] = (WITH_ADAPTERS if config.lora is not None else FROM_WEIGHTS) if weights else FROM_NOTHING
    if config.spec.kind == "image":
        table = {**table, **{name: FROM_NOTHING[name] for name in ("seq_len", "batch_size")}}
    elif weights and positions:  # a power of two, as some models count two that are no token's
        table = {**table, "seq_len": min(table["seq_len"], 1 << (positions.bit_length() - 1))}
    for name, value in table.items():
        if getattr(config, name) == ("auto" if name == "clip_grad_norm" else None):  # whose None is off
            object.__setattr__(config, name, value)


def blocks_of(config: Config) -> Callable[[nn.Module], Sequence[nn.Module]]:
    """The function that finds the blocks of the model: the flag's, or the model's specification."""
    if config.shard_modules:
        from fsdp2_extra.models.blocks import named_blocks

        return partial(named_blocks, patterns=config.shard_modules)
    return config.spec.blocks
