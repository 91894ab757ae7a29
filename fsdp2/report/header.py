"""The lines that open a run, and what `--inspect` adds. All of it is read off the model that was made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fsdp2 import data
from fsdp2.config import Config
from fsdp2.data.loader import Batches
from fsdp2.data.splits import Dataset
from fsdp2.parallel.engine import Engine
from fsdp2.parallel.precision import DTYPES
from fsdp2.units import short, size

if TYPE_CHECKING:
    from fsdp2.report.planned import Planned


def lines(
    config: Config,
    engine: Engine,
    dataset: Dataset,
    world_size: int,
    device: torch.device,
    folder: Path,
    plan: Planned | str | None,
) -> list[str]:
    """Model and parameters, data, ranks and mesh, precision and memory, the plan, sharding, run directory."""
    model = config.spec.described(config.model_size)
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in engine.model.parameters() if p.requires_grad)
    which = f"{parameters:,} parameters" + (f", {trained:,} of them trained" if trained < parameters else "")
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    if config.replicas > 1:
        ranks += f" ({config.replicas} replicas of {world_size // config.replicas // config.tp} shards)"
    dtype = f"{config.mixed_precision}, reduced in {config.reduce_dtype}" if config.mixed_precision else "fp32"
    if config.float8:
        from fsdp2_extra.low_precision import float8

        dtype += float8.described(engine.model, config.float8, device.type)
    return [
        f"model: {config.model} {config.model_size}, {which}; data: {config.dataset}; "
        f"{config.optimizer}, lr {config.lr:g}",
        *_from_weights(config),
        *_data(dataset),
        *served_otherwise(config, dataset),
        f"strategy: {config.strategy} on {ranks}, {device.type}, {torch.get_num_threads()} threads a rank; {dtype}",
        f"memory: {size(engine.state_bytes())} a rank for parameters, gradients and optimizer state"
        + (", in CPU memory" if config.cpu_offload else "")
        + segments(device),
        *([] if plan is None else [plan if isinstance(plan, str) else plan.line]),
        f"sharding: {engine.sharding}",
        *mesh(config, world_size),
        *attention(config, device),
        f"run directory: {short(folder)}",
    ]


def steps(config: Config, batches: Batches, last: int) -> list[str]:
    """The number of the last optimizer step, the global batch, clipping, and a warning where steps are few."""
    samples, parts, ranks = batches.global_batch, batches.accumulation, batches.world_size
    each, an_epoch = -(-samples // (parts * ranks)), batches.steps_per_epoch
    made_of = f"{'up to ' * (each * parts * ranks > samples)}{each:,} a microbatch x {parts} accumulated x {ranks}"
    filled = getattr(batches.split, "filled", 1.0)  # the rest of a sequence of conversations is empty
    tokens = (
        f"{min(samples, len(batches.split)) * config.seq_len * filled:,.0f} tokens (sequences of {config.seq_len:,}"
    )
    tokens = f", {tokens}{f', {filled:.0%} filled' * (filled < 1)})" * (config.spec.kind == "language")
    clip = "not clipped" if config.clip_grad_norm is None else f"clipped to norm {config.clip_grad_norm:g}"
    line = f"steps: {last:,} in all, {an_epoch:,} an epoch; global batch {samples:,} = {made_of} data-parallel "
    found = [line + f"rank{'s' * (ranks > 1)}{tokens}; gradients {clip}"]
    if an_epoch == 1 or last < 10:
        flag = "grad-accumulation" if parts > 1 else "batch-size"
        fix = f"lower --{'global-batch-size' if config.global_batch_size else flag}, " * (samples > 1)
        fix = "raise --max-steps" if last == config.max_steps else f"{fix}raise --epochs or give more data"
        what = f"{last:,} optimizer step{'s' * (last != 1)}{', an epoch is one of them' * (an_epoch == 1)}"
        found.append(f"warning: the whole run is {what}; {fix}")
    return found


def _from_weights(config: Config) -> list[str]:
    if config.weights is None:
        return []
    from fsdp2_extra.models.from_weights import line

    return [line(config)]


def _data(dataset: Dataset) -> list[str]:
    """Describe what is learned of text or conversations."""
    if not dataset.about:
        return []
    from fsdp2_extra.text import header_lines

    return header_lines.lines(dataset)


def served_otherwise(config: Config, dataset: Dataset) -> list[str]:
    """Warn of a processor beside the model that would give it other images than the run does, once it is exported."""
    processor = config.spec.files(config.model_size).get("preprocessor_config.json")
    if config.spec.kind != "image" or processor is None:
        return []
    from fsdp2_extra.models.image_processor import differs

    images: Any = dataset.train
    return differs(processor, images.mean, images.std)


def attention(config: Config, device: torch.device) -> list[str]:
    """The kernel that attends, of a model that attends at all."""
    if len(config.spec.attentions) == 1:
        return []
    from fsdp2.models.attention import way

    apart = config.documents == "apart" and config.dataset.startswith(data.OWN)
    chosen = way(config.attention, device.type, apart=apart and config.spec.flex_for_documents)
    return [f"attention: {'as torch chooses' if chosen == 'auto' else chosen}"]


def mesh(config: Config, world_size: int) -> list[str]:
    """With --tp or --sp a picture of the ranks: 0 1 split layers, + joins pieces of sequences, | parts shares of data,
    and || replicas."""
    tp, sp, replicas = config.tp, config.sp, config.replicas
    if tp == sp == 1:
        return []

    def joined(words: list[str], count: int, sign: str) -> list[str]:
        return [sign.join(words[first : first + count]) for first in range(0, len(words), count)]

    shares = joined(joined([str(rank) for rank in range(world_size)], tp, " "), sp, " + ")
    copies = joined(shares, len(shares) // replicas, " | ")
    split = [f"{what} over {count} ranks" for what, count in (("layers", tp), ("sequences", sp)) if count > 1]
    return [f"mesh: {' and '.join(split)}: {' || '.join(copies)}"]


def segments(device: torch.device) -> str:
    """The kind of segments that the allocator of GPU memory makes; nothing on a CPU."""
    if device.type != "cuda":
        return ""
    grow = any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
    return f"; segments of GPU memory {'grow' if grow else 'have a fixed size'}"


def inspection(config: Config, engine: Engine) -> list[str]:
    """The table of `--inspect`. Raises RuntimeError if the model isn't sharded as the flags say."""
    from fsdp2.parallel import inspect

    plain_type = type(config.spec.described(config.model_size))
    return inspect.report(
        engine.model,
        plain_type,
        replicas=config.replicas,
        compute=DTYPES[config.mixed_precision] if config.mixed_precision else None,
    )
