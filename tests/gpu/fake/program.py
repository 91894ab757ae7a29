"""Runs the real training step, evaluation and staging on GPUs that aren't there, and writes what it saw:

    python -m tests.gpu.fake.program RESULT.json

`test_fake.py` starts it. Tensors have a device and no memory (FakeTensorMode), the process group is torch's `fake`,
streams and events are those of `streams.py`. One process for all configurations: to import torch takes longer than to
run one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp2.checkpoint import staging
from fsdp2.config import Config, parse
from fsdp2.data.loader import Batch, _on
from fsdp2.evaluate import scored
from fsdp2.models import attention as attending
from fsdp2.parallel.engine import Engine
from fsdp2.parallel.shards import local
from fsdp2.report.metrics import StepLog
from fsdp2.run.process.runtime import World
from fsdp2.train import train_step
from fsdp2_tools.plan import batches, execute, fake
from tests.gpu.fake import streams
from tests.gpu.fake.cases import CASES, MUTANTS
from tests.others.common import save

DEVICE = torch.device("cuda", 0)
RANKS = 4
aten = torch.ops.aten
# What gives a number, or a shape, that only the GPU knows: the CPU waits for all that it has issued.
READS = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.is_nonzero.default, aten.equal.default),
    *(aten.masked_select.default, aten._unique2.default, aten.unique_consecutive.default),
}


class Watch(TorchDispatchMode):
    """Counts what the CPU waits for, and tells streams and races of each operation. In place of `fake.Values`."""

    def __init__(self, races: streams.Races, values: fake.Values) -> None:
        super().__init__()
        self.values = values
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()  # between the devices, by whether they block
        self.races = races

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := fake.device_asked(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # its operations on the local tensors come here, too
        if func is aten._pin_memory.default:
            return torch.empty_like(args[0])  # which FakeTensorMode has no form of
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func in READS and any(tensor.is_cuda for tensor in given):
            self.waits[f"{func.name()} in {_where()}"] += 1
        self._copies(func, args, kwargs)

        def what() -> str:
            return f"{func.name()} in {_where()}"

        on_gpu = any(tensor.is_cuda for tensor in given)
        clock = streams.current().issue() if on_gpu else {}
        for tensor, writes in _accesses(func, args, kwargs):
            if tensor.is_cuda:
                self.races.access(tensor, clock, what=what, writes=writes)
            elif not writes:
                self.races.read_by_cpu(tensor, what=what)
        result = self.values.compute(func, args, kwargs)
        if on_gpu and func in (aten.copy_.default, aten._to_copy.default) and not result.is_cuda:
            self.races.arrives(result, clock, what=what)
        return result

    def _copies(self, func: Any, args: Any, kwargs: Any) -> None:
        if func is aten._to_copy.default:
            there = kwargs.get("device")
            between = there is not None and torch.device(there).type != args[0].device.type
            blocking = not kwargs.get("non_blocking", False)
        elif func is aten.copy_.default:
            between = args[0].device.type != args[1].device.type
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        else:
            return
        if between:
            self.copies["blocking" if blocking else "non_blocking"] += 1
            if blocking:
                self.waits[f"{func.name()} in {_where()}"] += 1


def _accesses(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, bool]]:
    """The tensors whose memory an operator uses, and whether it writes there. A view uses none."""
    if func.namespace == "prim":  # of what a tensor is, not what it holds
        return
    for number, schema in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(schema.name)
        if schema.alias_info is None or schema.alias_info.is_write:
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor):
                    yield leaf, schema.alias_info is not None


def _where() -> str:
    """The innermost function of ours, else of torch's optimizers and FSDP, that is running."""
    frame: Any = sys._getframe(2)  # those of this folder are neither
    fallback = "torch"
    while frame is not None:
        file = frame.f_code.co_filename
        if "/fsdp2/" in file and "/_fsdp/" not in file and "fully_shard" not in file:
            return f"{Path(file).parent.name}/{Path(file).name}:{frame.f_code.co_name}"
        if fallback == "torch" and ("/optim/" in file or "_fully_shard" in file or "/amp/" in file):
            fallback = f"{Path(file).name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return fallback


