"""Points of published.toml, planned: as their source ran them where a flag or one of the ways below can say how."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fsdp2 import parallelize
from fsdp2.config import Config, parse
from fsdp2.models import llama
from fsdp2.models.spec import ModelSpec
from fsdp2.options import own_model
from fsdp2.options.errors import ConfigError
from fsdp2.parallel import FUSED, activation_checkpointing
from fsdp2_tools.plan.device import TABLE, Gpu, gpu_of, terms
from fsdp2_tools.plan.execute import Runs, run
from fsdp2_tools.plan.memory import memory_of
from fsdp2_tools.plan.steptime import step_time

ROOT = Path(__file__).parent.parent
KEYS = {"source", "gpu", "ranks", "shape", "flags", "tokens"}
MAY = {"ways", "gib", "gib_is", "fit", "blind", "apart"}
MEASURES = ("reserved", "allocated")


@dataclass(frozen=True)
class Planned:
    """The plan of a point: times of a step in ms, tokens/s of one GPU, bytes of one device.

    Attributes:
        allocated: the most that tensors take at once.
        reserved: what the allocator holds for them.
        beside: what isn't the allocator's: the CUDA context and NCCL's buffers.
        kinds: `allocated` by kind.
    """

    tokens: float
    milliseconds: float
    low: float
    high: float
    exposed_ms: float
    idle_ms: float
    allocated: int
    reserved: int
    beside: int
    kinds: Mapping[str, int]


@dataclass
class Row:
    """A point and its plan. `card` are the bytes of the GPU that ran it."""

    point: Mapping[str, Any]
    planned: Planned
    card: int

    @property
    def error(self) -> float:
        """Of tokens/s; more than measured is positive."""
        return float(self.planned.tokens / self.point["tokens"] - 1)

    @property
    def inside(self) -> bool:
        """Return whether what was measured lies in the range of the plan."""
        needed = self.planned.milliseconds * self.planned.tokens / self.point["tokens"]
        return self.planned.low <= needed <= self.planned.high

    @property
    def used(self) -> int:
        return self.planned.reserved + self.planned.beside

    @property
    def memory_error(self) -> float | None:
        """Of what the source says of its memory, which is what the allocator reserved, or what tensors took."""
        if "gib" not in self.point:
            return None
        like = self.planned.allocated if self.point.get("gib_is") == "allocated" else self.planned.reserved
        return float(like / 2**30 / self.point["gib"] - 1)


def read(file: Path) -> dict[str, Any]:
    """The content of published.toml. Raises ConfigError, in one line, for a point that says too little or too much."""
    content = tomllib.loads(file.read_text())
    for number, point in enumerate(content["point"], 1):
        where = f"{file.name}, point {number}"
        if missing := KEYS - point.keys():
            raise ConfigError(f"{where}: sets no {', '.join(sorted(missing))}; add it")
        if strange := point.keys() - KEYS - MAY:
            raise ConfigError(f"{where}: {', '.join(sorted(strange))} isn't one of {', '.join(sorted(KEYS | MAY))}")
        if strange := [way for way in point.get("ways", ()) if way not in WAYS]:
            raise ConfigError(f"{where}: ways {', '.join(strange)}: choose from {', '.join(WAYS)}")
        if ("gib" in point) != ("gib_is" in point) or point.get("gib_is", "reserved") not in MEASURES:
            raise ConfigError(f"{where}: give gib together with gib_is, which is {' or '.join(MEASURES)}")
    return content


def tables(own: Mapping[str, Any]) -> dict[str, Gpu]:
    """GPUs of the planner's table, and those of the file that are like one of them."""
    known = tomllib.loads(TABLE.read_text())
    for name, values in own.items():
        known[name] = {**known[values["like"]], **{key: value for key, value in values.items() if key != "like"}}
    return {name: gpu_of(name, values, name) for name, values in known.items()}


def executed(point: Mapping[str, Any], shapes: Mapping[str, Any], folder: Path) -> tuple[Config, Runs]:
    """The configuration of a point, and its executions."""
    # Benchmarks of speed save nothing, and what an evaluation takes they don't report.
    unsaved = ["--test-batch-size=1", "--checkpoint-every=never", "--no-save-model"]
    config = parse([*_model(point, shapes, folder), *point["flags"].split(), *unsaved])
    config = dataclasses.replace(config, fused_optimizer=config.optimizer in FUSED)
    with ExitStack() as changed:
        for way in point.get("ways", ()):
            changed.enter_context(WAYS[way]())
        return config, run(config, point["ranks"], 0, gloo=False)


def planned(point: Mapping[str, Any], config: Config, runs: Runs, gpu: Gpu) -> Planned:
    """Plan the time and memory of a point's executions on a GPU."""
    assert gpu.speed is not None, f"{gpu.name} has no rates"
    memory = memory_of(config, 0, runs, offload_apart=True)
    time = step_time(config, point["ranks"], runs, gpu.speed)
    beside = sum(term.bytes for term in terms(runs, memory) if term.name != "allocator")
    assert time.tokens_per_second is not None
    tokens, peak = time.tokens_per_second / point["ranks"], memory.peak
    of_time = tokens, time.milliseconds, time.low, time.high, time.exposed_ms, time.idle_ms
    return Planned(*of_time, peak.bytes, memory.reserved, beside, dict(peak.kinds))


