"""Flags that make no sense together, whatever the strategy. A refusal is one line that names the flag and the fix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from fsdp2 import data, models
from fsdp2.options.errors import ConfigError, flag_of
from fsdp2.options.values import TRACKERS
from fsdp2.parallel import FUSED, IN_FEW_BITS, LARGEST_BETA2

FALLING = ("cosine", "linear")  # schedules that reach their end with the run
KEEP = 3  # `--keep` where nobody gives it

Options = Any
"""An object with the flags as attributes, such as `fsdp2.config.Config`."""


def check_together(config: Options) -> None:
    """Raises ConfigError."""
    for check in (
        *(_check_data, _check_optimizer, _check_precision, _check_recomputation, _check_attention),
        *(_check_compilation, _check_resume, _check_saving, _check_lora, _check_weights, _check_observing),
        _check_trackers,
    ):
        check(config)


def _check_data(config: Options) -> None:
    kind = config.spec.kind
    if data.kind_of(config.dataset) != kind:
        fitting = ", ".join(name for name in data.NAMES if data.KINDS[name] == kind)
        own = ", or for text let it return a ModelSpec (docs/own-models.md)" * models.is_function(config.model)
        raise ConfigError(
            f"--dataset {config.dataset} with --model {config.model}: the model takes {kind} data; use one of "
            f"{fitting}{own}"
        )
    if kind == "image" and config.spec.classes < data.CLASSES:
        raise ConfigError(
            f"--model {config.model}: it tells {config.spec.classes} classes apart and {config.dataset} has "
            f"{data.CLASSES}; set num_labels in its config.json, and use --init-partial for the new head"
        )
    words = config.spec.vocab_size(config.model_size)
    if config.dataset == "source-text" and words is not None and words < 256:
        raise ConfigError(
            f"--dataset source-text: its tokens are bytes, and that of --model {config.model} has {words}; "
            "use --dataset random-tokens"
        )
    own, on_disk, kinds = config.dataset.startswith(data.OWN), config.dataset in data.ON_DISK, set()
    if own:
        from fsdp2_extra.text.places import sources

        names = [one for one in (config.dataset, config.eval_dataset) if one]
        kinds = {source.partition(":")[0] for name in names for source, _ in sources(name)}
    text, chat = kinds - {"chat"}, kinds == {"chat"}
    begins = "the chat template begins a conversation" if chat else "only documents of text begin with a token"
    for flag, wrong, why in (
        ("tokenizer", config.tokenizer and not own, "only text:, chat: and datasets: take one"),
        ("eval-dataset", config.eval_dataset and not own, "it has a test set of its own"),
        ("bad-samples drop", config.bad_samples == "drop" and not kinds - {"text"}, "only conversations are too long"),
        ("text-field", config.text_field != "text" and not text, "only text and tables have fields"),
        ("chat-fields", config.chat_fields and not kinds - {"text"}, "only chat: and datasets: have them"),
        (f"bos {config.bos}", config.bos != "auto" and not text, begins),
        ("data-root", config.data_root and not on_disk, f"only {' and '.join(data.ON_DISK)} are read from a folder"),
        ("documents", config.documents == "together" and not own, "its data has no documents"),
    ):
        if wrong:
            raise ConfigError(f"--{flag} with --dataset {config.dataset}: {why}; drop it")
    if "chat" in kinds and config.spec.task != "causal":
        raise ConfigError(
            f"--dataset {config.dataset} with --model {config.model}: conversations are learned token by token, and "
            "this model learns in another way; use text:PATH, or a causal model"
        )


def _check_optimizer(config: Options) -> None:
    if config.betas is not None and config.optimizer not in ("adam", "adamw"):
        raise ConfigError(f"--betas with --optimizer {config.optimizer}: it has no betas; use adamw, or drop it")
    if config.weight_decay is not None and config.optimizer != "adamw":
        raise ConfigError(
            f"--weight-decay with --optimizer {config.optimizer}: there it would be part of the gradients, which Adam "
            "scales; use --optimizer adamw, or drop it"
        )
    if config.lr_floor and config.schedule not in FALLING:
        raise ConfigError(
            f"--lr-floor with --schedule {config.schedule}: it has no floor; use {' or '.join(FALLING)}, or drop it"
        )
    require_reached(config.warmup_steps, config.max_steps or math.inf)
    if config.fused_optimizer and config.optimizer not in FUSED:
        raise ConfigError(
            f"--fused-optimizer with --optimizer {config.optimizer}: torch has no fused form of it for shards; use "
            f"--optimizer {' or '.join(FUSED)}, or drop --fused-optimizer"
        )
    if config.optimizer_state is None:
        return
    flag = f"--optimizer-state {config.optimizer_state}"
    if config.optimizer not in IN_FEW_BITS:
        raise ConfigError(
            f"{flag} with --optimizer {config.optimizer}: torchao has no form of it with moments in few bits; use "
            f"--optimizer {' or '.join(IN_FEW_BITS)}, or drop --optimizer-state"
        )
    if config.fused_optimizer:
        raise ConfigError(
            f"{flag} with --fused-optimizer: torch's kernel has moments in the parameters' dtype alone; drop one of "
            "them, and add --compile for one kernel a parameter"
        )
    beta2 = 0.999 if config.betas is None else config.betas[1]
    if config.optimizer_state == "bf16" and beta2 > LARGEST_BETA2:
        raise ConfigError(
            f"{flag} with a second beta of {beta2}: bf16 would round away each fall of the average of squares, so that "
            f"it could only rise; set --betas 0.9,0.95, or use --optimizer-state 8bit"
        )


def _check_precision(config: Options) -> None:
    if config.reduce_dtype not in ("fp32", config.mixed_precision):
        raise ConfigError(
            f"--reduce-dtype {config.reduce_dtype} with --mixed-precision {config.mixed_precision or 'off'}: "
            "gradients would be rounded to a dtype they are not computed in; "
            f"add --mixed-precision {config.reduce_dtype} or drop it"
        )
    if config.float8 is None:
        return
    flag = f"--float8 {config.float8}"
    if config.mixed_precision != "bf16":
        raise ConfigError(
            f"{flag} with --mixed-precision {config.mixed_precision or 'off'}: what float8 doesn't compute needs the "
            "range of bf16; use --mixed-precision bf16, or drop --float8"
        )
    if config.lora is not None:
        raise ConfigError(
            f"{flag} with --lora: torchao would compute the gradients of frozen weights, too, which costs more than it "
            "gains; drop one of them"
        )


def _check_recomputation(config: Options) -> None:
    if config.activation_checkpointing == "op" and config.shard_granularity == "layer":
        # torch counts the operators of a block's forward, and the hooks of groups inside it call others in backward.
        raise ConfigError(
            "--activation-checkpointing op with --shard-granularity layer: a block's operators are told apart by their "
            "number, and groups within a block change it; use --activation-checkpointing block, or whole blocks"
        )


def _check_attention(config: Options) -> None:
    way, spec = config.attention, config.spec
    if way not in spec.attentions:
        fitting = " or ".join(f"--attention {one}" for one in spec.attentions)
        why = (
            "has no FlexAttention to train with"
            if way == "flex"
            else "doesn't use torch's scaled_dot_product_attention, as attentions=BY_TORCH of its ModelSpec would say"
        )
        raise ConfigError(f"--attention {way} with --model {config.model}: the model {why}; use {fitting}")


def attention_refusals(config: Options, device_type: str) -> Iterator[str]:
    """Reasons why a device can't attend as `--attention` says, as far as torch's rules tell without it.

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
    """
    way = config.attention
    if device_type == "cpu":
        if way in ("cudnn", "flash", "efficient"):
            yield f"--attention {way}: it is a kernel of GPUs; on a CPU use auto or math"
        if way == "flex":
            yield "--attention flex: torch's FlexAttention has no backward on a CPU; use --attention auto"
        return
    if way in ("cudnn", "flash") and config.mixed_precision is None:
        yield f"--attention {way} without --mixed-precision: the kernel computes in bf16 or fp16; add it, or use auto"
    if way == "cudnn" and config.deterministic:
        yield "--attention cudnn with --deterministic: the kernel isn't; use --attention flash or auto, or drop one"
    apart = config.documents == "apart" and config.dataset.startswith(data.OWN) and config.spec.task == "causal"
    if way == "flash" and apart:
        yield (
            "--attention flash with --documents apart: the kernel takes no mask; use --attention auto, or --documents "
            "together"
        )
    numbers = config.spec.sizes[config.model_size]
    if way == "efficient" and numbers.get("kv_heads", 0) != numbers.get("heads", 0):
        yield (
            f"--attention efficient with --model-size {config.model_size}: a key of it serves several queries, which "
            "the kernel doesn't know; use --attention auto"
        )


def _check_compilation(config: Options) -> None:
    if config.compile and config.shard_granularity == "layer":
        raise ConfigError(
            "--compile with --shard-granularity layer: blocks are compiled, and the hooks of groups within a block "
            "break its graph; use whole blocks (--shard-granularity 1), or drop --compile"
        )


def _check_resume(config: Options) -> None:
    if config.init_partial and config.weights is None:
        raise ConfigError("--init-partial without --init-from: there are no weights to start from; add --init-from")
    if not config.resume_partial:
        return
    if config.resume in ("auto", "never"):
        raise ConfigError(
            f"--resume-partial with --resume {config.resume}: a partial load starts a new training from a chosen "
            "checkpoint; name it with --resume STEP or --resume PATH"
        )
    if config.init_from is not None:
        raise ConfigError("--resume-partial with --init-from: both give the weights to start from; drop one of them")


def _check_saving(config: Options) -> None:
    if config.saves:
        return
    for flag, given, why in (
        ("--async-checkpoint", config.async_checkpoint is not None, "nothing is written in the background"),
        (
            "--memory-checkpoint",
            config.memory_checkpoint is not None,
            "what is kept in memory is for the time until the next checkpoint on the disk, and none comes",
        ),
        (f"--keep {config.keep}", config.keep != KEEP, "there is none to keep"),
        ("--keep-every", config.keep_every is not None, "there is none to keep"),
        ("--keep-best", config.keep_best, "there is none to keep"),
        ("--on-checkpoint-failure continue", config.on_checkpoint_failure != "stop", "no save can fail"),
    ):
        if given:
            raise ConfigError(f"{flag} with --checkpoint-every never: {why}; drop one of them")


def _check_lora(config: Options) -> None:
    if config.lora is None:
        for name in ("lora_alpha", "lora_targets", "lora_dropout"):
            if getattr(config, name):
                raise ConfigError(f"{flag_of(name)} without --lora: there are no adapters; add --lora RANK")
        return
    if config.weights is None:
        raise ConfigError(
            "--lora without weights: adapters are trained beside weights that stay as they are; add --init-from"
        )
    for flag, given, why in (
        ("--freeze", config.freeze, "all weights but the adapters are frozen already"),
        ("--init-partial", config.init_partial, "what is left out would be neither trained nor in a checkpoint"),
        ("--resume-partial", config.resume_partial, "a checkpoint holds the adapters alone"),
        ("--dcp-api", config.dcp_api, "there is no full model to gather"),
        (
            "--save-model",
            config.save_model,
            "a run of adapters leaves adapters; python -m fsdp2.checkpoint export RUN OUT --format peft writes them "
            "for peft, and the other formats the weights with them",
        ),
    ):
        if given:
            raise ConfigError(f"{flag} with --lora: {why}; drop it")


def _check_weights(config: Options) -> None:
    if config.ema is not None and config.resume_partial:
        raise ConfigError(
            "--ema with --resume-partial: the average would begin with weights that aren't used; use --init-from with "
            "--init-partial"
        )
    if config.chunked_loss is not None and config.spec.kind != "language":
        raise ConfigError(f"--chunked-loss with --model {config.model}: the logits of an image are one row; drop it")


def _check_observing(config: Options) -> None:
    recorded = "--memory-snapshot" if config.memory_snapshot else "--memory-limit"
    if config.profile and (config.memory_snapshot or config.memory_limit):
        raise ConfigError(
            f"--profile with {recorded}: the trace would show the recording rather than the training; "
            "use one after the other"
        )


def require_reached(warmup_steps: float, steps: float) -> None:
    """Raise ConfigError if a run of so many steps ends within its warm-up."""
    if 1 <= steps <= warmup_steps:
        raise ConfigError(
            f"--warmup-steps {warmup_steps:.0f}: the run ends after step {steps}, before its learning rate is reached; "
            "give fewer, or a share of the run such as 0.03"
        )


def trackers_of(config: Options) -> tuple[str, ...]:
    """The trackers of a run; `--tensorboard` is the older name of `--track tensorboard`."""
    return tuple(dict.fromkeys((*config.track, *(["tensorboard"] if config.tensorboard else []))))


def _check_trackers(config: Options) -> None:
    for flag, given in (("--run-name", config.run_name is not None), ("--tag", config.tag)):
        if given and not trackers_of(config):
            raise ConfigError(
                f"{flag} without --track: only a tracker shows it; add --track {'|'.join(TRACKERS)}, or drop it"
            )
