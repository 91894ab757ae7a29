"""torch.profiler over the first steps of a run: a trace, and in it each allocation.

The schedule, and what is recorded, are those of the tutorials that this project implements. Torch's own
`export_memory_timeline` is deprecated; the trace, which is a documented format, has what it was made from.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function, schedule

from fsdp2.units import tell
from fsdp2_extra.allocations.ledger import Allocation, Phase, kind_of
from fsdp2_extra.allocations.timeline import Timeline

ACTIVE_STEPS = 6
BEFORE = "before"
CPU, CUDA = 0, 1  # the device types in a trace


class Profile(AbstractContextManager["Profile"]):
    """Profiles the first six steps, and writes `rank<r>_trace.json.gz` at its end; see https://ui.perfetto.dev.

    `write` takes a name and bytes for a file of the run.
    """

    def __init__(self, rank: int, device: torch.device, write: Callable[[str, bytes], Any]) -> None:
        self.rank, self.device, self.write = rank, device, write
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profiler = torch.profiler.profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=0, active=ACTIVE_STEPS, repeat=1),
            on_trace_ready=self._ready,
            record_shapes=True,
            profile_memory=True,
            with_stack=True,
        )
        self._annotation: Any = None
        self._text = b"{}"
        self.trace: dict[str, Any] = {}

    def phase(self, name: str, step: int) -> None:
        """A listener of Phases: the trace has each phase as an annotation `phase of step N`."""
        self._end_annotation()
        if name == "between":
            self._profiler.step()
        self._annotation = record_function(f"{name} of step {step}")
        self._annotation.__enter__()

    def __enter__(self) -> Profile:
        self._profiler.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._end_annotation()
        self._profiler.__exit__(kind, error, trace)
        # At the end, and not where a step waits for it: a trace has some 10 MB a step.
        self.trace = json.loads(self._text)
        if (why := without_kernels(self.trace, self.device)) is not None:
            tell(f"rank {self.rank}: {why}")
        self.write(f"rank{self.rank}_trace.json.gz", gzip.compress(self._text, mtime=0))

    def _end_annotation(self) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None

    def _ready(self, profiler: torch.profiler.profile) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            self._text = path.read_bytes()

    def timeline(self, facts: dict[str, Any]) -> Timeline:
        """The allocations in the trace. What was there before the first of them has no kind of its own."""
        return timeline_of(self.trace, CUDA if self.device.type == "cuda" else CPU, facts)


def without_kernels(trace: dict[str, Any], device: torch.device) -> str | None:
    """The line to print if a GPU's trace has nothing of the GPU: torch warns of it among others, if at all."""
    if device.type != "cuda" or any(event.get("cat") == "kernel" for event in trace.get("traceEvents", [])):
        return None
    return (
        "--profile: the trace has no GPU kernels, since CUPTI may not read them here (it needs root, or the driver's "
        "NVreg_RestrictProfilingToAdminUsers=0); what the CPU did and the allocations are in it"
    )


def timeline_of(trace: dict[str, Any], device: int, facts: dict[str, Any]) -> Timeline:
    """The allocations of a device in a Chrome trace of torch.profiler, as a Timeline. Times there are microseconds."""
    events = trace.get("traceEvents", [])
    memory = sorted(
        (e for e in events if e.get("name") == "[memory]" and e["args"].get("Device Type") == device),
        key=lambda e: e["ts"],
    )
    noted = [e for e in events if e.get("cat") == "user_annotation" and " of step " in e["name"]]
    start = min((e["ts"] for e in [*memory, *noted]), default=0.0)
    phases = [Phase("start", 0, 0.0)]
    for event in sorted(noted, key=lambda e: e["ts"]):
        name, _, step = event["name"].partition(" of step ")
        phases.append(Phase(name, int(step), (event["ts"] - start) / 1e6))
    allocations: list[Allocation] = []
    live: dict[int, Allocation] = {}
    before = 0  # bytes that are freed here and were allocated before
    phase = 0
    for event in memory:
        when, size, address = (event["ts"] - start) / 1e6, event["args"]["Bytes"], event["args"]["Addr"]
        while phase + 1 < len(phases) and phases[phase + 1].began <= when:
            phase += 1
        if size > 0:
            live[address] = Allocation(size, when, phase, "", "")
            allocations.append(live[address])
        elif address in live:
            live[address].died, live[address].last_phase = when, phase
            del live[address]
        else:
            allocations.append(Allocation(-size, 0.0, 0, "", "", BEFORE, died=when, last_phase=phase))
            before -= size
    # The allocator's own count says how much of what was there before has stayed.
    total = memory[0]["args"].get("Total Allocated", 0) - max(memory[0]["args"]["Bytes"], 0) if memory else 0
    allocations.append(Allocation(max(total - before, 0), 0.0, 0, "", "", BEFORE))
    for allocation in allocations:
        allocation.kind = allocation.kind or kind_of(allocation, phases)
    return Timeline(facts, allocations, phases, [])