class Run:
    """One configuration: its engine, on fake tensors, and what was seen."""

    def __init__(self, flags: list[str], modes: ExitStack) -> None:
        self.config: Config = parse(["--device=cuda", "--test-batch-size=8", *flags])
        self.spec = self.config.spec
        self.world = World(0, RANKS, 0, RANKS)
        self.races = streams.Races()
        values = fake.Values()
        self.watch = Watch(self.races, values)
        modes.enter_context(streams.recorded(self.races))
        if "hf:" in self.config.model:
            modes.enter_context(fake.seen_by_transformers(values))

        def at_once(model: Any, modes: ExitStack, *entered: Any) -> None:
            # The plan enters later, when the model gets memory; on a GPU `fully_shard` makes tensors before.
            for context in (*(one for one in entered if one is not values), self.watch):
                modes.enter_context(context)
            for module in model.modules():
                module._buffers.update({name: torch.empty_like(one) for name, one in module._buffers.items()})

        with mock.patch.object(fake, "enter_with_memory", at_once):
            self.engine: Engine = execute.engine_without_values(
                self.config, self.spec, self.world, DEVICE, modes, values, None
            )
        self.watch.copies.clear()  # those of the start
        self.log = StepLog(lambda kind, data: None, DEVICE)

    def batch(self, *, last: bool = True) -> Batch:
        made = batches.made_up(self.config, self.spec, 4, 4 * RANKS, last=last)
        inputs, targets = _on(DEVICE, made.inputs), _on(DEVICE, made.targets)
        return Batch(inputs, targets, True, made.samples, made.target_count, last)

    def step(self, *, votes: tuple[bool, ...] = (False, False)) -> Counter[str]:
        """One training step and its report; what the CPU has waited for in it."""
        before, waited = Counter(self.watch.waits), streams.HOST.waits
        count = self.config.grad_accumulation
        parts = (self.batch(last=index == count - 1) for index in range(count))
        facts, values = train_step(self.engine, parts, self.config, self.world, votes)
        self.log.add({"step": 1, "epoch": 0, **facts}, values)
        waits = self.watch.waits - before
        if streams.HOST.waits > waited:
            waits["synchronize"] = streams.HOST.waits - waited
        return waits

    def evaluate(self) -> None:
        with self.engine.evaluating():
            scored(self.engine.forward, self.spec, [self.batch()], DEVICE)

    def state(self) -> dict[str, Any]:
        optimizer = {str(number): state for number, state in enumerate(self.engine.optimizer.state.values())}
        return {"model": dict(self.engine.model.state_dict()), "optim": optimizer}


def _with_values(method: Callable[..., Any]) -> Callable[..., Any]:
    """A device mesh can't be made of fake tensors."""

    def called(self: Any, *arguments: Any) -> Any:
        with fake.without_fakes():
            return method(self, *arguments)

    return called


@contextlib.contextmanager
def running(flags: list[str]) -> Iterator[Run]:
    with fake.fake_group(0, RANKS), ExitStack() as modes:
        yield Run(flags, modes)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """In place of `scaled_dot_product_attention`, which asks the GPU what it is: as an H100's is chosen."""
    if enable_gqa:
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
    if query.dtype != torch.float32 and attn_mask is None:
        found = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    else:
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )
    result: Tensor = found[0]
    return result


def compiled(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool = False, **_: Any) -> Tensor:
    """In place of a compiled FlexAttention. The blocks of documents, which it is given, are made on the device."""
    return attention(query, key, value, is_causal=True, enable_gqa=enable_gqa)


@contextlib.contextmanager
def a_gpu() -> Iterator[None]:
    """torch's questions to the device, answered. Private names; the tests fail when one moves."""
    # torch's guard for devices is replaced by one that does nothing if there are none at that moment.
    with fake.fake_mode():
        torch.empty(1, device=DEVICE)
    ctypes.CDLL(None).fake_devices(8)
    backends: Any = vars(torch._C)["_ConvBackend"]
    with (
        streams.replaced(),
        mock.patch.object(staging.Staging, "_cpu_mesh", _with_values(staging.Staging._cpu_mesh)),
        mock.patch.object(attending, "flex", return_value=compiled),
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attention),
        mock.patch.object(torch._C, "_select_conv_backend", return_value=backends.Cudnn),
    ):
        yield


