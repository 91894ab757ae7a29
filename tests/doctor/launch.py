"""Start the doctor as a launcher does: one process a rank, with the variables that tell it its place.

With `--doctor` among the flags it is the training that starts, and its examination.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.harness import python_environment

# `stopped`: a rank has met the others and answers no more. `late`: it never comes to the collectives.
# `held`: it connects and does no more, and groups wait as nccl's do, so that no thread comes back from a collective.
# `frozen all_reduce`: it comes, and each all-reduce hangs on it alone, as where its network does.
# `quota`: it comes into a cgroup, and not before it has imported torch.
# `pairs`: nothing is wrong, and the rows are the bytes/s of each pair's link; at last the outermost pair's, alone.
RANK = """
import os, signal, sys, time
import torch
from fsdp2 import config, train
from fsdp2_tools.doctor import __main__ as doctor, collectives, examine
from fsdp2.run.process import ending, runtime
fault, at = sys.argv.pop(1), sys.argv.pop(1)
if fault == "stopped" and at == os.environ["RANK"]:
    examine.QUESTIONS["machine"] = lambda here: os.kill(os.getpid(), signal.SIGSTOP)
if fault == "held":
    here = examine.Here(None, torch.device("cuda"), None, 0)
    forever = collectives.patience(here)
    collectives.patience, collectives.no_parts = lambda here: forever, lambda device: "here"
    if at == os.environ["RANK"]:
        connect = torch.distributed.init_process_group
        def connect_and_stop(*arguments, **options):
            connect(*arguments, **options)
            time.sleep(3600 * (options["world_size"] > 1))
        torch.distributed.init_process_group = connect_and_stop
if fault == "late" and at == os.environ["RANK"]:
    examine.QUESTIONS["collectives"] = lambda here, **arguments: time.sleep(3600)
if fault.startswith("frozen ") and at == os.environ["RANK"]:
    setattr(torch.distributed, fault.removeprefix("frozen "), lambda *tensors, **options: time.sleep(3600))
if fault == "pairs":
    def pairs(asker, options):
        hosts = examine.Hosts({rank: tuple(one) for rank, one in asker.ask("hello").items()})
        found, alone = examine.network.ask_pairs(asker, hosts, 1 << 20), {}
        last = asker.here.world.world_size - 1
        answers = asker.ask("meet", pairs=[[0, last]], size=1 << 20, number=1000)
        examine.network._collect(alone, answers, hosts)
        rows = [*found.items(), *alone.items()]
        return [examine.Row(f"{a} {b}", str(one["link"]), "") for (a, b), one in rows]
    examine.examine = pairs
if fault.startswith("quota ") and at == os.environ["RANK"]:
    machine = examine.QUESTIONS["machine"]
    def in_group(here):
        with open(f"{fault.removeprefix('quota ')}/cgroup.procs", "w") as group:
            group.write(str(os.getpid()))
        return machine(here)
    examine.QUESTIONS["machine"] = in_group
with ending.exit_status():
    if "--doctor" in sys.argv:
        train.main(config.parse(sys.argv[1:]))
    examine.leave(doctor.main())
"""


def start(
    flags: Sequence[str],
    *,
    ranks: int,
    cwd: Path,
    fault: str = "none",
    at: int = 0,
    around: Sequence[Sequence[str]] = (),
    **variables: str,
) -> list[subprocess.Popen[str]]:
    """The processes of all ranks, rank 0 first; the output of each is one text.

    Args:
        around: what goes before each rank's command, where each has a host of its own, the first of which is h0.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = []
    for rank in range(ranks):
        local = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "h0"} if around else {}
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        place |= {"MASTER_ADDR": "localhost", "PYTHONPATH": Path(__file__).parents[2], **local, **variables}
        environment = python_environment() | {name: str(value) for name, value in place.items()}
        line = [*(around[rank] if around else ()), sys.executable, "-c", RANK, fault, str(at), "--threads=1", *flags]
        out = subprocess.PIPE
        found.append(subprocess.Popen(line, cwd=cwd, env=environment, text=True, stdout=out, stderr=subprocess.STDOUT))
    return found
