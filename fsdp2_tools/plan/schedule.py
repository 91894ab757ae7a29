"""The times of a step's operators: the order in which FSDP2 issued them, replayed on its streams.

The operators and their order are those of the real step (see execute.py), prefetching, resharding, recomputation and
accumulation included. A clock for the CPU, which issues one after the other, and one for each stream give the times:

1. The computation waits for the CPU to have issued it, and for the computation before.
2. An all-gather has three parts. The copy into its buffer runs on a stream of its own, the exchange on a second one
   after it, the copy out of the buffer in the stream of the computation after that.
3. A buffer is used again. In forward the all-gather streams wait, before the next group is gathered, for the copy-out
   of the group before the last one; in backward for the last copy-out. At the start of a forward they wait for the
   computation, which may still update parameters.
4. A reduce-scatter waits for the computation to have filled its buffer; the computation fills the next one when the
   reduce-scatter before is done, and waits for all of them at the end of backward. An all-reduce between replicas
   follows the reduce-scatter on a stream of its own.
5. The computation waits for an exchange between parts of a layer or of a sequence where it is issued.
6. Exchanges of the same ranks run one after another, in the order in which they were issued.
7. Ranks on CPUs have one clock: the CPU computes, and gloo's exchanges are waited for where they are issued.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _fsdp_collectives.py and _fsdp_state.py of torch 2.15;
the last rule is NCCL's, of operations on one communicator.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from fsdp2_tools.plan.speed import Speed
from fsdp2_tools.plan.work import COMPUTE, COPY_IN, COPY_OUT, REDUCE_IN, Work

FORWARD, BACKWARD = "forward", "backward"
AWAITED = ", awaited"  # after the role of an exchange

Price = Callable[[Work], float]  # seconds of an operator or a collective


@dataclass(slots=True)
class Event:
    """One exchange's part, or operators of the computation in a row.

    Attributes:
        block: the number of the block that was computed when it was issued, counted from the first; None before one.
        issue: seconds of the CPU.
        seconds: of the GPU.
        lead: seconds from the start of the CPU's issuing to the end of the GPU's computing, on a GPU that isn't busy.
    """

    role: str
    phase: int
    block: int | None
    issue: float
    seconds: float
    lead: float
    bytes: int
    ranks: tuple[int, int]
    module: str


@dataclass
class Group:
    """The average waits of a step's parts: one direction of the groups of one size.

    Attributes:
        exchange: all-gather, reduce-scatter or all-reduce.
        milliseconds: that one takes on its links.
        compute: milliseconds that its group computes meanwhile: in that phase, until the next group's turn.
        exposed: milliseconds that the computation waits for it.
    """

    name: str
    phase: str
    exchange: str
    count: int = 0
    milliseconds: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0


@dataclass
class Replay:
    """Times in seconds. `exposed` is what the computation waited for exchanges, `idle` for the CPU.

    `spans` are what ran when: row, name, phase, begin and end; operators of the computation in a row are one.
    """

    seconds: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0
    idle: float = 0.0
    groups: dict[tuple[str, str, str], Group] = field(default_factory=dict)
    spans: list[tuple[str, str, str, float, float]] = field(default_factory=list)


def events(
    done: Sequence[Work], phases: Sequence[str], block_of: Callable[[str], int | None], price: Price, speed: Speed
) -> list[Event]:
    """Operators with their times, those of the computation in a row as one event, cut where a block begins."""
    found: list[Event] = []
    block, phase = None, -1
    for work in done:
        if work.phase != phase:
            phase, block = work.phase, None
        at = block_of(work.module)
        block = block if at is None else at
        seconds = price(work)
        last = found[-1] if found else None
        role = f"{work.role}{AWAITED}" if work.awaited else work.role
        if role == "all-reduce" and not (
            phases[phase] == BACKWARD and last is not None and last.role == "reduce-scatter"
        ):
            role = COMPUTE  # of the norm or of losses, which the computation waits for
        issue = speed.operator if role == COMPUTE else speed.exchange
        if speed.on_cpu:
            seconds, issue = seconds + issue, 0.0
            role = COMPUTE if role == COPY_IN else role
        if role == COMPUTE and last is not None and (last.role, last.phase, last.block) == (COMPUTE, phase, block):
            last.lead = max(last.lead + seconds, last.issue + issue + seconds)
            last.issue += issue
            last.seconds += seconds
        else:
            found.append(
                Event(role, phase, block, issue, seconds, issue + seconds, work.bytes, work.ranks, work.module)
            )
    return found


def deepened(found: Sequence[Event], phases: Sequence[str], first: int, size: int, times: int) -> list[Event]:
    """The events with `size` blocks from number `first` on repeated so many times more, in forward and backward.

    The next block's first event ends a block: what lies between two blocks belongs to the earlier one in time.
    """
    result: list[Event] = []
    for phase, events_of_it in groupby(found, lambda event: event.phase):
        part = list(events_of_it)
        there = [i for i, event in enumerate(part) if event.block is not None and first <= event.block < first + size]
        if phases[phase] in (FORWARD, BACKWARD) and there:
            start, stop = there[0], there[-1] + 1
            part = [*part[:stop], *(part[start:stop] * times), *part[stop:]]
        result += part
    return result


def replay(
    found: Sequence[Event], phases: Sequence[str], name_of: Callable[[Event], str], *, on_cpu: bool = False
) -> Replay:
    """Run the clocks over the events of a step.

    Args:
        name_of: what to call the group whose exchange an event is: a copy-out in forward, or a reduce-scatter.
        on_cpu: each exchange is waited for where it is issued.
    """
    clocks = _Clocks(phases, name_of, on_cpu=on_cpu)
    for event in found:
        clocks.run(event)
    return clocks.stopped()


class _Clocks:
    """The seconds at which the CPU, the computation and each kind of exchange are done with what was run so far."""

    def __init__(self, phases: Sequence[str], name_of: Callable[[Event], str], *, on_cpu: bool) -> None:
        self._phases, self._name_of, self._on_cpu = phases, name_of, on_cpu
        self._done, self._phase = Replay(), -1
        self._cpu = self._compute = self._copy_in = self._gather = self._reduce = self._all_reduce = 0.0
        self._links: dict[tuple[int, int], float] = defaultdict(float)
        self._gathering: deque[tuple[float, Event]] = deque()  # issued, and not yet copied out
        self._names: dict[int, str] = {}  # of groups, by bytes
        self._kept = 0.0  # the copy-out of forward that the all-gather streams don't wait for yet
        self._reducing: list[tuple[float, str]] = []  # that the computation hasn't waited for, and their groups
        # The last group that was gathered, and the last whose gradients are reduced: what is computed hides the next.
        self._hiding: dict[str, Group] = {}
        self._ways: dict[str, Callable[[Event], None]] = {
            COMPUTE: self._run_operators,
            COPY_IN: self._run_copy_in,
            "all-gather": self._run_all_gather,
            COPY_OUT: self._run_copy_out,
            REDUCE_IN: self._run_reduce_in,
            "reduce-scatter": self._run_reduce_scatter,
            "all-reduce": self._run_all_reduce,
        }

    def run(self, event: Event) -> None:
        """Run the next event of the step."""
        if event.phase != self._phase:
            self._end_phase()
            self._begin_phase(event.phase)
        self._cpu += event.issue
        is_other = event.role == COPY_OUT and not self._gathering
        (self._run_awaited if is_other else self._ways.get(event.role, self._run_awaited))(event)

    def stopped(self) -> Replay:
        """The times, after the last event."""
        self._end_phase()
        self._done.seconds = max(self._cpu, self._compute, self._reduce, self._all_reduce)
        return self._done

    def _begin_phase(self, phase: int) -> None:
        self._phase = phase
        if self._phases[phase] == FORWARD:
            self._gathers_wait(self._compute)
            self._kept = 0.0
        self._hiding.clear()

    def _end_phase(self) -> None:
        if self._phase >= 0 and self._phases[self._phase] == BACKWARD:
            self._wait_for_reduced()
            if self._all_reduce > self._compute:
                self._wait(self._all_reduce, "all-reduce", "all groups")

    def _run_operators(self, event: Event) -> None:
        busy = max(self._compute + event.seconds, self._cpu - event.issue + event.lead)
        self._done.idle += busy - self._compute - event.seconds
        self._compute = busy
        self._done.compute += event.seconds
        self._note(COMPUTE, self._name_of(event), busy, event.seconds)
        for group in self._hiding.values():
            group.compute += event.seconds * 1e3

    def _run_copy_in(self, event: Event) -> None:
        self._copy_in = max(self._copy_in, self._cpu) + event.seconds

    def _run_all_gather(self, event: Event) -> None:
        self._gather = self._on_link(event, self._gather, self._copy_in)
        self._gathering.append((self._gather, event))
        if self._on_cpu:
            self._wait(self._gather, "all-gather", self._name_of(event))

    def _run_copy_out(self, event: Event) -> None:
        end, brought = self._gathering.popleft()
        in_backward = self._phases[self._phase] == BACKWARD
        if not in_backward or brought.bytes not in self._names:
            self._names[brought.bytes] = self._name_of(event)
        name = self._names[brought.bytes]
        self._wait(end, "all-gather", name)
        self._hiding["all-gather"] = self._count(name, "all-gather", brought)
        self._note("all-gather", name, end, brought.seconds)
        self._compute += event.seconds
        self._done.compute += event.seconds
        self._gathers_wait(self._compute if in_backward else self._kept)
        self._kept = self._kept if in_backward else self._compute

    def _run_reduce_in(self, event: Event) -> None:
        self._wait_for_reduced()
        self._compute = max(self._compute, self._cpu) + event.seconds
        self._done.compute += event.seconds

    def _run_reduce_scatter(self, event: Event) -> None:
        self._reduce = self._on_link(event, self._reduce, self._compute)
        group = self._hiding["reduce-scatter"] = self._count(self._name_of(event), "reduce-scatter", event)
        self._reducing.append((self._reduce, group.name))
        self._note("reduce-scatter", group.name, self._reduce, event.seconds)
        if self._on_cpu:
            self._wait_for_reduced()

    def _run_all_reduce(self, event: Event) -> None:
        self._all_reduce = self._on_link(event, self._all_reduce, self._reduce)
        self._count("all groups", "all-reduce", event)
        self._note("all-reduce", self._name_of(event), self._all_reduce, event.seconds)
        if self._on_cpu:
            self._wait(self._all_reduce, "all-reduce", "all groups")

    def _run_awaited(self, event: Event) -> None:
        end = max(self._compute, self._cpu) + event.seconds  # on a communicator of its own, though of the same ranks
        exchange = event.role.removesuffix(AWAITED)
        of_layers = event.role.endswith(AWAITED) and exchange != "all-to-all"
        name = "parts of layers" if of_layers else self._name_of(event)
        self._count(name, exchange, event)
        self._wait(end, exchange, name)
        self._note(exchange, name, end, event.seconds)

    def _on_link(self, event: Event, *after: float) -> float:
        """The end of an exchange that begins after what it needs, and after the one before of the same ranks."""
        issued = self._compute if self._on_cpu else 0.0
        end = max(*after, self._cpu, self._links[event.ranks], issued) + event.seconds
        self._links[event.ranks] = end
        return end

    def _gathers_wait(self, until: float) -> None:
        self._copy_in, self._gather = max(self._copy_in, until), max(self._gather, until)

    def _wait(self, until: float, exchange: str, name: str) -> None:
        """Let the computation wait for an exchange of a group, beyond what it waits for the CPU."""
        ready = max(self._compute, self._cpu)
        waited = max(0.0, until - ready)
        self._done.idle += ready - self._compute
        self._done.exposed += waited
        self._compute = max(ready, until)
        self._group(name, exchange).exposed += waited * 1e3

    def _wait_for_reduced(self) -> None:
        for end, name in self._reducing:
            self._wait(end, "reduce-scatter", name)
        self._reducing.clear()

    def _group(self, name: str, exchange: str) -> Group:
        key = (name, self._phases[self._phase], exchange)
        return self._done.groups.setdefault(key, Group(*key))

    def _count(self, name: str, exchange: str, event: Event) -> Group:
        group = self._group(name, exchange)
        group.count += 1
        group.milliseconds += event.seconds * 1e3
        return group

    def _note(self, row: str, name: str, end: float, seconds: float) -> None:
        """Add what ran to the spans; operators in a row are one."""
        spans, phase = self._done.spans, self._phases[self._phase]
        last = spans[-1] if spans else None
        if row == COMPUTE and last and last[:3] == (row, name, phase) and end - seconds - last[4] < 1e-9:
            spans[-1] = (*last[:4], end)
        elif seconds:
            spans.append((row, name, phase, end - seconds, end))


def averaged(groups: Mapping[tuple[str, str, str], Group]) -> list[Group]:
    """Each group's times for one exchange, those with the most exposed in all first."""
    found = sorted(groups.values(), key=lambda group: -group.exposed)
    return [
        Group(g.name, g.phase, g.exchange, g.count, g.milliseconds / g.count, g.compute / g.count, g.exposed / g.count)
        for g in found
        if g.count
    ]
