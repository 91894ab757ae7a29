"""Strategies `zero1`, `zero2`, `zero3`: DeepSpeed's ZeRO, as a baseline.

Stage 1 shards the optimizer's state, 2 the gradients too, 3 the parameters too. Source: https://arxiv.org/abs/1910.02054
DeepSpeed is configured by one dictionary, which the run directory gets as `deepspeed.json`.

Left to its defaults DeepSpeed trains otherwise than everything else here: it clips gradients to a norm of 1.0 without
being asked, and its optimizer named Adam is AdamW. Here it clips as the flag says and has torch's optimizer; then its
losses are bit-equal in fp32.
"""

from __future__ import annotations

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
from fsdp2.parallel.zero_state import Shadow, shards_of

SHARDED = {1: "optimizer state", 2: "gradients and optimizer state", 3: "parameters, gradients and optimizer state"}
MIB_OF_FP32 = 1024 * 1024 // 4


def deepspeed_config(
    stage: int,
    *,
    micro_batch: int,
    clip: float | None,
    precision: str | None,
    reduce_dtype: str,
    cpu_offload: bool,
    nvme_offload: str | None,
    bucket_mb: float,
    overlap_comm: bool,
    device_type: str,
) -> dict[str, Any]:
    """DeepSpeed's configuration for our flags; see https://www.deepspeed.ai/docs/config-json/."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": overlap_comm}
    if stage == 3:
        # Its own linear layer, put in torch's place, rounds a product before it adds the bias: in bf16 the model would
        # evaluate otherwise here than in inference. Torch's keeps no copy of the parameters either.
        zero["memory_efficient_linear"] = False
    # DeepSpeed's own is 500 million elements, allocated whole in each backward: 2 GB, however small the model.
    elements = max(1, int(bucket_mb * MIB_OF_FP32))
    zero |= {"reduce_bucket_size": elements}
    zero |= {"stage3_prefetch_bucket_size": elements} if stage == 3 else {"allgather_bucket_size": elements}
    if cpu_offload:
        place = {"device": "cpu", "pin_memory": device_type == "cuda"}
        zero |= {"offload_optimizer": place, **({"offload_param": place} if stage == 3 else {})}
    if nvme_offload is not None:
        place = {"device": "nvme", "nvme_path": nvme_offload, "pin_memory": device_type == "cuda"}
        zero |= {"offload_optimizer": place, "offload_param": place}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        # The loop says which microbatch is the last, and scales each loss: DeepSpeed must not do so again.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip or 0.0,  # 1.0 if it isn't mentioned
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # ours are torch's own
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
    }
    if precision is not None:
        config[precision] = {"enabled": True}
        config["communication_data_type"] = reduce_dtype  # else gradients are summed in the compute dtype
    if precision == "fp16":
        # The rule of torch's GradScaler: twice as much after 2000 good steps, half at once after a bad one.
        config["fp16"] |= {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}
    return config


def choose_accelerator(device_type: str) -> None:
    """To be called before DeepSpeed is imported, which reads it then: it would take a GPU where there is one."""
    os.environ.setdefault("DS_ACCELERATOR", device_type)


def initialize(model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], device: torch.device) -> Any:
    """DeepSpeed's engine around a model that has its initial values."""
    choose_accelerator(device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # asked for where the launcher isn't torchrun
    if device.type == "cpu":
        # It asks for a CUDA compiler, which torch then warns isn't of use.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # it tells of each of its settings
    with redirect_stdout(StringIO()):  # and of each part that it has built; what fails is raised
        deepspeed.init_distributed(dist_backend="gloo" if device.type == "cpu" else "nccl")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


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
        self.shadow.fill()

    def scatter_state(self) -> None:
        self.shadow.pour_out()

    def release_state(self) -> None:
        self.shadow.empty()

    def forward(self, batch: Microbatch) -> Tensor:
        inputs = batch.inputs
        if self.dtype is not None and inputs.is_floating_point():
            inputs = inputs.to(self.dtype)
        return self.model(inputs)

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
