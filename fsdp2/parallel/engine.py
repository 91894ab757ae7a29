"""The engine that the training loop drives, the same for every strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2.parallel.shards import local

if TYPE_CHECKING:
    from fsdp2.parallel.ema import Ema


class Microbatch(Protocol):
    """The part of a batch that an engine looks at."""

    @property
    def inputs(self) -> Any:
        """One tensor, or tensors by the names of the forward's arguments."""

    @property
    def last(self) -> bool:
        """Return whether the optimizer step follows this microbatch."""


class Engine:
    """A model with its optimizer and gradient scaler. This one is the plain form, for a single process.

    One optimizer step is: `begin_step()`, then for each microbatch `forward(batch)` and
    `backward(loss, last_microbatch)`, then `clip(norm)` and `step()`.

    Attributes:
        call: (model, batch) -> outputs. Whoever makes an engine sets it for a model that takes more than one tensor.
        started: what of other weights the model has started from, as facts for the run's first event.
        parts: what else of it a checkpoint holds, by name.
        ema: the average of its weights, if one is kept.
        loss_scale: by which the gradient scaler will multiply the next loss, as of the last step.
        not_saved: whether a weight of this name is in no checkpoint, since it stays as it was where it came from.
    """

    strategy = "none"
    started: Mapping[str, Any] = {}
    parts: Mapping[str, Any] = {}
    ema: Ema | None = None
    loss_scale: float = 1.0
    not_saved: Callable[[str], bool] = staticmethod(lambda name: False)
    call: Callable[[nn.Module, Any], Any] = staticmethod(lambda model, batch: model(batch.inputs))

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, scaler: torch.amp.GradScaler) -> None:
        self.model, self._optimizer, self.scaler = model, optimizer, scaler

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, which an engine for inference lacks."""
        assert self._optimizer is not None, "this engine was made for inference"
        return self._optimizer

    @property
    def state(self) -> dict[str, Any]:
        """The state that a checkpoint saves: model, optimizer and gradient scaler.

        An engine that keeps them in another form brings them into this one in `gather_state`, takes what was loaded
        from it in `scatter_state`, and may forget it in `release_state`. All three are collective calls.
        """
        return {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}

    def gather_state(self) -> None:
        """To be called before `state` is read. A collective call."""
        share_buffers(self.model)

    def scatter_state(self) -> None:
        """To be called after something was loaded into `state`."""

    def release_state(self) -> None:
        """To be called when what was read from `state` isn't needed any more."""

    @property
    def files(self) -> dict[str, bytes]:
        """Name -> content of what the run directory holds beside the flags."""
        return {}

    def held(self) -> dict[str, list[Tensor]]:
        """This rank's tensors by kind: parameters, buffers, optimizer state, and gradients where there are."""
        states = self.optimizer.state.values()
        return {
            "buffers": list(self.model.buffers()),
            "parameters": list(self.model.parameters()),
            "optimizer": [value for state in states for value in state.values() if isinstance(value, Tensor)],
            "gradients": self.gradients(),
        }

    def weights(self) -> list[Tensor]:
        """Parameters and buffers as this rank holds them."""
        held = self.held()
        return held["parameters"] + held["buffers"]

    def gradients(self) -> list[Tensor]:
        """The gradients that are there, as this rank holds them: sharded as the parameters."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def state_bytes(self) -> int:
        """Bytes of this rank's parameters, optimizer state, and gradients as they are when all are there."""
        held = self.held()
        return sum(local(tensor).nbytes for tensor in held["parameters"] + held["optimizer"]) + self._gradient_bytes()

    def _gradient_bytes(self) -> int:
        return sum(local(p).nbytes for p in self.model.parameters() if p.requires_grad)

    @property
    def sharding(self) -> str:
        """Describe the sharding, for the header of a run."""
        count = len(list(self.model.parameters()))
        return f"{type(self.model).__name__}, {count} parameters in full on each rank"

    def losses(self) -> AbstractContextManager[None]:
        """The context in which a loss is made of outputs, and goes backward."""
        return nullcontext()

    def begin_step(self) -> None:
        """Called before the data of a step is read."""

    def forward(self, batch: Microbatch) -> Any:
        """Run the model on a microbatch of this rank. All-gathers where parameters are sharded."""
        return self.call(self.model, batch)

    def backward(self, loss: Tensor, last_microbatch: bool) -> None:
        """Accumulate gradients of `loss` (0-d); after the last microbatch of a step they are exchanged in full."""
        self.scaler.scale(loss).backward()

    @torch.no_grad()
    def clip(self, norm: float | None) -> Tensor:
        """Scale the gradients down to `norm`, or leave them for None; the norm before it, 0-d, on every rank."""
        self.scaler.unscale_(self.optimizer)
        return self._clip(norm)

    def _clip(self, norm: float | None) -> Tensor:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        total = self._total_norm([p.grad for p in parameters])
        if norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, norm, total, foreach=True)
        return total

    def _total_norm(self, gradients: list[Tensor]) -> Tensor:
        """The 2-norm of all gradients as one vector: 0-d, the same on every rank."""
        return torch.nn.utils.get_total_norm(gradients, foreach=True)

    def step(self, *, update: bool = True) -> bool:
        """Update the parameters; False if the gradient scaler skipped it because gradients overflowed.

        Without `update` the gradients are dropped, and parameters and optimizer stay as they are.
        """
        before = self.scaler.get_scale()
        if update:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_scale = self.scaler.get_scale()  # read once: on a GPU the CPU waits for it
        updated = update and self.loss_scale >= before
        if updated and self.ema is not None:
            self.ema.update()
        return updated

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients; the model is as before afterwards. A collective call."""
        share_buffers(self.model)
        self.model.eval()
        try:
            with torch.no_grad(), self.losses():
                yield
        finally:
            self.model.train()


@torch.no_grad()
def share_buffers(model: nn.Module) -> None:
    """Give every rank the buffers of rank 0. A collective call.

    A forward may change buffers, such as the running statistics of a batch norm: each rank's are then of the samples
    that it saw. An evaluation and a checkpoint need one model, and rank 0's is the one that DDP trains with.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        for buffer in model.buffers():
            whole = buffer.contiguous()
            dist.broadcast(whole, src=0)
            if whole is not buffer:
                buffer.copy_(whole)