def rows(
    points: Sequence[Mapping[str, Any]],
    shapes: Mapping[str, Any],
    gpus: Mapping[str, Gpu],
    file: Path,
    *,
    more: bool = True,
) -> Iterator[Row]:
    """Plan points, equal executions in a row: what `file` keeps isn't planned again, and the rest with `more` alone."""
    known = kept(file)
    last: Any = None
    with tempfile.TemporaryDirectory() as folder:
        for point in sorted(points, key=_execution):
            gpu = gpus[point["gpu"]]
            # How much memory a card has changes nothing in a plan.
            key = _digest(_execution(point), shapes.get(point["shape"]), dataclasses.replace(gpu, memory=0))
            if key not in known and not more:
                continue
            if key not in known:
                if last is None or _execution(last[0]) != _execution(point):
                    last = (point, *executed(point, shapes, Path(folder)))
                known[key] = planned(point, *last[1:], gpu)
                _keep(file, key, known[key])
            yield Row(point, known[key], gpu.memory)


def _execution(point: Mapping[str, Any]) -> tuple[str, int, str, str]:
    """The part of a point that decides its execution, whatever the GPU."""
    return point["shape"], point["ranks"], point["flags"], " ".join(point.get("ways", ()))


def _model(point: Mapping[str, Any], shapes: Mapping[str, Any], folder: Path) -> list[str]:
    """Flags that choose a point's model."""
    name = point["shape"]
    shape = shapes.get(name, {})
    if "gpt2" not in shape:
        llama.SIZES.update({name: shape["llama"]} if shape else {})
        return ["--model=llama", f"--model-size={name}"]
    from transformers import GPT2Config

    length = next(flag.partition("=")[2] for flag in point["flags"].split() if flag.startswith("--seq-len="))
    numbers = {"vocab_size": 50368, "activation_function": "gelu", "n_positions": int(length)}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    GPT2Config(**shape["gpt2"], **numbers, **drops).save_pretrained(folder / f"{name}-{length}")
    return [f"--model=hf:{folder / f'{name}-{length}'}", "--init-from=scratch"]


@contextmanager
def _every_second() -> Iterator[None]:
    """torchtitan's selective recomputation: as ours by operator, but of the matrix products it keeps every second."""

    def contexts(_: Any) -> Any:
        seen = {False: 0, True: 0}

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op == torch.ops.aten.mm.default:
                seen[ctx.is_recompute] += 1
                if seen[ctx.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            kept = op in activation_checkpointing.EXPENSIVE
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    with mock.patch.object(activation_checkpointing, "create_selective_checkpoint_contexts", contexts):
        yield


@contextmanager
def _bf16_state() -> Iterator[None]:
    """The model is made in bf16, and so are its shards, their gradients and Adam's moments."""
    on_meta = ModelSpec.on_meta

    def narrow(spec: ModelSpec, size: str) -> nn.Module:
        return on_meta(spec, size).to(torch.bfloat16)

    with mock.patch.object(ModelSpec, "on_meta", narrow):
        yield


class _Fused(torch.autograd.Function):
    """The memory and traffic of a fused cross-entropy: it reads logits once each way and writes their gradient.

    A kernel's own arithmetic on what it has read, such as the scale of the gradient, costs neither.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return torch.logsumexp(logits, -1).float().sum()

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        (logits,) = ctx.saved_tensors
        return torch.softmax(logits, -1), None


def _loss(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], AbstractContextManager[None]]:
    """A way: the loss is this one, of logits as they are, not widened to fp32 before."""

    @contextmanager
    def way() -> Iterator[None]:
        of = own_model.spec

        def other(config: Config) -> ModelSpec:
            spec = of(config)

            def loss(outputs: Any, targets: Tensor) -> Tensor:
                return function(spec.logits(outputs).flatten(0, -2), targets.flatten())

            return dataclasses.replace(spec, loss=loss)

        with mock.patch.object(own_model, "spec", other):
            yield

    return way


class _FusedNorm(torch.autograd.Function):
    """The memory and traffic of a fused RMSNorm: it reads its input, writes the output, and keeps the input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradient[0] * x, torch.empty_like(weight)


@contextmanager
def _fused_norm() -> Iterator[None]:
    def forward(norm: llama.RMSNorm, x: Tensor) -> Tensor:
        return _FusedNorm.apply(x, norm.weight)

    with mock.patch.object(llama.RMSNorm, "forward", forward):
        yield


@contextmanager
def _root_has_the_rest() -> Iterator[None]:
    """Blocks alone are groups; the embedding, the last norm and the head are gathered with the root, and stay so."""

    def groups(model: nn.Module, blocks: Sequence[nn.Module], granularity: int | str) -> list[list[nn.Module]]:
        return [[block] for block in blocks]

    with mock.patch.object(parallelize, "shard_groups", groups):
        yield


# What sources do that no flag of ours says.
WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "keeps every second product": _every_second,
    "embedding and head in the root": _root_has_the_rest,
    "bf16 state": _bf16_state,
    "fused norm": _fused_norm,
    "bf16 loss": _loss(lambda logits, targets: F.cross_entropy(logits, targets, reduction="sum")),
    "fused loss": _loss(_Fused.apply),
}


def _digest(*parts: Any) -> str:
    """Of the code that plans, torch's version, and what is planned: a kept plan is used while all of it is the same."""
    found = hashlib.sha256(f"{torch.__version__} {parts}".encode())
    rooms = ("fsdp2_tools/plan", "fsdp2_extra", "fsdp2/parallel")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    for file in sorted([*files, Path(llama.__file__), Path(__file__)]):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def kept(file: Path) -> dict[str, Planned]:
    """Plans that an earlier command has kept in a file, by their digest."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {line["digest"]: Planned(**line["planned"]) for line in map(json.loads, lines)}


def _keep(file: Path, key: str, plan: Planned) -> None:
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as out:
        print(json.dumps({"digest": key, "planned": dataclasses.asdict(plan)}), file=out)
