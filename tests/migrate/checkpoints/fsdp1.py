"""Real checkpoints of FSDP1, made on ranks of `Ranks`, and what real FSDP1 does from there on."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdp2 import models
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.restore import restore
from fsdp2.checkpoint.state import AppState, Progress, RandomState
from fsdp2.models.initial import reset_parameters
from fsdp2.parallel.engine import Engine
from fsdp2_extra.baselines.fsdp1 import FSDP1Engine
from tests.harness import make_engine, one_step

STEPS = 3  # before it is saved
FURTHER = 5


def plain_model() -> nn.Module:
    """`vit`, the smallest size, with its initial values."""
    spec = models.get("vit")
    model = spec.build("tiny")
    reset_parameters(model, spec.initial_values, seed=1)
    return model


def wrapped(model: nn.Module, *, orig: bool) -> FullyShardedDataParallel:
    units = set(models.get("vit").blocks(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=CustomPolicy(lambda module: module in units),
            device_id=torch.device("cpu"),
            use_orig_params=orig,
        )


def full(model: nn.Module) -> Any:
    """FULL_STATE_DICT as it works on a CPU: without offload, which is no copy there."""
    return FullyShardedDataParallel.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)
    )


def fsdp1_engine(*, orig: bool) -> Engine:
    """Two parameter groups with settings of their own where FSDP1 can have them."""
    model = wrapped(plain_model(), orig=orig)
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if orig:
        named = list(model.named_parameters())
        groups = [
            {"params": [p for name, p in named if not name.endswith("bias")], "weight_decay": 0.01},
            {"params": [p for name, p in named if name.endswith("bias")], "lr": 2e-3},
        ]
    optimizer = torch.optim.Adam(groups, lr=1e-3, betas=(0.8, 0.99), foreach=True)
    return FSDP1Engine(model, optimizer, torch.amp.GradScaler("cpu", enabled=False))


def save_all(folder: Path, *, orig: bool) -> list[float]:
    """Train, save in every way, and train on with real FSDP1: the losses after what was saved."""
    engine = fsdp1_engine(orig=orig)
    model, optimizer = engine.model, engine.optimizer
    for _ in range(STEPS):
        one_step(engine)
    first = dist.get_rank() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with full(model):
            weights: Any = model.state_dict()
            state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            if first:
                torch.save({"model": weights, "optimizer": state, "epoch": 2}, folder / "full.pt")
                prefixed = {f"module._orig_mod.{name}": tensor for name, tensor in weights.items()}
                (folder / "two").mkdir()
                torch.save(prefixed, folder / "two" / "model.pt")
                torch.save(state, folder / "two" / "optim.pt")
                rekey = FullyShardedDataParallel.rekey_optim_state_dict
                numbered = rekey(state, OptimStateKeyType.PARAM_ID, plain_model())
                torch.save({"state_dict": weights, "optimizer_states": [numbered], "global_step": 7}, folder / "ids.pt")
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            # By default it is offloaded, which on a CPU is no copy.
            offloaded = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            if first:
                torch.save({"model": weights, "optimizer": offloaded}, folder / "offloaded.pt")
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            sharded = {
                "model": model.state_dict(),
                "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer),
            }
            dcp.save(sharded, checkpoint_id=folder / "sharded")
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            (folder / "local").mkdir(exist_ok=True)
            torch.save(model.state_dict(), folder / "local" / f"model_rank{dist.get_rank()}.pt")
        torch.save(optimizer.state_dict(), folder / "local" / f"optim_rank{dist.get_rank()}.pt")
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"app": {"model": weights, "optim": state}}, checkpoint_id=folder / "app")
    return [one_step(engine) for _ in range(FURTHER)]


def grouped(engine: Engine, groups: int) -> Engine:
    """The same engine with the groups of `fsdp1_engine`."""
    if groups == 2:
        named = list(engine.model.named_parameters())
        engine.optimizer.param_groups[0]["params"] = [p for name, p in named if not name.endswith("bias")]
        engine.optimizer.add_param_group({"params": [p for name, p in named if name.endswith("bias")]})
    return engine


def resume_fsdp2(checkpoint: str, groups: int) -> tuple[list[float], dict[str, Any], int]:
    """What FSDP2 does from a converted checkpoint: losses, the optimizer's steps and settings, the run's step."""
    engine = grouped(make_engine(), groups)
    progress = Progress()
    parts: dict[str, Any] = {"rng": RandomState(dist.get_rank(), torch.device("cpu")), "progress": progress}
    for group in engine.optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # as a scheduler does
    restore(LocalFiles(checkpoint), AppState(engine.model, engine.optimizer, parts))
    names: dict[Any, str] = {parameter: name for name, parameter in engine.model.named_parameters()}
    facts = {
        "steps": {names[p]: float(state["step"]) for p, state in engine.optimizer.state.items()},
        "own": len({state["step"].data_ptr() for state in engine.optimizer.state.values()}),
        "groups": [
            {key: group[key] for key in ("lr", "betas", "weight_decay")} | {"count": len(group["params"])}
            for group in engine.optimizer.param_groups
        ],
    }
    return [one_step(engine) for _ in range(FURTHER)], facts, progress.step


def resume_fsdp1(file: str, *, orig: bool) -> list[float]:
    """What real FSDP1 does from a full state dict, read by its own functions."""
    engine = fsdp1_engine(orig=orig)
    model, optimizer = engine.model, engine.optimizer
    state = torch.load(file, weights_only=True, mmap=True)
    with torch.no_grad():  # so that nothing is right by itself
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            tensor.fill_(0.5)
    with full(model):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(
            FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state["optimizer"])
        )
    return [one_step(engine) for _ in range(FURTHER)]
