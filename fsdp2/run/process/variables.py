"""The variables by which a launcher tells a process its place: all there, and free of contradictions."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

from fsdp2.options.errors import ConfigError, shown
from fsdp2.units import tell

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# How launchers other than torchrun number their tasks, and count them. A SLURM job has no step before srun.
TASKS = {"SLURM_STEP_NUM_TASKS": "SLURM_PROCID", "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK", "PMI_SIZE": "PMI_RANK"}

# A name of Kubernetes is known some time after its pod.
SECONDS_TO_RESOLVE = 60.0


def check_variables(variables: Mapping[str, str]) -> None:
    """Raise ConfigError if this process is one of several and can't know which, or if variables don't agree."""
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        for count, task in TASKS.items():
            if variables.get(count, "1") != "1" and task in variables:
                raise ConfigError(
                    f"{count}={shown(variables[count])}: RANK and WORLD_SIZE aren't set, so that each task would train "
                    "by itself; start it as launchers/slurm.sbatch does, or with one torchrun a node"
                )
        return
    missing = [name for name in NEEDED if name not in variables]
    if missing:
        given = [name for name in NEEDED if name in variables]
        raise ConfigError(
            f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} set, but not {' and '.join(missing)}; set all "
            f"of {', '.join(NEEDED)} for each rank, as torchrun does, or none to train on one rank"
        )
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        place, ranks = _number(rank, variables), _number(size, variables)
        if place is not None and ranks is not None and place >= ranks:
            raise ConfigError(
                f"{rank}={place}: must be less than {size}, which is {ranks}, since ranks count from 0; see what the "
                "launcher sets"
            )
    every, here = _number("WORLD_SIZE", variables), _number("LOCAL_WORLD_SIZE", variables)
    if here is not None and every is not None and here > every:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={here}: must be WORLD_SIZE, which is {every}, or less: it counts the ranks of one node"
        )
    port = _number("MASTER_PORT", variables)
    if port is None or not 0 < port < 65536:
        raise ConfigError(f"MASTER_PORT={port}: must be from 1 to 65535; give a free port of the host of rank 0")


def _number(name: str, variables: Mapping[str, str]) -> int | None:
    text = variables.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name}={shown(text)}: must be a whole number; see what the launcher sets")
    return int(text)


def speaks(variables: Mapping[str, str]) -> bool:
    """Return whether this process prints refusals for all: it is the first one, by whatever number it has."""
    return next((variables[name] for name in ("RANK", *TASKS.values()) if name in variables), "0") == "0"


def require_address(address: str, *, say: bool, seconds: float = SECONDS_TO_RESOLVE) -> None:
    """Wait until the host of rank 0 has an address; `say` tells of it. Raises ConfigError if it has none after seconds.

    torch would try for half an hour.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except (OSError, UnicodeError) as error:  # a name that no name can be is the latter
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"MASTER_ADDR={shown(address)}: {socket.gethostname()} finds no address for this name ({error}); "
                    "give the address itself: MASTER_ADDR, or torchrun --local-addr on the first node"
                ) from None
        if say:
            say = False
            what = f"an address of {shown(address)}, the host of rank 0"
            tell(f"{socket.gethostname()}: waiting up to {seconds:.0f} s for {what}")
        time.sleep(1.0)
