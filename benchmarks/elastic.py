"""Cost of losing a node under torchrun and under Ray, and of its return: seconds by phase.

    python benchmarks/elastic.py --rounds 3          # fifteen minutes; writes the table of docs/elastic.md

Two torchruns on this machine are the nodes, or a cluster of Ray's with two nodes. A phase ends when a process ends or
starts, or when the run writes a line to metrics.jsonl, which is looked at every 20 ms.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tables import machine, spread, write_within

from fsdp2.options.parser import Parser
from fsdp2_tools.compare.report import markdown_table
from launchers import ray_train
from tests.harness import python_environment
from tests.launchers.through_ray import workers_of_ray
from tests.launchers.two_nodes import OWN_MEMORY, SOON, Nodes

PAGE = Path(__file__).parent.parent / "docs" / "elastic.md"
EVERY = 10
FLAGS = ["--model-size=seed", "--device=cpu", "--threads=1", "--global-batch-size=32", "--epochs=100000"]
PHASES = ("detect and stop", "rendezvous", "load", "first step")
PATIENCE = 300.0
RESIZE = 5  # seconds between two looks of Ray's for a node that has come


@dataclass
class Seen:
    """The cost of a restart."""

    seconds: list[float]  # of each phase
    repeated: int  # steps


class Watch:
    """The ranks of a run and its metrics, from the moment in which something happens to it."""

    def __init__(self, run: Path, ranks: Callable[[], set[int]]) -> None:
        self.run, self.ranks = run, ranks

    def records(self, *kinds: str) -> list[dict[str, Any]]:
        file = self.run / "metrics.jsonl"
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        found = [json.loads(line) for line in lines if line.endswith(b"}\n")]
        return [record for record in found if record["kind"] in kinds]

    def step(self) -> int:
        return max((record["step"] for record in self.records("train")), default=0)

    def until(self, what: str, condition: Callable[[], Any]) -> float:
        deadline = time.time() + PATIENCE
        while not condition():
            if time.time() > deadline:
                logs = [file.read_text()[-2000:] for file in self.run.parent.glob("*log") if file.is_file()]
                raise TimeoutError("\n".join([f"no {what} within {PATIENCE:.0f} s", *logs]))
            time.sleep(0.02)
        return time.time()

    def through(self, happens: Callable[[], Any]) -> Seen:
        """Let it happen; the phases until the first step after it."""
        old, before, reached = self.ranks(), len(self.records("start", "resume")), self.step()
        times = [time.time()]
        happens()
        last = reached

        def stopped() -> bool:
            nonlocal last
            last = max(last, self.step())
            return not self.ranks() & old

        times.append(self.until("the end of the ranks", stopped))
        times.append(self.until("new ranks", self.ranks))
        times.append(self.until("a resume", lambda: len(self.records("start", "resume")) > before))
        begun = self.records("start", "resume")[-1]["step"]
        times.append(self.until("a step", lambda: self.step() > begun))
        return Seen([b - a for a, b in pairwise(times)], last - begun)


def ranks_of(nodes: Nodes) -> set[int]:
    found = {pid for process in nodes.running.values() for pid in process.alive()}
    return {pid for pid in found if re.match(rb"[^\0]*python[^\0]*\0-u\0-m\0fsdp2\.train", command_of(pid))}


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def under_torchrun(folder: Path, configuration: str) -> dict[str, Seen]:
    run, flags = folder / "run", [*FLAGS, f"--checkpoint-every={EVERY}", f"--run-dir={folder / 'run'}"]
    with Nodes(folder, configuration=configuration) as nodes:
        watch = Watch(run, lambda: ranks_of(nodes))
        for node in (0, 1):
            nodes.start(node, flags)
        watch.until("step 15", lambda: watch.step() >= 15)
        lost = watch.through(lambda: nodes.lose(1))
        reached = watch.step()
        watch.until("five steps", lambda: watch.step() >= reached + 5)
        back = watch.through(lambda: nodes.start(1, flags))
        nodes.stop()
    return {"lost": lost, "back": back}


def from_memory(folder: Path) -> Seen:
    """Two nodes of two ranks, a replica each; another node takes the place of the one that is lost."""
    run = folder / "run"
    flags = [*FLAGS, "--checkpoint-every=100000", "--memory-checkpoint", "--replicas=2", f"--run-dir={run}"]
    with Nodes(folder, nnodes="2", per_node=2, around=OWN_MEMORY) as nodes:
        watch = Watch(run, lambda: ranks_of(nodes))
        for node in (0, 1):
            nodes.start(node, flags)
        watch.until("step 15", lambda: watch.step() >= 15)

        def replace() -> None:
            nodes.lose(1)
            nodes.start(1, flags)

        seen = watch.through(replace)
        nodes.stop()
    return seen


def under_ray(folder: Path) -> dict[str, Seen]:
    ray_train.prepare()  # before Ray is imported: the launcher's process and the cluster must agree
    from ray.cluster_utils import Cluster

    run, log = folder / "run", folder / "ray.log"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    elastic = ["--num-workers=1:2", f"--resize-every={RESIZE}", "--max-failures=3", f"--address={cluster.address}"]
    flags = [*FLAGS, f"--checkpoint-every={EVERY}", f"--run-dir={run}", *elastic]
    with open(log, "w") as output:
        program = subprocess.Popen(
            [sys.executable, "-m", "launchers.ray_train", *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=python_environment(),
        )
    try:
        watch = Watch(run, lambda: set(workers_of_ray()))
        watch.until("step 15", lambda: watch.step() >= 15)
        lost = watch.through(lambda: cluster.remove_node(node, allow_graceful=False))
        reached = watch.step()
        watch.until("five steps", lambda: watch.step() >= reached + 5)
        back = watch.through(lambda: cluster.add_node(num_cpus=1))
        program.send_signal(signal.SIGINT)
        program.wait(timeout=PATIENCE)
    finally:
        program.kill()
        program.wait()
        cluster.shutdown()
    return {"lost": lost, "back": back}


def main() -> None:
    parser = Parser(prog="benchmarks/elastic.py", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    load, found = os.getloadavg()[0], dict[str, list[Seen]]()
    for number in range(arguments.rounds):
        for name, measure in (
            ("torchrun as it is", lambda folder: under_torchrun(folder, "")),
            ("torchrun", lambda folder: under_torchrun(folder, SOON)),
            ("torchrun, from memory", lambda folder: {"replaced": from_memory(folder)}),
            ("Ray", under_ray),
        ):
            with tempfile.TemporaryDirectory() as folder:
                for what, seen in measure(Path(folder)).items():
                    found.setdefault(f"{name}: {what}", []).append(seen)
                    print(number + 1, name, what, [round(one, 1) for one in seen.seconds], seen.repeated, flush=True)
    write_within(arguments.page, table(found, load))


WORDS = {
    "torchrun as it is: lost": "torchrun with its own settings: a node is lost",
    "torchrun as it is: back": "the same: it comes back",
    "torchrun: lost": "torchrun with the settings above: a node is lost",
    "torchrun: back": "the same: it comes back",
    "torchrun, from memory: replaced": "torchrun, `--memory-checkpoint`: another node takes a lost one's place",
    "Ray: lost": f"Ray, `--resize-every {RESIZE}`: a node is lost",
    "Ray: back": "the same: it comes back",
}


def table(found: dict[str, list[Seen]], load: float) -> str:
    rows = []
    for name, words in WORDS.items():
        phases = [spread([seen.seconds[i] for seen in found[name]], 1) for i in range(len(PHASES))]
        repeated = sorted({seen.repeated for seen in found[name]})
        steps = "–".join(str(one) for one in dict.fromkeys((repeated[0], repeated[-1])))
        rows.append((words, *phases, spread([sum(seen.seconds) for seen in found[name]], 1), steps))
    rounds = max(map(len, found.values()))
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    return f"""{markdown_table(("", *PHASES, "seconds in all", "steps again"), rows)}

Seconds, median of {rounds} with least and most. Written by `benchmarks/elastic.py` on {time.strftime("%Y-%m-%d")}:
{machine()}, with a load of {load:.1f} from other programs in the minute before; {versions}. The ViT of size `seed`,
`--global-batch-size 32`, `--checkpoint-every {EVERY}`; with `--memory-checkpoint` nothing is on the disk."""


if __name__ == "__main__":
    main()
