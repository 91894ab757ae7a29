"""Run functions on N real gloo ranks, which are kept alive from one test to the next.

    results = ranks.run(function, argument, …, ranks=2)

starts `function(argument, …)` on every rank inside a fresh process group and returns the ranks' results. The
function must be at module level and its arguments picklable. A rank that raises, dies or takes too long fails
the test with what it printed; all ranks are then killed, and the next test gets new ones.

Each module of tests gets new processes as well: some break saves and groups on purpose, and what that leaves in a
process is nobody else's to meet. (New ones for each test would cost two seconds each: DTensor works out again how
each operation shards.) They are forked from a server that has the imports behind it and runs no thread.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2.checkpoint.saver import save_now
from fsdp2.checkpoint.state import AppState
from fsdp2.checkpoint.store import Store
from fsdp2.parallel.engine import Engine

TIMEOUT = 120.0

PROCESSES = multiprocessing.get_context("forkserver")
_IMPORTED = ["tests.forked"]


def imported_once(*modules: str) -> None:
    """Have ranks and programs find these modules imported: the server that they're forked from imports them, once.

    Tests say so where they're collected, before the first rank; a module that isn't installed is passed over.
    """
    _IMPORTED.extend(module for module in modules if module not in _IMPORTED)
    PROCESSES.set_forkserver_preload(_IMPORTED)


imported_once()


def _serve(pipe: Connection, output: str) -> None:
    """A rank: wait for work, do it in a process group of its own, send the result."""
    with open(output, "wb", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.enable()  # a rank that dies of a signal says where
    gc.freeze()  # what was forked stays; collecting looks at a run's own objects
    while True:
        try:
            work = pipe.recv()
        except EOFError:
            return
        function, arguments, rank, world_size, store = work
        torch.set_num_threads(1)
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=TIMEOUT),
            )
            result = function(*arguments)
            # A thread of gloo's needs the interpreter's lock to give back what the last collective held. Taking down
            # the group, torch 2.11 waits for that thread with the lock held: asleep, this one lends it before.
            time.sleep(0.01)
            dist.destroy_process_group()
            # A group in a cycle would be taken down at any allocation of a later run, in the midst of a collective.
            gc.collect()
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _end_of(output: str) -> str:
    """The last lines, and all that faulthandler wrote: the signal is named before the stacks of all threads."""
    fatal = output.rfind("Fatal Python error")
    return output[-3000:] if fatal < 0 else output[max(0, fatal - 1000) :]


def _death_of(process: Any) -> str:
    process.join(10)
    code = process.exitcode or 0
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended by itself, exit code {code}"


class Ranks:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._workers: list[tuple[Any, Connection, Path]] = []
        self._count = 0

    def _worker(self, index: int) -> tuple[Any, Connection, Path]:
        while len(self._workers) <= index:
            ours, theirs = PROCESSES.Pipe()
            self._count += 1
            output = self.folder / f"rank{len(self._workers)}-{self._count}.log"
            process = PROCESSES.Process(target=_serve, args=(theirs, str(output)), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours, output))
        return self._workers[index]

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int = 2, timeout: float = TIMEOUT) -> list[Any]:
        """The results of `function(*arguments)` on each rank. Fails the test if a rank does."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            workers = [self._worker(rank) for rank in range(ranks)]
            for rank, (_, pipe, _) in enumerate(workers):
                pipe.send((function, arguments, rank, ranks, os.path.join(folder, "store")))
            results: dict[int, Any] = {}
            deadline = time.monotonic() + timeout
            pipes: dict[Any, int] = {pipe: rank for rank, (_, pipe, _) in enumerate(workers)}
            while pipes:
                ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    self._fail(f"no answer from ranks {sorted(pipes.values())} in {timeout:.0f} s")
                for answer in ready:
                    rank = pipes.pop(answer)
                    try:
                        good, result = workers[rank][1].recv()
                    except EOFError:
                        self._fail(f"rank {rank} {_death_of(workers[rank][0])}")
                    if not good:
                        self._fail(f"rank {rank}:\n{result}")
                    results[rank] = result
            return [results[rank] for rank in range(ranks)]

    def _fail(self, reason: str) -> None:
        outputs = [(path.name, _end_of(path.read_text(errors="replace"))) for _, _, path in self._workers]
        self.close()
        printed = "\n".join(f"--- {name} ---\n{text}" for name, text in outputs if text.strip())
        if "died of" in reason:  # its test is run again, so this is the only place that tells where it stood
            warnings.warn(f"{reason}\n{printed}", stacklevel=3)
        pytest.fail(f"{reason}\n{printed}", pytrace=False)

    def close(self) -> None:
        for process, pipe, _ in self._workers:
            pipe.close()
            process.kill()
        for process, _, _ in self._workers:
            process.join()
        self._workers = []


