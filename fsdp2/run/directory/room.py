"""Refuse a run before it starts if disks or memory are too small for what it writes later.

What depends on the data, such as the steps of an epoch, is left out: what is refused here can't fit.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn

from fsdp2.checkpoint import full_model
from fsdp2.checkpoint.disk import bytes_of, temporary_folder
from fsdp2.config import Config
from fsdp2.options.errors import ConfigError
from fsdp2.run.directory.host_memory import Sizes, check_memory, memory_needs
from fsdp2.run.directory.rundir import RunDir
from fsdp2.run.process.runtime import World, pick_device
from fsdp2.units import size

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes to be written below a folder, beside what is there; the flag that says so, and what to do without room."""

    place: Path
    bytes: int
    what: str
    flag: str
    fixes: Sequence[str]


def saves_left(config: Config, done: int) -> int | None:
    """The least number of checkpoints that a run writes after `done` steps; None if only its data says how many."""
    every, most = config.checkpoint_every, config.max_steps
    if every == "never" or (most is not None and done >= most):
        return 0
    if not isinstance(every, int):
        return config.epochs if most is None else 1
    return None if most is None else math.ceil(most / every) - done // every


def checkpoints_at_once(config: Config, there: Sequence[int] = (), done: int = 0) -> tuple[int, int]:
    """The most checkpoints that a run has at once, and how many `Store.retain` leaves after the last save.

    With `--max-steps 100 --checkpoint-every 10 --keep 3` these are (4, 3): the oldest goes when the newest is
    committed. `--keep-every 20` keeps those of 20, 40 and 60 beside them: (7, 6).

    Args:
        there: steps of those that are there and stay until newer ones take their place, in order.
    """
    left, every, keep = saves_left(config, done), config.checkpoint_every, config.keep
    if left == 0:
        return len(there), len(there)
    count, for_good = keep + 1 if left is None else len(there) + left, 0
    if config.keep_every is not None:
        # Old ones that newer ones push out of `--keep`, and then new ones.
        pushed = there if left is None or left > keep else there[: max(0, len(there) + left - keep - 1)]
        for_good = sum(step % config.keep_every == 0 for step in pushed)
        if isinstance(every, int) and left is not None and config.max_steps is not None:
            both = math.lcm(every, config.keep_every)  # only a step that is saved is kept for good
            newest = every * (math.ceil(config.max_steps / every) - keep - 1)
            for_good += max(0, newest // both - done // both)
    for_good += config.keep_best and count > keep
    most = max(len(there) + 1, min(count, keep + 1) + for_good)  # a lower --keep counts after the next save
    return most, min(most, keep + for_good)


def large(config: Config) -> int | None:
    """The bytes of a model's weights if they are too many for rank 0 to gather and write alone."""
    needed = bytes_of(config.spec.described(config.model_size).state_dict())
    return needed if needed > full_model.LARGEST_UNASKED else None


def full_model_form(config: Config, *, remote: bool) -> Literal["none", "gathered", "sharded"]:
    """The way in which the full model is written: not at all, gathered by rank 0, or as safetensors by all ranks.

    Args:
        remote: the run is at a URL. Its local folder is another one on each node, so rank 0 has to have all of it.
    """
    if config.writes_full_model is False:
        return "none"
    if not large(config):
        return "gathered"
    if config.writes_full_model is None:
        return "none"
    return "gathered" if remote else "sharded"


def full_model_bytes(config: Config, sizes: Sizes, *, remote: bool) -> int:
    """The most bytes that `full_model/` takes while it is written; 0 if it isn't."""
    weights, optimizer = bytes_of(sizes.weights), bytes_of(sizes.optimizer_state)
    form = full_model_form(config, remote=remote)
    if form != "gathered":
        return weights if form == "sharded" else 0  # without the optimizer
    # Rank 0 collects what it writes in a file without a name: first the model, then beside it the optimizer.
    return max(2 * weights, weights + 2 * optimizer)


def run_need(config: Config, run: RunDir, sizes: Sizes, stays: Iterable[int], done: int) -> Need:
    """Bytes that the run writes into its directory, or of a run at a URL into its folder here; see `check_room`."""
    full = full_model_bytes(config, sizes, remote=run.is_remote)
    if run.is_remote:
        return Need(
            place=run.path,
            bytes=full,
            what="the full model, before it is uploaded",
            flag=f"--run-dir {config.run_dir}, {run.path}",
            fixes=["set TMPDIR to a folder with more room", "start where there is more", "add --no-save-model"],
        )
    there = sorted(stays)
    held = sum(bytes_below(run.path / "checkpoints" / f"step-{step:08d}") for step in there)
    one = bytes_of(sizes.saved)
    most, last = checkpoints_at_once(config, there, done)
    # A save in the background may still be written when the full model is.
    needed = max(most * one, (last if config.async_checkpoint is None else most) * one + full)
    what = f"{most} checkpoint{'s' * (most > 1)} of {size(one)}{f' (--keep {config.keep})' * (most > 1)}"
    what += f" and a full model, {size(full)} while it is written" if full else ""
    ways = ["choose a larger disk"]
    ways += ["lower --keep"] * (most > 1 and config.keep > 1) + ["add --no-save-model"] * (full > 0)
    ways += ["use --checkpoint-every never, which writes none, to measure"] * config.saves
    return Need(place=run.path, bytes=max(0, needed - held), what=what, flag=f"--run-dir {run.path}", fixes=ways)


def node_needs(config: Config, run: RunDir | None, sizes: Sizes, world: World) -> Iterator[Need]:
    """List what this node's ranks write beside the run directory, which only rank 0 may know."""
    share = min(1.0, world.local_world_size / world.world_size)
    if run is not None and run.is_remote and config.saves:
        place = Path(temporary_folder())
        yield Need(
            place=place,
            bytes=round(share * bytes_of(sizes.saved)),
            what="this node's part of a checkpoint, before it is uploaded",
            flag=f"--run-dir {config.run_dir}, {place}",
            fixes=["set TMPDIR to a folder with more room", "start where there is more"],
        )
    if config.nvme_offload is not None:
        yield Need(
            place=Path(config.nvme_offload),
            bytes=round(share * bytes_of([sizes.trained, sizes.optimizer_state])),
            what="--nvme-offload: parameters and optimizer state",
            flag=f"--nvme-offload {Path(config.nvme_offload)}",
            fixes=["choose a folder on a larger disk"],
        )
    if config.memory_checkpoint is not None:
        there = 0 if run is None else bytes_below(memory_folder(run.place))
        yield Need(
            place=SHARED_MEMORY,
            bytes=max(0, 2 * bytes_of(sizes.saved) - there),
            what="--memory-checkpoint: two checkpoints, the newest and the next",
            flag=f"--memory-checkpoint, in {SHARED_MEMORY}",
            fixes=["give it more (docker run --shm-size)", "shard over more ranks", "drop --memory-checkpoint"],
        )


def free_bytes(place: Path) -> tuple[int, int, Path] | None:
    """The file system of a path that may not exist yet: its device's number, bytes that are free, where it is mounted.

    None if it can't be asked. A quota isn't seen.
    """
    try:
        there = next(one for one in (place.resolve(), *place.resolve().parents) if one.exists())
        state = os.statvfs(there)
        mount = next(one for one in (there, *there.parents) if os.path.ismount(one))
        return there.stat().st_dev, state.f_bavail * state.f_frsize, mount
    except OSError:
        return None


def check_disks(needs: Iterable[Need]) -> None:
    """Raise ConfigError if a file system has less room than all that is to be written there."""
    by_device: dict[int, tuple[int, Path, list[Need]]] = {}
    for need in needs:
        found = free_bytes(need.place)
        if found is not None and need.bytes:
            by_device.setdefault(found[0], (found[1], found[2], []))[2].append(need)
    for free, mount, wanted in by_device.values():
        total = sum(need.bytes for need in wanted)
        if total <= free:
            continue
        most = max(wanted, key=lambda need: need.bytes)
        what = " and ".join(need.what for need in wanted)
        says = f"{what}: {size(total)} are needed beside what is there, and {size(free)} are free on {mount}"
        *ways, last = most.fixes
        raise ConfigError(f"{most.flag}: {says}; {', '.join(ways)}{', or ' if ways else ''}{last}")


def check_room(
    config: Config,
    model: nn.Module,
    world: World,
    run: RunDir | None = None,
    stays: Iterable[int] = (),
    done: int = 0,
    *,
    loads_whole: bool = False,
) -> str | None:
    """A note if this node has hardly enough memory. Raises ConfigError if the run can't end well for lack of room.

    Called by one rank of each node.

    Args:
        model: on `meta`, with what `--freeze` freezes.
        run: where the run is written, on rank 0; None elsewhere.
        stays: steps of the checkpoints there that newer ones will replace.
        done: steps that are done.
        loads_whole: rank 0 has all weights in its memory before the first step.
    """
    sizes = Sizes(config, model)
    needs = node_needs(config, run, sizes, world)
    check_disks(needs if run is None else [run_need(config, run, sizes, stays, done), *needs])
    on_gpu = pick_device(config.device, world).type == "cuda"
    memory = memory_needs(config, sizes, world, on_gpu=on_gpu, loads_whole=loads_whole)
    return check_memory(config, memory, world)


def bytes_below(folder: Path) -> int:
    """Bytes of all files in a folder and in those below it."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def memory_folder(place: str, root: Path = SHARED_MEMORY) -> Path:
    """A run's folder in memory, named by where its run directory is."""
    return root / f"fsdp2-{os.getuid()}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"
