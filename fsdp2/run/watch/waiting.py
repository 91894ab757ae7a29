"""A rank's place in its run, and the rank that the others wait for if none goes on."""

from __future__ import annotations

import json
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdp2.options.errors import some

TORCH = f"{Path(torch.__file__).parent}/"
# Code of these has been called while a rank waits for others, or for its GPU; and the one that calls modules, if it
# recomputes them.
WAITING = (f"{TORCH}distributed/", f"{TORCH}cuda/streams.py")
RECOMPUTING = f"{TORCH}distributed/algorithms/_checkpoint/"
# Someone looks at the process, or a compiler works: however long that takes, the rank isn't stuck.
BUSY = {
    "/bdb.py": "a debugger",
    "/pydevd.py": "a debugger",
    f"{TORCH}_dynamo/convert_frame.py": "a compilation",
    f"{TORCH}_inductor/compile_fx.py": "a compilation",
}


@dataclass(frozen=True)
class Standing:
    """A rank's report on itself: `last` is the collective that it has begun last, "" if torch doesn't tell; `waits_in`
    the call in which it waits for other ranks, "" if it doesn't; `at` the innermost line of its code outside of torch.
    """

    rank: int
    host: str
    step: int
    phase: str
    seconds: float
    collectives: int
    last: str
    waits_in: str
    at: str
    busy: str
    stack: str

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host})"

    def __str__(self) -> str:
        doing = f"waits in {self.waits_in}" if self.waits_in else f"is in {self.busy}" if self.busy else "runs"
        place = f"{self.phase} {self.step}" if self.phase == "step" else f"{self.phase}, step {self.step}"
        return f"{self.name}: {place}, for {self.seconds:.0f} s; {self.begun}; {doing} at {self.at}"

    @property
    def begun(self) -> str:
        return f"{self.collectives} collectives" + (f", the last {self.last}" if self.last else "")


def groups_of(model: nn.Module) -> list[dist.ProcessGroup]:
    """The process groups in which a training has its collectives: of all ranks, and of the meshes of parameters.

    FSDP1's parameters know of no mesh, but its units know their groups; that of their replicas by a private name alone.
    """
    meshes = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
    units = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
    found = [dist.group.WORLD, *(group for mesh in meshes for group in mesh.get_all_groups())]
    found += [getattr(unit, name, None) for unit in units for name in ("process_group", "_inter_node_pg")]
    return list({id(group): group for group in found if group is not None}.values())


def collectives_begun(groups: Iterable[Any]) -> int:
    """The count of collectives this rank has begun. In a program that is the same on all ranks, equal numbers are equal
    places. torch has the number of a group under a private name alone."""
    return sum(group._get_sequence_number_for_group() for group in groups)


def last_collective(groups: Iterable[Any]) -> str:
    """The collective that this rank has begun last: its name, its number in its group, the group's ranks, and shapes.

    torch gives its record of collectives under private names alone: gloo's in newer versions, nccl's as
    `TORCH_FR_BUFFER_SIZE` says. "" where there is none.
    https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
    """
    found = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        entries = json.loads(dump()).get("entries") if dump is not None else None
        found += [(one["time_created_ns"], index, one) for index, one in enumerate(entries or [])]
    if not found:
        return ""
    *_, entry = max(found, key=lambda each: each[:2])
    ranks = {group.group_name: dist.get_process_group_ranks(group) for group in groups}
    name, description = entry["process_group"]
    members = f"ranks {some(ranks[name])}" if name in ranks else f"group {description}"
    shapes = f"{entry['input_sizes']} to {entry['output_sizes']} of {', '.join(entry['output_dtypes'])}"
    return f"{entry['profiling_name']} {entry['collective_seq_id']} of {members}: {shapes}"


def waits_in(frame: FrameType | None) -> str:
    """The function in which the thread of this innermost frame waits for other ranks or for a GPU; else ""."""
    while frame is not None and (file := frame.f_code.co_filename).startswith((TORCH, "<")):
        if file.startswith(WAITING) and not file.startswith(RECOMPUTING):
            return frame.f_code.co_name
        frame = frame.f_back
    return ""


def look(thread: int, **known: Any) -> Standing:
    """The standing of the rank whose training runs in this thread."""
    frames = dict(sys._current_frames())
    stack = traceback.extract_stack(frames[thread])
    own = [frame for frame in stack if not frame.filename.startswith((TORCH, "<"))]
    busy = [what for frame in stack for file, what in BUSY.items() if frame.filename.endswith(file)]
    return Standing(
        host=socket.gethostname(),
        waits_in=waits_in(frames[thread]),
        at=f"{own[-1].filename}:{own[-1].lineno} ({own[-1].name})",
        busy=busy[-1] if busy else "",
        stack="".join(traceback.format_list(stack)),
        **known,
    )


def verdict(standings: Mapping[int, Standing], world_size: int) -> str:
    """One line that names the rank that is behind, by those that have answered; "" if one is busy, and all wait on."""
    if any(one.busy for one in standings.values()):
        return ""
    silent = [rank for rank in range(world_size) if rank not in standings]
    if silent:
        verb = "don't" if len(silent) > 1 else "doesn't"
        return f"{_ranks(silent)} {verb} answer: stopped, ended, or on a node that can't be reached"
    ranks = list(standings.values())
    behind = _those(ranks, min, lambda one: one.collectives)
    if behind:
        ahead = max(ranks, key=lambda one: one.collectives)
        return f"behind is {behind[0]}; others have begun {ahead.begun}{_more(behind)}"
    behind = [one for one in ranks if not one.waits_in]
    if behind and len(behind) < len(ranks):
        return f"behind is {behind[0]}; others wait{_more(behind)}"
    # As many collectives at a later step: one was left out on the way there.
    behind = _those(ranks, max, lambda one: one.step)
    if not behind:
        usual = Counter((one.waits_in, one.at) for one in ranks).most_common(1)[0][0]
        behind = [one for one in ranks if (one.waits_in, one.at) != usual]
    if behind:
        other = next(one for one in ranks if one not in behind)
        return f"ranks are in different collectives; one was left out: {behind[0]}; but {other}{_more(behind)}"
    return f"all ranks wait in the same collective, so that a link between them has stopped: {ranks[0]}"


def _those(ranks: list[Standing], pick: Callable[..., Any], key: Callable[[Standing], int]) -> list[Standing]:
    """The ranks with the least or greatest value; none if all have the same."""
    chosen = [one for one in ranks if key(one) == pick(map(key, ranks))]
    return [] if len(chosen) == len(ranks) else chosen


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {some(ranks)}"


def _more(behind: list[Standing]) -> str:
    return f"; so are {_ranks([one.rank for one in behind[1:]])}" if len(behind) > 1 else ""
