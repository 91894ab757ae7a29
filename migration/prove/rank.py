"""One rank of a recorded program. `launch` starts `main` in a process of its own; tests call `run_script` in theirs."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import random
import runpy
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from fsdp2.run.process.runtime import PR_SET_PDEATHSIG
from migration.prove.recorder import Enough, Recorder
from migration.prove.stand_in import patched, stand_in

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
RESHARDING = {
    ShardingStrategy.SHARD_GRAD_OP: ShardingStrategy.FULL_SHARD,
    ShardingStrategy._HYBRID_SHARD_ZERO2: ShardingStrategy.HYBRID_SHARD,
}
SPAWNS = "spawns"  # a file in the folder of a program that starts its ranks by itself
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run(settings: dict[str, Any], program: Callable[[], Any], rank: int) -> None:
    """Call a program and record it.

    `settings`: folder, steps, cuts, batch_times as the Recorder takes them; without_dropout; cure, one of CURES;
    stand_in, how many GPUs there seem to be.
    """
    how = {key: settings[key] for key in ("steps", "cuts", "batch_times") if key in settings}
    with ExitStack() as stack:
        if settings.get("stand_in"):
            stack.enter_context(stand_in(rank, settings["stand_in"]))
        if settings.get("without_dropout"):
            stack.enter_context(without_dropout())
        if settings.get("cure"):
            stack.enter_context(CURES[settings["cure"]]())
        stack.enter_context(Recorder(Path(settings["folder"]), **how))
        # A program that sets no seed draws other numbers in each process, here the same ones in each run.
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(0 if settings.get("cure") == "seed" else rank)
        try:
            program()
        except Enough:
            return


def run_script(settings: dict[str, Any], script: str, arguments: list[str]) -> None:
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [script, *arguments], [str(Path(script).absolute().parent), *sys.path]
    try:
        run(settings, lambda: runpy.run_path(script, run_name="__main__"), int(os.environ.get("RANK", 0)))
    finally:
        sys.argv, sys.path[:] = before


def without_dropout() -> AbstractContextManager[Any]:
    """Masks are drawn on each rank, so that they depend on how many there are."""

    def kept(given: Tensor, *_: Any, **__: Any) -> Tensor:
        return given

    attention = nn.functional.scaled_dot_product_attention

    def attention_kept(*arguments: Any, **named: Any) -> Tensor:
        positional = (*arguments[:4], 0.0, *arguments[5:]) if len(arguments) > 4 else arguments
        return attention(*positional, **(named | {"dropout_p": 0.0} if "dropout_p" in named else named))

    every: dict[str, Any] = {**dict.fromkeys(DROPOUTS, kept), "scaled_dot_product_attention": attention_kept}
    return mock.patch.multiple(nn.functional, **every)


def _resharding(given: dict[str, Any]) -> None:
    strategy: Any = given.get("sharding_strategy")
    given["sharding_strategy"] = RESHARDING.get(strategy, strategy)


def _together(given: dict[str, Any]) -> None:
    if given.get("sharding_strategy") in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        given.update(sharding_strategy=ShardingStrategy.NO_SHARD, device_mesh=None, process_group=None)


def _on_the_device() -> AbstractContextManager[Any]:
    """With two tensors for two moments."""
    wrapper = FullyShardedDataParallel
    theirs = wrapper.optim_state_dict

    def replacement(model: nn.Module, optim: torch.optim.Optimizer, *_: Any, **__: Any) -> dict[str, Any]:
        kind = wrapper.get_state_dict_type(model)
        config = dataclasses.replace(kind.optim_state_dict_config, offload_to_cpu=False)
        with wrapper.state_dict_type(model, kind.state_dict_type, kind.state_dict_config, config):
            return theirs(model, optim)

    both: dict[str, Any] = dict.fromkeys(("optim_state_dict", "full_optim_state_dict"), staticmethod(replacement))
    return mock.patch.multiple(wrapper, **both)


# How programs run without what makes them differ. FSDP1 does the same mathematics by a path that hasn't the fault.
CURES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "reshard": lambda: patched(FullyShardedDataParallel, "__init__", _resharding),
    "together": lambda: patched(FullyShardedDataParallel, "__init__", _together),
    "moments": _on_the_device,
    "seed": ExitStack,  # all ranks draw the same numbers
    "slow": lambda: mock.patch.object(torch.backends.mha, "get_fastpath_enabled", bool),
}


def _child(number: int, settings: dict[str, Any], function: Callable[..., Any], *arguments: Any) -> None:
    run(settings, lambda: function(number, *arguments), number)


def _spawning(settings: dict[str, Any]) -> Any:
    """A program that starts its ranks by itself is started once, and its ranks are recorded."""
    theirs = torch.multiprocessing.spawn

    def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), *more: Any, **named: Any) -> Any:
        if int(os.environ.get("RANK", 0)):
            raise SystemExit(0)
        for name in (*LAUNCHERS, *(name for name in os.environ if name.startswith("TORCHELASTIC_"))):
            os.environ.pop(name, None)
        Path(settings["folder"], SPAWNS).touch()
        return theirs(_child, (settings, fn, *args), *more, **named)

    return mock.patch.object(torch.multiprocessing, "spawn", spawn)


def main() -> None:
    """The command line is SETTINGS (JSON) SCRIPT ARGS…"""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # not to go on when the command is killed
    settings, script, *arguments = sys.argv[1:]
    given = json.loads(settings)
    sys.path.pop(0)  # the folder in which python was started
    with _spawning(given):
        run_script(given, script, arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what is over mustn't wait for groups and workers that nobody takes down any more
