"""A GPU's memory besides tensors. None of it has been calibrated on a GPU: each term names its source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp2.options.errors import ConfigError, refused, shown, unknown
from fsdp2.options.settings_file import read_table
from fsdp2.units import byte_count
from fsdp2_tools.plan.execute import Runs
from fsdp2_tools.plan.memory import Memory
from fsdp2_tools.plan.speed import KEYS as SPEED_KEYS
from fsdp2_tools.plan.speed import Speed, read_speed

TABLE = Path(__file__).with_name("gpus.toml")
KEYS = ("memory", "source", "kind", *SPEED_KEYS)
KINDS = ("gpu", "cpu")

# Assumed: no data sheet says what a context and torch's kernels take; reports range from 0.3 to 1 GB.
CONTEXT = 700_000_000
# NCCL_BUFFSIZE is 4 MiB (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html). How many channels a
# communicator opens depends on the links; assumed are 16, each with a buffer to send and one to receive.
NCCL_COMMUNICATOR = 16 * 2 * 4 * 2**20


@dataclass(frozen=True)
class Gpu:
    """A device to plan for: its name, bytes of memory, where its numbers are from, and its speed if that is known.

    `on_cpu`: it is no GPU, but the cores of one rank.
    """

    name: str
    memory: int
    source: str
    speed: Speed | None = None
    on_cpu: bool = False


@dataclass(frozen=True)
class Term:
    """Bytes that no tensor accounts for, and where the number is from."""

    name: str
    bytes: int
    source: str


def gpu(place: str) -> Gpu:
    """A GPU of the table by its name, or of a file. Raises ConfigError, in one line, if there is no such."""
    is_file = place.endswith(".toml")
    with refused(f"--gpu {shown(place)}"):
        table = read_table(place if is_file else str(TABLE))
    if not is_file and place not in table:
        raise ConfigError(f"--gpu {shown(place)}: {unknown(shown(place), list(table))} or give a FILE.toml")
    if not table:
        raise ConfigError(f'--gpu {shown(place)}: is empty; give it a table such as [mine] with memory = "80GB"')
    name = next(iter(table)) if is_file else place
    return gpu_of(name, table[name], place)


def gpu_of(name: str, values: Any, place: str) -> Gpu:
    where = f"--gpu {shown(place)}"
    if not isinstance(values, dict) or "memory" not in values:
        raise ConfigError(f'{where}: [{shown(name)}] sets no memory; add memory = "80GB"')
    for key in values:
        if key not in KEYS:
            raise ConfigError(f"{where}: {shown(key)} {unknown(shown(key), KEYS)}")
    try:
        memory = byte_count(values["memory"])
    except ValueError as error:
        raise ConfigError(f"{where}: memory {error}") from None
    kind = values.get("kind", "gpu")
    if kind not in KINDS:
        raise ConfigError(f"{where}: kind {shown(str(kind))}: {unknown(shown(str(kind)), KINDS)}")
    on_cpu = kind == "cpu"
    return Gpu(name, memory, str(values.get("source", place)), read_speed(where, values, on_cpu=on_cpu), on_cpu)


def terms(runs: Runs, memory: Memory) -> list[Term]:
    """List a device's memory beside the tensors of the peak."""
    # NCCL opens a communicator at a group's first collective, none for one rank alone.
    communicators = len({one.ranks for one in runs.longer.work if one.ranks[0] > 1})
    return [
        Term(
            "allocator",
            memory.reserved - memory.peak.bytes,
            "rounding, holes, and a pool for each stream: the step's allocations through CUDACachingAllocator's rules",
        ),
        Term("CUDA context, kernels", CONTEXT, "assumed: 0.3 to 1 GB are reported"),
        Term(
            "nccl's buffers",
            communicators * NCCL_COMMUNICATOR,
            f"groups of ranks: {communicators}, each 16 channels (assumed) with 2 buffers of 4 MiB (NCCL_BUFFSIZE)",
        ),
    ]


def beside_on_cpu(memory: Memory) -> Term:
    """The most that ranks on CPUs hold beyond the plan's tensors."""
    return Term(
        "gloo's buffers",
        memory.largest_exchange,
        "the largest exchange: a bound for gloo's copies on CPUs, out of every ledger's sight; --gpu plans for GPUs",
    )
