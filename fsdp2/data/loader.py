"""Batches of a split for one rank: for training from a resumable position, for evaluation in a fixed order."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fsdp2.data import sampler
from fsdp2.data.splits import Split

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


@dataclass(frozen=True)
class Batch:
    """One microbatch on the device.

    Attributes:
        inputs: a tensor, or tensors by the names of the model's arguments, with the samples as their first dimension.
        targets: likewise; `IGNORED` where there is nothing to predict.
        valid: False for a placeholder. Every rank must take part in every forward and backward, because they
            communicate; a rank that has no sample left runs one that counts nothing.
        samples: in the whole global batch of this step, over all ranks and microbatches.
        target_count: targets in that global batch, at least 1; what the sum of losses is divided by.
        last: True for the microbatch that ends the step.
    """

    inputs: Any
    targets: Tensor
    valid: bool
    samples: int
    target_count: int
    last: bool


def _on(device: torch.device, tensors: Any) -> Any:
    if isinstance(tensors, dict):
        return {name: _on(device, tensor) for name, tensor in tensors.items()}
    return tensors.to(device, non_blocking=True)


def _whole_batch(batch: Any) -> Any:
    """Datasets hand out whole batches, so there is nothing to collate. Named, so that workers can pickle it."""
    return batch


class _Rows:
    """A batch sampler that asks for the rows of each batch when it is needed, and again for each pass.

    Rows are NumPy arrays: a worker gets them as bytes, where it would open a file of shared memory for each tensor.
    """

    def __init__(self, rows: Callable[[], Iterator[Tensor]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[numpy.ndarray]:
        return (rows.numpy() for rows in self._rows())


def _ends_with_its_rank(worker: int) -> None:
    """Of a loader's process: SIGTERM ends it if it comes from its rank alone, and it dies when that does.

    A launcher sends SIGTERM to all processes of a rank, which then wants to finish its step and save. And what outlives
    a rank that was killed holds the lock of the run directory.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    rank = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _loader(split: Split, rows: Callable[[], Iterator[Tensor]], device: torch.device, workers: int) -> DataLoader[Any]:
    return DataLoader(
        split,  # type: ignore[arg-type]  # of torch's Dataset it has the methods that count
        batch_sampler=_Rows(rows),  # type: ignore[arg-type]  # the order is decided in sampler.py and not here
        collate_fn=_whole_batch,
        num_workers=workers,
        worker_init_fn=_ends_with_its_rank,
        persistent_workers=workers > 0,  # else each epoch waits for new processes
        pin_memory=device.type == "cuda",
        # Of its own: a loader draws a number when it starts, and taken from the global generator, a resumed
        # run, which starts one more loader, would go on with other dropout.
        generator=torch.Generator(),
    )