def of_case(name: str, flags: list[str]) -> dict[str, Any]:
    """Two steps, an evaluation and another step, with a save between them if asked for."""
    with running(flags) as run:
        run.step()  # makes what later ones find
        second = run.step()
        held = {one.device.type for one in map(local, run.engine.held()["parameters"])}
        run.evaluate()
        found: dict[str, Any] = {}
        if run.config.async_checkpoint is not None:
            found = staged(run)
        third = run.step()
        return {
            "waits": dict(second),
            "waits_later": dict(third),
            "copies": dict(run.watch.copies),  # all of them, the start's left out
            "parameters": sorted(held),
            "parameter_count": len(run.engine.held()["parameters"]),
            "races": run.races.found,
            **found,
        }


def staged(run: Run) -> dict[str, Any]:
    """A save of all that training changes, beside the steps that change it."""
    before = Counter(run.watch.copies)
    for tensor in tree_leaves(run.state()):
        if isinstance(tensor, Tensor) and local(tensor).is_cuda:
            run.races.watch(local(tensor))
    run.step()
    stage = staging.Staging(run.engine.optimizer, DEVICE)
    copied = stage.copy(run.state())
    copies = run.watch.copies - before
    run.step()
    stage.finish()
    for tensor in tree_leaves(copied):  # as the saver does, which writes them
        if isinstance(tensor, Tensor):
            local(tensor).clone()
    # A tensor that nobody but the copy needs any more: the allocator may give its memory to another stream's.
    stage.copy(run.state())
    for state in run.engine.optimizer.state.values():
        state.clear()
    stage.finish()
    stage.close()
    return {"staging_copies": dict(copies)}


def of_mutant(change: Callable[[], Any]) -> list[str]:
    """The races of a save, with one part of the order taken out."""
    with change(), running(["--model=vit", "--model-size=tiny", "--async-checkpoint"]) as run:
        run.step()
        staged(run)
        return run.races.found


def mixed() -> str:
    """What happens to a CPU tensor in the midst of a step: the judge of device mismatches isn't blind."""
    with running(["--model=vit", "--model-size=tiny"]) as run:
        batch = run.batch()
        wrong = Batch(batch.inputs, torch.empty(4, dtype=torch.int64), True, 16, 16, True)
        try:
            train_step(run.engine, iter([wrong]), run.config, run.world, [False])
        except RuntimeError as error:
            return str(error)
    return ""


def transformers(folder: Path) -> dict[str, list[str]]:
    """Tiny models of transformers, and adapters beside one."""
    words = ["--dataset=random-tokens", "--seq-len=32"]
    llama, gpt2 = (save(name, folder / name) for name in ("llama", "gpt2"))
    return {
        "transformers' llama": [f"--model={llama}", *words],
        "transformers' gpt2, bf16": [f"--model={gpt2}", *words, "--mixed-precision=bf16"],
        "LoRA, bf16": [f"--model={llama}", *words, "--lora=4", "--mixed-precision=bf16"],
        "LoRA, recomputed": [f"--model={llama}", *words, "--lora=4", "--activation-checkpointing=block"],
    }


def main(result: Path, folder: Path, names: list[str]) -> None:
    found: dict[str, Any] = {"cases": {}, "mutants": {}, "mixed": ""}

    def guarded(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception:
            return {"error": traceback.format_exc()}

    cases = {**CASES, **transformers(folder)}
    with a_gpu():
        for name in names:
            found["cases"][name] = guarded(of_case, name, cases[name])
        for name, change in MUTANTS.items():
            found["mutants"][name] = guarded(of_mutant, change)
        found["mixed"] = guarded(mixed)
    result.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(sys.argv[1]), Path(folder), sys.argv[2:])
