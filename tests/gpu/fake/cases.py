"""The configurations that run on the fake GPU, and what is taken out of the order of a save."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

from fsdp2.checkpoint import staging
from tests.gpu.fake import streams

_VIT = ["--model=vit", "--model-size=tiny"]
_LLAMA = ["--model=llama", "--model-size=debug", "--dataset=random-tokens", "--seq-len=32"]

# Flags that meet nowhere in a step share a configuration, as an optimizer and a policy of gathering do.
CASES: dict[str, list[str]] = {
    "fp32": _VIT,
    "bf16": [*_VIT, "--mixed-precision=bf16"],
    "bf16, reduced in bf16": [*_VIT, "--mixed-precision=bf16", "--reduce-dtype=bf16"],
    "fp16, clipped": [*_VIT, "--mixed-precision=fp16", "--clip-grad-norm"],
    "clipped": [*_VIT, "--clip-grad-norm"],
    "recomputed block": [*_VIT, "--activation-checkpointing=block"],
    "recomputed op": [*_VIT, "--activation-checkpointing=op"],
    "accumulated every, EMA": [*_VIT, "--grad-accumulation=2", "--ema=0.9"],
    "accumulated last": [*_VIT, "--grad-accumulation=2", "--grad-accumulation-sync=last"],
    "HSDP, weight decay": [*_VIT, "--replicas=2", "--optimizer=adamw", "--weight-decay=0.1"],
    "HSDP, accumulated replica": [*_VIT, "--replicas=2", "--grad-accumulation=2", "--grad-accumulation-sync=replica"],
    "not resharded, adadelta": [*_VIT, "--reshard-after-forward=false", "--optimizer=adadelta"],
    "prefetched, sgd": [*_VIT, "--explicit-prefetching", "--optimizer=sgd"],
    "nonfinite skip": [*_VIT, "--on-nonfinite=skip"],
    "nonfinite continue, not fused": [*_VIT, "--on-nonfinite=continue", "--no-fused-optimizer"],
    "background save": [*_VIT, "--async-checkpoint"],
    "offload, clipped": [*_VIT, "--cpu-offload", "--clip-grad-norm"],
    "cnn": ["--model=cnn"],
    "transformer": ["--model=transformer", "--model-size=debug"],
    "llama": _LLAMA,
    "llama, documents apart": [*_LLAMA, "--dataset=text:/nowhere", "--tokenizer=bytes"],
    "llama, chunked loss, bf16": [*_LLAMA, "--chunked-loss=16", "--mixed-precision=bf16"],
    "llama, recomputed op, bf16": [*_LLAMA, "--activation-checkpointing=op", "--mixed-precision=bf16"],
    "llama, float8": [*_LLAMA, "--mixed-precision=bf16", "--float8=tensorwise", "--activation-checkpointing=op"],
    "llama, float8 by rows": [*_LLAMA, "--mixed-precision=bf16", "--float8=rowwise"],
}


def _nothing(*_: Any) -> None:
    """A mock would keep what it is called with, and its memory would never be given back."""


def _no_wait_for_the_step() -> Any:
    """The copy of a save begins without waiting for the optimizer step before it."""
    return mock.patch.object(streams.Stream, "wait_stream", _nothing)


def _no_wait_for_the_copy() -> Any:
    """The next optimizer step doesn't wait for the copy."""
    return mock.patch.object(staging.Staging, "_before_step", _nothing)


def _no_record_stream() -> Any:
    """The allocator isn't told that the copy's stream uses a tensor."""
    return mock.patch.object(streams.Races, "record_stream", _nothing)


def _no_wait_by_the_cpu() -> Any:
    """Nobody waits until a copy has arrived on the CPU."""
    return mock.patch.object(streams.Event, "synchronize", _nothing)


MUTANTS: dict[str, Callable[[], Any]] = {
    "none": nullcontext,
    "the copy doesn't wait for the step": _no_wait_for_the_step,
    "the next step doesn't wait for the copy": _no_wait_for_the_copy,
    "no record_stream": _no_record_stream,
    "the CPU doesn't wait": _no_wait_by_the_cpu,
}
