"""Models and training runs that are the same under FSDP1 and under the shim. Everything in them is tiny."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

CPU = torch.device("cpu")


def real() -> ModuleType:
    """FSDP1 itself."""
    import torch.distributed.fsdp

    return torch.distributed.fsdp


def shim() -> ModuleType:
    import fsdp1_interface

    return fsdp1_interface


# With offload_to_cpu or rank0_only, and in summon_full_params, FSDP1 on a CPU crashes in torch 2.11.
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)
needs_fsdp1_to_gather = pytest.mark.skipif(OLD, reason="FSDP1 gathers to a CPU from torch 2.15 on")


@contextlib.contextmanager
def fsdp1_broadcasts_on_a_cpu() -> Iterator[None]:
    """FSDP1 refuses sync_module_states on a CPU. Without the check it does what it does on a GPU, by gloo."""
    with mock.patch("torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states"):
        yield


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 15)  # 15: no multiple of the ranks
        self.outer = nn.Linear(15, 8)
        self.norm = norm(8)
        self.register_buffer("scale", torch.full((8,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.outer(torch.relu(self.inner(x)))) * self.scale.type_as(x)

    def reset_parameters(self) -> None:
        self.scale = torch.full((8,), 0.7)


class Net(nn.Module):
    """Input (batch, 6), output (batch, 5)."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(3))
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class BatchNormNet(Net):
    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d)


class TiedNet(nn.Module):
    """Tokens of 11 kinds in, the same out, by one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding((x[:, 0] * 5).long().clamp(0, 10))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def policy(name: str) -> Any:
    return {
        "none": None,
        "transformer": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        "size": functools.partial(size_based_auto_wrap_policy, min_num_params=100),
        "lambda": functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block)),
        "always": always_wrap_policy,
        "module": ModuleWrapPolicy({Block, nn.LayerNorm}),
        "custom": CustomPolicy(lambda module: isinstance(module, Block)),
        "own": own_policy,
    }[name]


def own_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or nonwrapped_numel == 15 * 8 + 15


def build(fsdp: ModuleType, model: Callable[[], nn.Module] = Net, **arguments: Any) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that FSDP1 is deprecated, and what it says of NO_SHARD
        return fsdp.FullyShardedDataParallel(model(), **{"device_id": CPU, **arguments})


def batches(steps: int, seed: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """This rank's, or with `seed` the same for all."""
    generator = torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
    return [
        (torch.randn(4, 6, generator=generator), torch.randint(0, 5, (4,), generator=generator)) for _ in range(steps)
    ]


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    steps: int = 3,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    skip: int = 0,
    seed: int | None = None,
) -> list[float]:
    """The losses of this rank, and the norms with `clip`. `skip`: the first batches, as seen already."""
    out = []
    data = batches((skip + steps) * accumulate, seed)[skip * accumulate :]
    for number, (inputs, labels) in enumerate(data, 1):
        last = number % accumulate == 0

        def one(inputs: Tensor = inputs, labels: Tensor = labels) -> None:
            loss = nn.functional.cross_entropy(model(inputs).float(), labels) / accumulate
            loss.backward()
            out.append(loss.item())

        if last:
            one()
            if clip is not None:
                out.append(float(model.clip_grad_norm_(clip)))
            optimizer.step()
            optimizer.zero_grad()
        else:
            with model.no_sync():
                one()
    return out


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)


def recompute(model: nn.Module) -> None:
    """Activation checkpointing after wrapping, as FSDP1's tutorials do."""
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
