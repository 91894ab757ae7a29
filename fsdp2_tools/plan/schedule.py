"""When each operator of a step runs: the order in which FSDP2 issued them, replayed on its streams.

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

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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
    index = 0
    while index < len(found):
        phase = found[index].phase
        end = next((i for i in range(index, len(found)) if found[i].phase != phase), len(found))
        part = found[index:end]
        there = [i for i, event in enumerate(part) if event.block is not None and first <= event.block < first + size]
        if phases[phase] in (FORWARD, BACKWARD) and there:
            start, stop = there[0], there[-1] + 1
            part = [*part[:stop], *(list(part[start:stop]) * times), *part[stop:]]
        result += part
        index = end
    return result


def replay(
    found: Sequence[Event], phases: Sequence[str], name_of: Callable[[Event], str], *, on_cpu: bool = False
) -> Replay:
    """Run the clocks over the events of a step.

    Args:
        name_of: what to call the group whose exchange an event is: a copy-out in forward, or a reduce-scatter.
        on_cpu: each exchange is waited for where it is issued.
    """
    done = Replay()
    cpu = compute = copy_in = gather = reduce = all_reduce = 0.0
    links: dict[tuple[int, int], float] = defaultdict(float)
    gathers: list[tuple[float, Event]] = []  # issued, and not yet copied out
    names: dict[int, str] = {}  # of groups, by bytes
    kept = 0.0  # the copy-out of forward that the all-gather streams don't wait for yet
    reducing: list[tuple[float, str]] = []  # reduce-scatters that the computation hasn't waited for, and their groups
    gathered: Group | None = None  # the last group that was gathered,
    reduced: Group | None = None  # and the last whose gradients are reduced: what is computed now may hide the next
    phase = -1

    def group_of(name: str, exchange: str) -> Group:
        key = (name, phases[phase], exchange)
        return done.groups.setdefault(key, Group(*key))

    def counted(name: str, exchange: str, event: Event) -> Group:
        group = group_of(name, exchange)
        group.count += 1
        group.milliseconds += event.seconds * 1e3
        return group

    def ran(row: str, name: str, end: float, seconds: float) -> None:
        last = done.spans[-1] if done.spans else None
        if row == COMPUTE and last and last[:3] == (row, name, phases[phase]) and end - seconds - last[4] < 1e-9:
            done.spans[-1] = (*last[:4], end)
        elif seconds:
            done.spans.append((row, name, phases[phase], end - seconds, end))

    def wait(until: float, exchange: str, name: str) -> None:
        nonlocal compute
        ready = max(compute, cpu)
        waited = max(0.0, until - ready)
        done.idle += ready - compute
        done.exposed += waited
        compute = max(ready, until)
        group_of(name, exchange).exposed += waited * 1e3

    def wait_for_reduced() -> None:
        for end, name in reducing:
            wait(end, "reduce-scatter", name)
        reducing.clear()

    def end_backward() -> None:
        wait_for_reduced()
        if all_reduce > compute:
            wait(all_reduce, "all-reduce", "all groups")

    for event in found:
        if event.phase != phase:
            if phase >= 0 and phases[phase] == BACKWARD:
                end_backward()
            phase = event.phase
            if phases[phase] == FORWARD:
                copy_in, gather = max(copy_in, compute), max(gather, compute)
                kept = 0.0
            gathered = reduced = None
        cpu += event.issue
        if event.role == COMPUTE:
            start = cpu - event.issue
            busy = max(compute + event.seconds, start + event.lead)
            done.idle += busy - compute - event.seconds
            compute = busy
            done.compute += event.seconds
            ran(COMPUTE, name_of(event), compute, event.seconds)
            for one in (gathered, reduced):
                if one is not None:
                    one.compute += event.seconds * 1e3
        elif event.role == COPY_IN:
            copy_in = max(copy_in, cpu) + event.seconds
        elif event.role == "all-gather":
            gather = max(gather, copy_in, cpu, links[event.ranks], compute if on_cpu else 0.0) + event.seconds
            links[event.ranks] = gather
            gathers.append((gather, event))
            if on_cpu:
                wait(gather, "all-gather", name_of(event))
        elif event.role == COPY_OUT and gathers:
            end, brought = gathers.pop(0)
            if phases[phase] != BACKWARD or brought.bytes not in names:
                names[brought.bytes] = name_of(event)
            name = names[brought.bytes]
            wait(end, "all-gather", name)
            gathered = counted(name, "all-gather", brought)
            ran("all-gather", name, end, brought.seconds)
            compute += event.seconds
            done.compute += event.seconds
            if phases[phase] == BACKWARD:
                copy_in, gather = max(copy_in, compute), max(gather, compute)
            else:
                copy_in, gather, kept = max(copy_in, kept), max(gather, kept), compute
        elif event.role == REDUCE_IN:
            wait_for_reduced()
            compute = max(compute, cpu) + event.seconds
            done.compute += event.seconds
        elif event.role == "reduce-scatter":
            reduce = max(reduce, compute, cpu, links[event.ranks]) + event.seconds
            links[event.ranks] = reduce
            reduced = counted(name_of(event), "reduce-scatter", event)
            reducing.append((reduce, reduced.name))
            ran("reduce-scatter", reduced.name, reduce, event.seconds)
            if on_cpu:
                wait_for_reduced()
        elif event.role == "all-reduce":
            all_reduce = max(all_reduce, reduce, cpu, links[event.ranks], compute if on_cpu else 0.0) + event.seconds
            links[event.ranks] = all_reduce
            counted("all groups", "all-reduce", event)
            ran("all-reduce", name_of(event), all_reduce, event.seconds)
            if on_cpu:
                wait(all_reduce, "all-reduce", "all groups")
        else:
            end = max(compute, cpu) + event.seconds  # on a communicator of its own, though of ranks that may shard too
            exchange = event.role.removesuffix(AWAITED)
            name = "parts of layers" if event.role.endswith(AWAITED) and exchange != "all-to-all" else name_of(event)
            counted(name, exchange, event)
            wait(end, exchange, name)
            ran(exchange, name, end, event.seconds)
    if phase >= 0 and phases[phase] == BACKWARD:
        end_backward()
    done.seconds = max(cpu, compute, reduce, all_reduce)
    return done


def averaged(groups: Mapping[tuple[str, str, str], Group]) -> list[Group]:
    """Each group's times for one exchange, those with the most exposed in all first."""
    found = sorted(groups.values(), key=lambda group: -group.exposed)
    return [
        Group(g.name, g.phase, g.exchange, g.count, g.milliseconds / g.count, g.compute / g.count, g.exposed / g.count)
        for g in found
        if g.count
    ]