class Batches:
    """The training batches of one rank. Its place in the data is saved with the checkpoint.

    Iterating yields one optimizer step at a time, from the current position to the end of the epoch; each
    step is itself an iterator over microbatches that reads data only when asked, so that work can be
    started before the data is there.
    """

    def __init__(
        self,
        split: Split,
        *,
        global_batch: int,
        accumulation: int,
        seed: int,
        rank: int,
        world_size: int,
        device: torch.device,
        workers: int = 0,
    ) -> None:
        self.split, self.global_batch, self.accumulation, self.seed = split, global_batch, accumulation, seed
        self.rank, self.world_size, self.device, self.workers = rank, world_size, device, workers
        self.epoch = 0
        self.position = 0  # samples of this epoch that finished steps have consumed, over all ranks
        self._order: tuple[int, Tensor] | None = None  # of an epoch, where samples have unequal numbers of targets
        this = weakref.proxy(self)  # a circle would keep the workers alive after the run
        self._loader = _loader(split, lambda: this._rows(), device, workers)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch; the last may be of fewer samples."""
        return -(-len(self.split) // self.global_batch)

    def steps_done(self) -> int:
        """Finished steps of the current epoch."""
        return -(-self.position // self.global_batch)

    def at_end(self) -> bool:
        """Return whether every sample of the current epoch has been consumed."""
        return self.position >= len(self.split)

    def __iter__(self) -> Iterator[Iterator[Batch]]:
        pairs = iter(self._loader)  # asks for the rows from the position on
        for start in range(self.position, len(self.split), self.global_batch):
            yield self._microbatches(pairs, min(self.global_batch, len(self.split) - start))

    def _rows(self) -> Iterator[Tensor]:
        """The rows of each microbatch from the position to the end of the epoch; workers ask for them ahead."""
        rank, world_size, accumulation = self.rank, self.world_size, self.accumulation
        order = sampler.epoch_order(len(self.split), self.seed, self.epoch)
        batches = sampler.global_batches(order, self.global_batch, self.position)
        parts = ((batch, sampler.microbatches(batch, rank, world_size, accumulation)) for batch in batches)
        return (part if len(part) > 0 else batch[:1] for batch, mine in parts for part in mine)

    def _targets(self, samples: int) -> int:
        """Of the next global batch, which is of so many samples; 1 where all of its documents are of one token.

        The losses of such a batch are 0, and so are their mean and the gradients.
        """
        counted = getattr(self.split, "target_count", None)
        if counted is None:
            return samples * self.split.targets_per_sample
        if self._order is None or self._order[0] != self.epoch:
            self._order = self.epoch, sampler.epoch_order(len(self.split), self.seed, self.epoch)
        return max(1, int(counted(self._order[1][self.position : self.position + samples].numpy())))

    def _microbatches(self, pairs: Iterator[Any], samples: int) -> Iterator[Batch]:
        targets_of_all = self._targets(samples)
        sizes = sampler.microbatch_sizes(samples, self.rank, self.world_size, self.accumulation)
        for index, size in enumerate(sizes):
            inputs, targets = next(pairs)
            last = index == len(sizes) - 1
            if last:
                # Before the last one is handed out: a checkpoint written in this step must not repeat it.
                self.position += samples
            yield Batch(_on(self.device, inputs), _on(self.device, targets), size > 0, samples, targets_of_all, last)

    def next_epoch(self) -> None:
        """Go to the start of the next epoch, which has another order."""
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The place in the data: epoch, samples consumed over all ranks, and what decides their order."""
        position = {"epoch": self.epoch, "position": self.position}
        return {**position, "seed": self.seed, "size": len(self.split), "content": self.split.content}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the order of samples would be another one than the checkpoint's, or their content."""
        for key, now, flag in (("seed", self.seed, "--seed"), ("size", len(self.split), "--dataset")):
            if state[key] != now:
                raise ValueError(
                    f"{flag}: the checkpoint's data has {key} {state[key]}, this run's {now}; samples would be "
                    f"repeated or left out. Use the same {flag}, or --init-from to start with the weights alone"
                )
        # Older checkpoints of images don't say it.
        if state.get("content", self.split.content) != self.split.content:
            raise ValueError(
                "--dataset: the checkpoint's data differs from this run's; samples would be repeated or left out. Give "
                "the same files, in any place, or --init-from to start with the weights alone"
            )
        epoch, position = state["epoch"], state["position"]
        if not (type(epoch) is type(position) is int and 0 <= epoch < 1 << 63 and 0 <= position <= len(self.split)):
            raise ValueError(f"the checkpoint's place in the data is sample {position} of epoch {epoch}: there is none")
        self.epoch, self.position = epoch, position


def evaluation_batches(
    split: Split, batch_size: int, rank: int, world_size: int, device: torch.device
) -> Iterator[Batch]:
    """Every sample of a split once over all ranks, in batches that do not depend on the world size.

    Whole batches are dealt to ranks in turn, so each is computed on the same rows wherever it lands, and the
    counts agree exactly between world sizes and with inference in one process. All ranks get equally many;
    a placeholder fills the last round.
    """
    count = -(-len(split) // batch_size)
    rounds = -(-count // world_size)
    mine = range(rank, rounds * world_size, world_size)

    def rows() -> Iterator[Tensor]:
        for start in (i * batch_size if i < count else None for i in mine):
            yield torch.arange(1) if start is None else torch.arange(start, min(start + batch_size, len(split)))

    for index, (inputs, targets) in zip(mine, _loader(split, rows, device, 0), strict=True):
        yield Batch(
            _on(device, inputs),
            _on(device, targets),
            index < count,
            len(split),
            len(split) * split.targets_per_sample,
            True,
        )
