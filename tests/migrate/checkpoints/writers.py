"""The layouts of accelerate, Lightning and Composer, made of FSDP1's own state dicts as their code makes them.

`by_accelerate` and `by_lightning` call that code, where it is installed; `test_layouts.py` compares the two.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType

from tests.harness import one_step
from tests.migrate.checkpoints.fsdp1 import FURTHER, STEPS, fsdp1_engine, full, plain_model


def sharded(model: nn.Module) -> Any:
    return FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)


def accelerate_sharded(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with sharded(model):
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "pytorch_model_fsdp_0")
        dcp.save(
            {"optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer)},
            checkpoint_id=folder / "optimizer_0",
        )
    if dist.get_rank() == 0:
        torch.save({"last_epoch": 3, "_step_count": 4}, folder / "scheduler.bin")
        (folder / "random_states_0.pkl").write_bytes(pickle.dumps({"step": 3}))


def accelerate_full(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with full(model):
        weights, state = model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(weights, folder / "pytorch_model_fsdp.bin")
        torch.save(state, folder / "optimizer.bin")


def accelerate_without_dcp(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    rank = dist.get_rank()
    with sharded(model):
        torch.save(model.state_dict(), folder / f"pytorch_model_fsdp_0_rank{rank}.bin")
        torch.save(FullyShardedDataParallel.optim_state_dict(model, optimizer), folder / f"optimizer_0_rank{rank}.bin")


def lightning_sharded(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with sharded(model):
        state = {
            "model": model.state_dict(),
            "optimizer_0": FullyShardedDataParallel.optim_state_dict(model, optimizer),
        }
    dcp.save(state, checkpoint_id=folder)
    if dist.get_rank() == 0:
        torch.save(_lightnings_own(), folder / "meta.pt")


def _lightnings_own() -> dict[str, Any]:
    return {
        "epoch": 1,
        "global_step": STEPS,
        "pytorch-lightning_version": "2.6.6",
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "lr_schedulers": [{"last_epoch": 3}],
        "hyper_parameters": argparse.Namespace(width=32),  # an object of any class
    }


def lightning_full(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with full(model):
        weights, state = model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        numbered = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, plain_model())
        torch.save({**_lightnings_own(), "state_dict": weights, "optimizer_states": [numbered]}, folder / "last.ckpt")


def fabric_sharded(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with sharded(model):
        state = {"model": model.state_dict(), "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    if dist.get_rank() == 0:
        torch.save({"step": STEPS}, folder / "meta.pt")


def composer_sharded(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = {
        "model": get_model_state_dict(model),
        "optimizers": {"Adam": get_optimizer_state_dict(model, optimizer)},
        "schedulers": {"CosineAnnealingScheduler": {"last_epoch": 3}},
        "timestamp": {"Timestamp": {"epoch": 1, "batch": STEPS}},
        "rank_zero_seed": 17,
        "run_name": "one",
        "metadata": {"torch_version": torch.__version__},
    }
    dcp.save({"state": state, "rng": [{"python": (3, (1, 2), None)}]}, checkpoint_id=folder)


LAYOUTS: dict[str, Callable[[Path, nn.Module, torch.optim.Optimizer], None]] = {
    "accelerate-sharded": accelerate_sharded,
    "accelerate-full": accelerate_full,
    "accelerate-without-dcp": accelerate_without_dcp,
    "lightning-sharded": lightning_sharded,
    "lightning-full": lightning_full,
    "fabric-sharded": fabric_sharded,
    "composer-sharded": composer_sharded,
}


def save_layouts(folder: Path) -> list[float]:
    """Train, save in every layout, and train on with real FSDP1: the losses after what was saved."""
    engine = fsdp1_engine(orig=True)
    for _ in range(STEPS):
        one_step(engine)
    for name, write in LAYOUTS.items():
        (folder / name).mkdir(exist_ok=True)
        dist.barrier()
        write(folder / name, engine.model, engine.optimizer)
    return [one_step(engine) for _ in range(FURTHER)]


# --- the writers themselves ----------------------------------------------------------------------------------


def by_accelerate(folder: Path) -> None:
    """What `Accelerator.save_state` calls, in its three forms."""
    from accelerate import PartialState
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    engine = fsdp1_engine(orig=True)
    for _ in range(STEPS):
        one_step(engine)
    PartialState(cpu=True)  # for its logger
    accelerator = SimpleNamespace(
        process_index=dist.get_rank(), num_processes=dist.get_world_size(), wait_for_everyone=dist.barrier
    )
    for name, kind, use_dcp in (
        ("accelerate-sharded", StateDictType.SHARDED_STATE_DICT, True),
        ("accelerate-without-dcp", StateDictType.SHARDED_STATE_DICT, False),
    ):
        plugin = SimpleNamespace(
            fsdp_version=1, state_dict_type=kind, state_dict_config=None, optim_state_dict_config=None
        )
        arguments: Any = (plugin, accelerator, engine.model)
        save_fsdp_model(*arguments, str(folder / name), use_dcp=use_dcp)
        optimizer: Any = (plugin, accelerator, engine.optimizer, engine.model)
        save_fsdp_optimizer(*optimizer, str(folder / name), use_dcp=use_dcp)


def by_lightning(folder: Path) -> None:
    """`save_checkpoint` of Fabric's strategy, which refuses to train on a CPU, but writes there."""
    from lightning.fabric.strategies import FSDPStrategy

    engine = fsdp1_engine(orig=True)
    for _ in range(STEPS):
        one_step(engine)
    strategy = cast(Any, object.__new__(FSDPStrategy))
    strategy._state_dict_type = "sharded"
    strategy.broadcast = lambda value: value
    type(strategy).global_rank = property(lambda self: dist.get_rank())
    strategy.save_checkpoint(
        str(folder / "fabric-sharded"), {"model": engine.model, "optimizer": engine.optimizer, "step": STEPS}
    )
