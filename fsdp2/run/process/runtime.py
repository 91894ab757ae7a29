"""The process: its rank, device, threads and seeds, and whether its launcher is still there."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp2 import STARTED_BY
from fsdp2.options.errors import ConfigError
from fsdp2.run.process.variables import check_variables

PR_SET_PDEATHSIG = 1  # of Linux's prctl


@dataclass(frozen=True)
class Share:
    """A rank's part of each batch.

    Attributes:
        index, of: which samples, of so many parts.
        piece, pieces: which tokens of them.
        counts: whether this rank is the first of those that split the model's layers between them, and have the same
            tokens; a sum over all ranks takes the numbers of these alone.
    """

    index: int
    of: int
    piece: int
    pieces: int
    counts: bool


@dataclass(frozen=True)
class World:
    """This process's place among all of them."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    def share(self, tp: int, sp: int = 1) -> Share:
        """This rank's part. `tp` neighbours split layers; `sp` such groups, side by side, share each sequence."""
        index, within = divmod(self.rank, tp * sp)
        return Share(index, self.world_size // (tp * sp), within // tp, sp, self.rank % tp == 0)


def world() -> World:
    """From the process group that a launcher already made, else from torchrun's variables, else alone.

    Raises ConfigError if variables are missing or contradict each other.
    """
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    else:
        check_variables(os.environ)
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    return World(rank, size, int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size)))


def of_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarts_allowed() -> bool:
    """Return whether torchrun starts ranks again that fail."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def launcher_gone() -> bool:
    """Return whether torchrun started this process and has died since, so that nobody will end it or start it again."""
    return of_torchrun() and os.getppid() != STARTED_BY


def end_with_launcher() -> None:
    """Under torchrun, get SIGTERM when that dies: the training loop takes it as a stop signal, anything else ends.

    Without this, ranks that start up wait for half an hour for a store that has died with torchrun, and rank 0 keeps
    the run directory from others.
    """
    if of_torchrun():
        if sys.platform == "linux":  # elsewhere `launcher_gone` tells, from the first step on
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if launcher_gone() or store_gone():  # before that call
            os.kill(os.getpid(), signal.SIGTERM)


def store_gone() -> bool:
    """Return whether nobody listens where torchrun has its store, which is there before it starts a rank.

    If torchrun has died while this process imported torch, its parent is another one from the first look on, so that
    `launcher_gone` can't tell; and torch would try to connect for half an hour.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False  # rank 0 will make the store
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=10).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # torch says what is wrong with the address
        return False
    return False


def pick_device(wanted: str, world: World) -> torch.device:
    """The device of this rank: `auto` is a GPU where there is one.

    A launcher may show each process its own GPU alone, as `srun --gpus-per-task=1` does; then that one is cuda:0 for
    each. Raises ConfigError if a GPU is wanted and missing, or if there are fewer than ranks on this node.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and gpus == 0):
        return torch.device("cpu")
    if gpus == 0:
        raise ConfigError("--device cuda: torch sees no GPU here; use --device cpu")
    bound = any(name in os.environ for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))
    if gpus == 1 and world.local_world_size > 1 and bound:
        return torch.device("cuda", 0)  # its own, as `process_group` makes sure
    if world.local_world_size > gpus:
        raise ConfigError(
            f"--device {wanted}: {world.local_world_size} ranks and {gpus} GPU on this node; start "
            f"{gpus} ranks a node (--nproc_per_node {gpus}) or use --device cpu"
        )
    return torch.device("cuda", world.local_rank)


def set_threads(threads: int | None, world: World) -> int:
    """Set torch's CPU threads: `threads`, else OMP_NUM_THREADS, else this node's cores divided by its ranks.

    Set here and not left to the launcher: of several ranks, torchrun sets OMP_NUM_THREADS to 1 where its user doesn't,
    so that 1 says nothing there, Ray chooses another, and the number of threads changes the last bits of the losses.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    said = int(asked) if asked.isdecimal() and (asked != "1" or world.local_world_size == 1) else 0
    count = threads or said or max(1, cores // world.local_world_size)
    torch.set_num_threads(count)
    return count
