"""Strategies `zero1`, `zero2`, `zero3`: DeepSpeed's ZeRO, as a baseline.

Stage 1 shards the optimizer's state, 2 the gradients too, 3 the parameters too. Source: https://arxiv.org/abs/1910.02054
DeepSpeed is configured by one dictionary, which the run directory gets as `deepspeed.json`.

Left to its defaults DeepSpeed trains differently from everything else here: it clips gradients to a norm of 1.0 without
being asked, and its optimizer named Adam is AdamW. Here it clips as the flag says and has torch's optimizer; then its
losses are bit-equal in fp32.

In stages 1 and 2 each rank holds the whole model, from its first tensor on. In stage 3 modules get memory and initial
values one after the other, and each is sharded before the next. With parameters in files a rank holds the whole
model first, since each `zero.Init` would open files of its own.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from fsdp2.parallel.engine import Engine, Microbatch
from fsdp2.parallel.fully_sharded import offload_policy, shard
from fsdp2.parallel.mesh import make_mesh
from fsdp2.parallel.meta import allocate
from fsdp2.parallel.optimizer import make_optimizer
from fsdp2.parallel.precision import DTYPES, fsdp2_policy, with_inputs_in
from fsdp2.parallel.rules import Baseline, Options, Start
from fsdp2_extra.baselines.deepspeed_settings import settings
from fsdp2_extra.baselines.starting import fill, materialise, meta_model, ties_weights
from fsdp2_extra.baselines.zero_refusals import choose_accelerator, on_device, refusals
from fsdp2_extra.baselines.zero_state import Shadow, shards_of

SHARDED = {1: "optimizer state", 2: "gradients and optimizer state", 3: "parameters, gradients and optimizer state"}


def started(device: torch.device) -> Any:
    """The module `deepspeed`, ready to shard. A collective call where there is no process group yet."""
    choose_accelerator(device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # asked for where the launcher isn't torchrun
    if device.type == "cpu":
        # It asks for a CUDA compiler, which torch then warns isn't of use.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # it tells of each of its settings
    with redirect_stdout(StringIO()):  # and of each part that it has built; what fails is raised
        deepspeed.init_distributed(dist_backend="gloo" if device.type == "cpu" else "nccl")
    return deepspeed


def shard_each(model: nn.Module, start: Start, dtype: torch.dtype, config: dict[str, Any]) -> None:
    """Give a model on meta initial values, module by module, as stage 3 shards it in this dtype. A collective call."""
    import deepspeed

    for name, module in list(model.named_modules()):
        part = materialise(module, name, start)
        for parameter in part.parameters():
            parameter.data = parameter.data.to(dtype)
        # It shards parameters that are there already, in place.
        deepspeed.zero.Init(module=part, config_dict_or_path=config, dtype=dtype)


def build(options: Options, start: Start) -> ZeROEngine:
    """A model that DeepSpeed shards, with initial or loaded weights. A collective call."""
    config = settings(options, start.device.type)
    deepspeed = started(start.device)
    sharding = config["zero_optimization"]
    model, _ = meta_model(options, start)
    in_files = sharding.get("offload_param", {}).get("device") == "nvme"
    if sharding["stage"] == 3 and not in_files and not ties_weights(model):
        shard_each(model, start, DTYPES[options.mixed_precision or "fp32"], config)
    else:
        fill(model, options, start)
    # Without state: DeepSpeed puts its shards in the place of the parameters, whose state would only stay around.
    optimizer = make_optimizer(options, model.parameters(), materialised=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    # What checkpoints see: the same model, sharded as FSDP2's, with memory only while one is saved or loaded.
    copy, _ = meta_model(options, start)
    mesh = make_mesh(start.device.type, start.world_size)
    offload = offload_policy(False, start.device.type)
    shard(copy, [], mesh=mesh, precision=fsdp2_policy(None, "fp32"), offload=offload, reshard_after_forward=None)
    allocate(copy, start.device, cpu_offload=False)
    result = ZeROEngine(engine, optimizer, Shadow(engine, optimizer, copy, options.optimizer), config)
    if start.load_weights is not None:
        result.gather_state()
        start.load_weights(copy)
        result.scatter_state()
    return result


class ZeROEngine(Engine):
    """`optimizer` is torch's, over DeepSpeed's flat shards. What a checkpoint sees of both is `shadow`."""

    model: Any

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, shadow: Shadow, config: dict[str, Any]) -> None:
        super().__init__(model, optimizer, torch.amp.GradScaler(enabled=False))
        self.stage: int = config["zero_optimization"]["stage"]
        self.strategy = f"zero{self.stage}"
        self.shadow, self.config = shadow, config
        self.dtype: torch.dtype | None = None
        if config.get("bf16", {}).get("enabled"):
            self.dtype = torch.bfloat16
        if config.get("fp16", {}).get("enabled"):
            self.dtype, self.scaler = torch.float16, LossScale(model.optimizer)  # type: ignore[assignment]

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.shadow.model, "optimizer": self.shadow.optimizer, "scaler": self.scaler}

    @property
    def files(self) -> dict[str, bytes]:
        return {"deepspeed.json": (json.dumps(self.config, indent=1) + "\n").encode()}

    def held(self) -> dict[str, list[Tensor]]:
        held = super().held()
        # In stage 3 a parameter is whole for as long as it is used; its shard is another tensor.
        held["parameters"] = [getattr(p, "ds_tensor", p.detach()) for p in self.model.parameters()]
        # The shards of the optimizer are copies in fp32 of its part of the parameters.
        held["optimizer"] += shards_of(self.model.optimizer)
        return held

    def _gradient_bytes(self) -> int:
        if self.stage == 1:
            return super()._gradient_bytes()
        width = (self.dtype or torch.float32).itemsize
        return width * sum(shard.numel() for shard in shards_of(self.model.optimizer))

    @property
    def sharding(self) -> str:
        return f"DeepSpeed's stage {self.stage}: {SHARDED[self.stage]} sharded"

    def gather_state(self) -> None:
        super().gather_state()
        self.shadow.fill()

    def scatter_state(self) -> None:
        self.shadow.pour_out()

    def release_state(self) -> None:
        self.shadow.empty()

    def forward(self, batch: Microbatch) -> Any:
        return super().forward(batch if self.dtype is None else with_inputs_in(batch, self.dtype))

    def backward(self, loss: Tensor, last_microbatch: bool) -> None:
        self.model.set_gradient_accumulation_boundary(last_microbatch)
        self.model.backward(loss)

    def clip(self, norm: float | None) -> Tensor:
        """DeepSpeed clips while it steps, to the norm of its configuration; `step` fills the result in."""
        self._norm = torch.zeros((), dtype=torch.float32, device=self.model.device)
        return self._norm

    def step(self, *, update: bool = True) -> bool:
        assert update, "DeepSpeed's step tells the norm by which one would decide to leave it out"
        self.model.step()
        norm = self.model.get_global_grad_norm()
        if norm is not None:
            self._norm.fill_(norm if norm >= 0 else math.nan)  # it says -1 where the norm is infinite or NaN
        self.loss_scale = self.scaler.get_scale()
        return self.model.was_step_applied()


class LossScale:
    """DeepSpeed's loss scale for fp16, with the methods and the state of torch's GradScaler."""

    def __init__(self, optimizer: Any) -> None:
        self._scaler = optimizer.loss_scaler

    def is_enabled(self) -> bool:
        return True

    def get_scale(self) -> float:
        return float(self._scaler.cur_scale)

    def state_dict(self) -> dict[str, Any]:
        good = self._scaler.cur_iter - self._scaler.last_overflow_iter - 1
        factor = float(self._scaler.scale_factor)
        rule = {"growth_factor": factor, "backoff_factor": 1 / factor, "growth_interval": self._scaler.scale_window}
        return {"scale": self.get_scale(), **rule, "_growth_tracker": good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scaler.cur_scale = float(state["scale"])
        self._scaler.last_overflow_iter = self._scaler.cur_iter - 1 - int(state["_growth_tracker"])


ZERO = Baseline(
    build=build,
    honours=("cpu_offload", "bucket_mb", "overlap_comm", "deepspeed_config"),
    shards_state=True,
    refusals=refusals,
    on_device=on_device,
    reads_as_fsdp2=True,
)
ZERO3 = dataclasses.replace(ZERO, honours=(*ZERO.honours, "nvme_offload"))
