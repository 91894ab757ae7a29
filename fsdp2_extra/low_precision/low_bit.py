"""Adam and AdamW whose moments take 1 or 2 bytes a parameter instead of 4, by torchao's arithmetic (extra torchao).

`bf16` moments are tensors like the parameter. `8bit` moments are a uint8 code for each element and an fp32 scale for
each block of at most 256, as in https://arxiv.org/abs/2110.02861. torchao keeps both in one tensor subclass, and cuts
its blocks out of a rank's shard, so that other ranks would have others. Here a block lies within one row, which FSDP2
never cuts, and codes and scales are tensors of their own, sharded as the parameter is. So the state is the same on any
number of ranks, and a checkpoint, a copy or a comparison treats it like any other.

The computation is fp32, one parameter at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2.parallel.compiling import allow_recompilations
from fsdp2.parallel.shards import local
from fsdp2.units import install

BLOCK = 256  # elements with one scale, at most
SHORTEST = 64  # below that the scales weigh too much
SMALLEST = 4096  # elements of a parameter whose moments are worth it, as in torchao

_SCALE = "_scale"  # behind the name of the moment that it is of


class LowBitAdam(torch.optim.Optimizer):
    """Adam or AdamW over plain or sharded parameters, with moments in few bits.

    Args:
        moments: one of `fsdp2.parallel.STATES`.
        decoupled: AdamW's weight decay instead of Adam's.
        compiled: compile the update of a parameter, once for each shape; without that it makes fp32 copies of the shard
            of the parameter that it is at.

    Parameters of one dimension, those of fewer than `SMALLEST` elements and, with `8bit`, those whose rows no block
    divides have moments in their own dtype. Raises ImportError, naming the extra, without torchao.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        moments: str,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool,
        compiled: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        self.moments, self.decoupled = moments, decoupled
        self._update, self._quantised = _torchao()
        if compiled:
            allow_recompilations(len({p.shape for group in self.param_groups for p in group["params"]}))
            self._update = torch.compile(self._update, fullgraph=True, dynamic=False)
        self._tables: dict[tuple[torch.device, bool], Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient. Without a collective."""
        assert closure is None, "a closure would be computed by nobody here"
        for group in self.param_groups:
            # A number would be part of the compiled graph, and each new rate another graph.
            rate = torch.tensor(float(group["lr"]))
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_of(parameter, parameter.grad, group, rate)

    def _step_of(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any], rate: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            self._start(state, "exp_avg", parameter)
            self._start(state, "exp_avg_sq", parameter)
        state["step"] += 1
        here = local(parameter.detach())
        if here.numel() == 0:  # more ranks than rows
            return
        beta1, beta2 = group["betas"]
        self._update(
            here,
            local(gradient),
            step=state["step"],
            exp_avg=self._moment(state, "exp_avg", signed=True),
            exp_avg_sq=self._moment(state, "exp_avg_sq", signed=False),
            max_exp_avg_sq=None,
            lr=rate,
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            IS_ADAMW=self.decoupled,
            BF16_STOCHASTIC_ROUND=False,
        )

    def _start(self, state: dict[str, Any], name: str, parameter: nn.Parameter) -> None:
        if parameter.dim() < 2 or parameter.numel() < SMALLEST:
            state[name] = torch.zeros_like(parameter)
        elif self.moments == "bf16":
            state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        elif block := block_of(parameter):
            state[name] = _zeros(parameter, tuple(parameter.shape), torch.uint8)
            blocks = parameter.shape[1:].numel() // block
            state[name + _SCALE] = _zeros(parameter, (parameter.shape[0], blocks), torch.float32)
        else:
            state[name] = torch.zeros_like(parameter)

    def _moment(self, state: dict[str, Any], name: str, *, signed: bool) -> Tensor:
        """The moment as the update takes it; what that writes into it is written into the state."""
        codes = local(state[name])
        if name + _SCALE not in state:
            return codes
        scale = local(state[name + _SCALE]).view(-1)
        return self._quantised(codes, scale, self._table(codes.device, signed), signed, torch.float32)

    def _table(self, device: torch.device, signed: bool) -> Tensor:
        if (device, signed) not in self._tables:
            self._tables[device, signed] = torch.tensor(tables()[signed], device=device)
        return self._tables[device, signed]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the values of `state_dict()` in place, where the state is materialised.

        torch's would turn codes into the parameters' dtype. Raises KeyError or RuntimeError for a state that has other
        entries.
        """
        held = dict(self.state)
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.state.update(held)
        ours = [parameter for group in self.param_groups for parameter in group["params"]]
        for name, parameter in zip(names, ours, strict=True):
            for key, value in state_dict["state"].get(name, {}).items():
                target, source = local(self.state[parameter][key]), local(value)
                if target.untyped_storage() is not source.untyped_storage():
                    target.copy_(source)


def block_of(parameter: Tensor) -> int | None:
    """Elements of a parameter (rows, …) that share a scale: as many as divide a row, `SHORTEST` to `BLOCK`, or None."""
    row = parameter.shape[1:].numel()
    return next((size for size in range(BLOCK, SHORTEST - 1, -1) if row % size == 0), None)


@functools.cache
def tables() -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The 256 numbers, of -1 to 1 and of 0 to 1, that codes stand for: unsigned first. Needs tensors with values."""
    from torchao.optim.quant_utils import create_dynamic_map

    return tuple(create_dynamic_map(signed=False)), tuple(create_dynamic_map(signed=True))


def _torchao() -> tuple[Callable[..., None], Callable[..., Tensor]]:
    """torchao's update of one parameter, and its tensor of codes and scales.

    Both are behind its public optimizers, whose blocks depend on the number of ranks and which compile on a CPU too.
    """
    try:
        from torchao.optim.adam import single_param_adam
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise ImportError(f"--optimizer-state: {error}; {install('torchao')}") from error
    return single_param_adam, OptimState8bit


def _zeros(parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Of this shape, with the rows and the layout of a parameter."""
    here = local(parameter)
    zeros = torch.zeros((here.shape[0], *shape[1:]), dtype=dtype, device=here.device)
    if not isinstance(parameter, DTensor):
        return zeros
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(
        zeros, parameter.device_mesh, parameter.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    # from_local moves to the mesh's device; an offloaded parameter's state stays where the parameter is.
    return whole if whole.to_local().device == here.device else whole.to(here.device)
