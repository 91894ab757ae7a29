"""Memory of saving and loading, by the run's own functions for them; no file is written or read.

Each rank is the only one here, so what ranks send each other as objects is what this one sends, as often as there are
ranks. A tensor that would come from a file is made instead; one that would go into a file is dropped.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.utils._pytree import tree_leaves

from fsdp2.checkpoint import full_dcp, full_dtensor
from fsdp2.checkpoint.full_model import full_state_api
from fsdp2.checkpoint.sources.source import Source
from fsdp2.checkpoint.staging import Staging
from fsdp2.checkpoint.state import AppState, Progress, RandomState, is_finite, plain_names
from fsdp2.checkpoint.weights import fill
from fsdp2.config import Config
from fsdp2.models.initial import slices_of
from fsdp2.parallel.engine import Engine
from fsdp2.parallel.meta import shared_names
from fsdp2.parallel.shards import local
from fsdp2.run.init_from import by_torch
from fsdp2.run.process.runtime import World
from fsdp2_extra.allocations.timeline import Timeline
from fsdp2_tools.plan.fake import Values
from fsdp2_tools.plan.fake_ledger import FakeLedger

CHECKPOINT, FULL_MODEL, RESTORING, STARTING = "checkpoint", "full model", "restoring", "--init-from"


class Saving:
    """The saves of one rank, and their restoring; with `gathers`, rank 0 gathers and writes a full model."""

    def __init__(self, config: Config, engine: Engine, world: World, ledger: FakeLedger, *, gathers: bool) -> None:
        self.config, self.engine, self.world, self.ledger, self.gathers = config, engine, world, ledger, gathers
        self.gpu = not ledger.gloo  # then what is saved is copied to the CPU
        state = engine.state
        parts = {"progress": Progress(), "rng": RandomState(world.rank, torch.device("cpu"), config.tp), **engine.parts}
        self.app = AppState(state["model"], state["optimizer"], parts, engine, engine.not_saved)
        asynchronous = config.async_checkpoint is not None
        self._staging = Staging(engine.optimizer, torch.device("cpu")) if asynchronous else None

    def save(self, step: int) -> None:
        """Save at once, or as `--async-checkpoint` does into copies that are kept from one save to the next."""
        self.ledger.phase(CHECKPOINT, step)
        is_finite(self.engine.weights())
        if self._staging is None:
            self._write(self.app.state_dict())
            return
        with self.ledger.named("staged"):
            self._staging.copy(self.app.state_dict())
        self._staging.finish()

    @torch.no_grad()
    def _write(self, state: Any) -> None:
        """Take what `dcp.save` takes; rank 0 gathers every rank's plan as bytes, each padded to the largest."""
        planner = DefaultSavePlanner()
        planner.set_up_planner({"app": state}, is_coordinator=self.world.rank == 0)
        sent = len(pickle.dumps(planner.create_local_plan()))
        count = self.world.world_size
        gathered = count * (sent + 8) if self.world.rank == 0 and count > 1 else 0
        with self.ledger.named("objects"):
            exchanged = torch.empty(sent + 8 + gathered, dtype=torch.uint8)
        del exchanged
        if self.gpu:
            for tensor in _tensors(state):
                with self.ledger.named("on its way"):
                    torch.empty_like(tensor)

    def write_full_model(self, step: int) -> None:
        """Gather the full model on rank 0, a tensor at a time, if rank 0 writes it."""
        config = self.config
        if not self.gathers:
            return
        self.ledger.phase(FULL_MODEL, step)
        # torch's API moves each tensor to the CPU as it is gathered, so a GPU holds what our own has on it.
        api = full_state_api(dcp_api=config.dcp_api and not self.gpu)
        with mock.patch.object(full_dtensor, "spool", _dropped), mock.patch.object(full_dcp, "spool", _dropped):
            api.full_model_state(self.app.model, Path())
            api.full_optimizer_state(self.app.model, self.app.optimizer, Path())

    @torch.no_grad()
    def restore(self, step: int, *, reads: bool = True) -> None:
        """Restore at the same number of ranks, before the first step; `reads` says whether tensors come from files."""
        self.ledger.phase(RESTORING, step)
        app = self.app.with_parts(self.engine.parts)  # a random generator takes no state without values
        state = app.state_dict()
        if reads:
            for tensor in _tensors(state):
                _read(self.ledger, tensor)
        app.load_state_dict(state)


def _tensors(state: Any) -> Iterator[Tensor]:
    """List a rank's part of each tensor of a state. One with values, as a random generator's, is counted from here."""
    return (local(leaf).detach() for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


def _read(ledger: FakeLedger, like: Tensor) -> Tensor:
    """The bytes of a file, and the tensor in them, which is copied where the file doesn't align it."""
    with ledger.named("on its way"):
        _content = torch.empty(like.nbytes, dtype=torch.uint8)
        return torch.empty(like.shape, dtype=like.dtype)


def _dropped(tensors: Mapping[Any, Tensor], read: Callable[[Any], Tensor], folder: Path) -> dict[Any, Tensor]:
    """In place of `spool`: a tensor at a time, of which a file has the memory."""
    for name in tensors:
        read(name)
    return {name: torch.empty(0) for name in tensors}


def starting_from(config: Config, found: list[Timeline], step: int, values: Values) -> Callable[[nn.Module], None]:
    """Make a function that loads `--init-from`'s weights, or a model's own, and leaves its timeline in a list.

    Their names and dtypes are taken to be the model's. A rank reads its rows of one tensor at a time, as from a sharded
    checkpoint; with `--dcp-api` torch sends each whole tensor of its own file from rank 0.
    """
    # Here, where tensors aren't fake yet: peft moves its adapters, which fake tensors that are watched refuse.
    tied = [list(config.spec.base_weights(names)) for names in shared_names(config.spec.on_meta(config.model_size))]

    def load(model: nn.Module) -> None:
        ledger = FakeLedger(fake=True, values=values)
        with ledger:
            ledger.watch(model, {"parameters": model.parameters(), "buffers": model.buffers()})
            ledger.phase(STARTING, step)
            targets = config.spec.base_weights(plain_names(model))
            if by_torch(config):
                if dist.get_rank():
                    return  # it holds a whole tensor at a time, and rank 0 the file's too
                _send_whole(ledger, model, targets)
            else:
                fill(_file_of(ledger, targets, tied), targets, slices_of, tied, partial=config.init_partial)
        found.append(Timeline({}, ledger.allocations, ledger.phases, ledger.collectives))

    return load


def _send_whole(ledger: FakeLedger, model: nn.Module, targets: Mapping[str, Tensor]) -> None:
    """Load by torch's API, with rank 0 holding all tensors of the file."""
    with ledger.named("on its way"):
        full = {name: torch.empty(target.shape, dtype=target.dtype) for name, target in targets.items()}
    with mock.patch.object(full_dcp, "read_same", return_value=full):
        full_dcp.load_full_model_state(model, Path())


def _file_of(ledger: FakeLedger, targets: Mapping[str, Tensor], tied: Sequence[Sequence[str]]) -> Source:
    """A file of which a rank reads a part of a tensor at a time, with the targets' names, shapes and dtypes."""
    like = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in targets.items()}

    def part(name: str, place: tuple[slice, ...]) -> Tensor:
        with ledger.named("on its way"):
            rows = torch.empty([along.stop - along.start for along in place], dtype=like[name].dtype)
        rows.copy_(_read(ledger, rows))
        return rows

    once = {name: group[0] for group in tied for name in group}  # a file has a tied weight once
    return Source("", like, (), {name: (once.get(name, name),) for name in like}, lambda name: None, part=part)