class Launches:
    """In place of `run` in a module that starts torchrun: the first launch is one, and the others are calls of
    a function with their arguments on the pool's ranks, which have torch imported. `commands` is what was asked for."""

    def __init__(self, ranks: Ranks, function: Callable[[list[str]], Any]) -> None:
        self.ranks, self.function = ranks, function
        self.commands: list[list[str]] = []

    def run(self, command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if len(self.commands) == 1:
            return subprocess.run(command, capture_output=True, text=True, **settings)
        (count,) = [word.partition("=")[2] for word in command if word.startswith("--nproc_per_node=")]
        arguments = command[
            command.index("-m", command.index(f"--nproc_per_node={count}")) + 2 :
        ]  # of torchrun's module
        self.ranks.run(self.function, arguments, ranks=int(count))
        return subprocess.CompletedProcess(command, 0, "", "")


SMALL = ["--model-size=tiny", "--batch-size=16", "--threads=1", "--device=cpu"]
LEAVES_NOTHING = ("--no-save-model", "--checkpoint-every=never")  # two fifths of the smallest run is what it leaves


# The schedule and clipping of a run from nothing, said by one from weights that is compared with it.
FROM_NOTHING = ("--lr=1e-3", "--schedule=step", "--warmup-steps=0", "--clip-grad-norm=off")


def small(run: Path | str, *flags: str) -> list[str]:
    """The command line of the smallest run, into a run directory."""
    return [*SMALL, f"--run-dir={run}", *flags]


def main_in_ranks(flags: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """`fsdp2.train` with a command line; this rank's events. To be run by `Ranks`."""
    from fsdp2.config import parse
    from fsdp2.train import main

    events: list[tuple[str, dict[str, Any]]] = []
    main(parse(flags), lambda kind, data: events.append((kind, data)))
    return events


def refusal_in_ranks(flags: list[str]) -> str:
    """The line by which `fsdp2.train` refuses a command line on this rank. To be run by `Ranks`."""
    from fsdp2.options.errors import ConfigError

    with pytest.raises(ConfigError) as refused:
        main_in_ranks(flags)
    return str(refused.value)


def make_engine(flags: str = "") -> Engine:
    """The smallest model of `--model`, sharded as a command line says, with its initial values. In `Ranks`."""
    from fsdp2 import train
    from fsdp2.config import parse
    from fsdp2.run.process import runtime

    config = parse(["--model-size=tiny", *flags.split()])
    return train.make_engine(config, runtime.world(), torch.device("cpu"), restoring=False)


def peak_at_start(flags: str) -> tuple[int, int]:
    """Bytes of the whole model, and the most that this rank holds whenever tensors of it have got their initial values.

    Counted are all tensors of the process that came since. In `Ranks`.
    """
    from fsdp2.models import initial

    def held() -> int:
        tensors = [one for one in gc.get_objects() if isinstance(one, Tensor) and type(one) in (Tensor, nn.Parameter)]
        storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors if not one.is_meta}
        return sum(storage.nbytes() for storage in storages.values())

    before, seen, whole = held(), [], 0
    real = initial.reset_parameters

    def counting(model: nn.Module, *arguments: Any, **how: Any) -> None:
        nonlocal whole
        real(model, *arguments, **how)
        whole += sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        seen.append(held() - before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdp2.run.initial_weights.reset_parameters", counting)
        make_engine(flags)
    return whole, max(seen)


def batch(last: bool = True) -> Any:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return SimpleNamespace(inputs=torch.randn(4, 1, 28, 28, generator=generator), last=last)


def loss_of(engine: Engine, last: bool = True) -> Tensor:
    return nn.functional.cross_entropy(engine.forward(batch(last)).float(), torch.arange(4))


def one_step(engine: Engine) -> float:
    """An optimizer step as the training loop does it; the loss before."""
    engine.begin_step()
    loss = loss_of(engine)
    engine.backward(loss, last_microbatch=True)
    engine.clip(None)
    engine.step()
    return float(loss)


class _Tree:
    """A tree of tensors in place of an AppState."""

    def __init__(self, tree: Any) -> None:
        self.tree, self.model = tree, nn.Module()

    def state_dict(self) -> Any:
        return self.tree

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("it is saved alone")

    def release(self) -> None:
        """Nothing was gathered."""


class Payload:
    """Unpickled, it leaves a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def save(store: Store, state: Any, step: int, *, info: Mapping[str, Any] | None = None, keep: int = 1) -> None:
    """One save of an AppState, or of a tree of tensors, that is over when this returns. Raises SaveFailed."""
    app = state if isinstance(state, AppState) else cast(AppState, _Tree(state))
    save_now(store, app, step, keep=keep, info=info)


def losses(events: list[tuple[str, dict[str, Any]]]) -> list[float]:
    return [data["loss"] for kind, data in events if kind == "train"]


def of_kind(events: list[tuple[str, dict[str, Any]]], wanted: str) -> list[dict[str, Any]]:
    return [data for kind, data in events if kind == wanted]


def relative(ours: list[float], theirs: list[float]) -> float:
    """How far the farthest number is from theirs, as a part of it."""
    assert len(ours) == len(theirs) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def full_files(run: Path) -> list[Any]:
    return [torch.load(run / "full_model" / name, weights_only=True) for name in ("full-model.pt", "full-optimizer.pt")]


def goes_on_bit_for_bit(train: Callable[..., Any], folder: Path, line: list[str]) -> list[float]:
    """The losses of six steps, which in two parts are the same, as are the files; `train` runs in `folder`."""
    whole = losses(train(*line, run="whole", steps=6))
    train(*line, "--checkpoint-every=3", steps=3)
    rest = train(*line, "--async-checkpoint", steps=6)
    assert of_kind(rest, "resume")[0]["step"] == 3
    assert losses(rest) == whole[3:]
    assert same(full_files(folder / "run"), full_files(folder / "whole"))
    return whole


def flip_a_bit(file: Path) -> None:
    """Change one bit in the middle of a file."""
    with open(file, "r+b") as raw:
        raw.seek(file.stat().st_size // 2)
        byte = raw.read(1)[0]
        raw.seek(-1, os.SEEK_CUR)
        raw.write(bytes([byte ^ 1]))


def small_mnist(root: Path) -> Path:
    """A folder with 64 and 16 images in torchvision's layout; the file of the first."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for name, count in (("train", 64), ("t10k", 16)):
        for kind, magic, sides, most in (("images-idx3", 2051, (28, 28), 256), ("labels-idx1", 2049, (), 10)):
            values = torch.randint(most, (count, *sides), dtype=torch.uint8, generator=generator)
            header = b"".join(number.to_bytes(4, "big") for number in (magic, *values.shape))
            (raw / f"{name}-{kind}-ubyte").write_bytes(header + values.numpy().tobytes())
    return raw / "train-images-idx3-ubyte"


def same(a: Any, b: Any) -> bool:
    """Equal trees with equal tensors."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def python_environment() -> dict[str, str]:
    """The environment of a program that a test starts: this interpreter's programs first."""
    return {**os.environ, "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])}


class AllGathers(TorchDispatchMode):
    """Calls a function with the bytes of each all-gather's result as it is issued."""

    def __init__(self, note: Callable[[int], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather_base" in str(func):
            self._note(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def forget_models() -> None:
    """Let models be made again: their folders have changed."""
    from fsdp2 import models

    models.get.cache_clear()
    models.made_once.cache_clear()
