"""The place of the run: the same for all ranks, writable, quick enough, and large enough for its checkpoints."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from fsdp2.checkpoint.places import open_files
from fsdp2.checkpoint.refusal import one_line
from fsdp2.options.values import is_step
from fsdp2.run.directory.room import Sizes, run_need
from fsdp2.run.directory.rundir import RunDir
from fsdp2.units import size as in_units
from fsdp2_tools.doctor.asking import Asker, Here
from fsdp2_tools.doctor.judging import BAD, WORSE, Hosts, Row, beside_median, far_above

TIMES_SLOWER = 3.0  # than the median rank
NOISE = 0.5  # seconds: a disk that others use may be so late at any time
SLOWEST = 2.0  # seconds of an fsync or a rename of a small file; a commit waits for each
SEEN_WITHIN = 3.0  # seconds that a file system may take to show a new file on another node


def room(here: Here, place: str) -> int | None:
    """On rank 0, the bytes that the run needs beside what is there already; None if it isn't known."""
    if here.world.rank != 0 or "://" in place:
        return None
    here.doing = "counting the bytes of checkpoints"
    run = RunDir(place)
    # A save that wasn't committed is removed, which makes room too.
    names = (path.name.removeprefix("step-") for path in (run.path / "checkpoints").glob("step-*"))
    stays = [int(name) for name in names if is_step(name)]
    return run_need(here.config, run, Sizes(here.config), stays, done=0).bytes


def leave_nonce(here: Here, place: str, folder: str) -> None:
    """Rank 0 leaves a file that all ranks have to see."""
    if here.world.rank == 0:
        here.doing = f"writing to {place}"
        files = open_files(place)
        files.mkdir(folder)
        files.write(f"{folder}/nonce", folder.encode())


def measure(here: Here, place: str, folder: str, size: int) -> dict[str, Any]:
    """Seconds of this rank's writing, fsync and rename, whether it sees rank 0's file, and bytes that are free.

    Args:
        place: a folder or URL.
        folder: below it, with rank 0's file.
        size: bytes to write.
    """
    files = open_files(place)
    found: dict[str, Any] = {"sees": False, "free": None}
    here.doing = f"looking for rank 0's file in {place}"
    deadline = time.monotonic() + SEEN_WITHIN
    while not found["sees"] and time.monotonic() < deadline:
        try:
            found["sees"] = files.read(f"{folder}/nonce") == folder.encode()
        except OSError:  # not there yet; or it can't be, which the steps below say
            time.sleep(0.1)
    name = f"{folder}/rank-{here.world.rank}"
    steps: dict[str, Callable[[], Any]] = {
        "mkdir": lambda: files.mkdir(folder),  # where the place isn't shared
        "write": lambda: files.write(name, bytes(size)),
    }
    if not files.put_is_atomic:
        steps["fsync"] = lambda: files.fsync(name)
        steps["rename"] = lambda: files.rename(name, renamed)
    renamed = name if files.put_is_atomic else f"{name}-renamed"
    steps |= {"read": lambda: files.read(renamed), "delete": lambda: files.unlink(renamed)}
    for step, do in steps.items():
        here.doing = f"{step} in {place}"
        before = time.perf_counter()
        try:
            do()
        except OSError as error:
            return found | {"error": f"{step}: {one_line(error)}"}
        found[step] = time.perf_counter() - before
    if "://" not in place:
        found["free"] = shutil.disk_usage(place).free
    return found


def clean(here: Here, place: str, folder: str, ranks: list[int]) -> None:
    """Remove the examination's folder, as these ranks see it. Two of one host may be at it at the same time."""
    if here.world.rank not in ranks:
        return
    files = open_files(place)
    with suppress(FileNotFoundError):  # the other one has removed the folder
        for name in files.list(folder):
            with suppress(FileNotFoundError):
                files.unlink(f"{folder}/{name}")
        if "://" not in place:
            files.rmdir(folder)


def ask_storage(asker: Asker, place: str, size: int) -> dict[int, Any]:
    """All ranks' answers, by rank. What was written is removed. Each rank takes a relative place for its own."""
    folder = f".doctor-{time.time_ns():x}"
    asker.ask("leave_nonce", place=place, folder=folder)
    found = asker.ask("storage", place=place, folder=folder, size=size)
    blind = [rank for rank, one in found.items() if not one["sees"]]
    asker.ask("clean", place=place, folder=folder, ranks=[0, *blind])
    return found


def rows(found: Mapping[int, Mapping[str, Any]], hosts: Hosts, place: str, needed: int | None) -> list[Row]:
    """Judge all ranks' answers; `needed`, of `room`, is None if that isn't known."""
    if not found:
        return []
    failed = [rank for rank, one in found.items() if "error" in one]
    blind = [rank for rank, one in found.items() if not one["sees"] and rank not in failed]
    text = next((found[rank]["error"] for rank in failed), "written, synced, renamed, read, deleted by all")
    fix = f"give each rank the right to write to {place}, and room, or choose another --run-dir"
    shared = Row("run directory", f"{len(found) - len(blind)} ranks see rank 0's file", "all ranks")
    result = [
        Row("rights and room", text, "each rank writes, renames and deletes").judged(failed, hosts, BAD, fix),
        shared.judged(blind, hosts, BAD, f"{place} is another place there: mount it, or choose a --run-dir on all"),
    ]
    good = {rank: one for rank, one in found.items() if "error" not in one}
    for step in ("write", "fsync", "rename"):
        times = {rank: one[step] for rank, one in good.items() if step in one}
        if not times:
            continue
        slow = set(far_above(times, TIMES_SLOWER, NOISE))
        slow |= {rank for rank, took in times.items() if step != "write" and took > SLOWEST}
        row = beside_median(f"storage {step}", times.values(), max, "{:.3f} s".format)
        result.append(row.judged(slow, hosts, WORSE, "look at the file system's load there; a save waits for it"))
    free = {rank: one["free"] for rank, one in good.items() if one["free"] is not None}
    if free and needed is not None:
        small = [rank for rank, count in free.items() if count < needed]
        row = Row("free space", in_units(min(free.values())), f"{in_units(needed)} for what the run writes")
        result.append(row.judged(small, hosts, BAD, "make room, lower --keep, or choose another --run-dir"))
    return result
