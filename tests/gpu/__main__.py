"""The GPU lane with any Python that has torch:  python3 -m tests.gpu [arguments of pytest]

With --out it ends by itself, writes junit.xml and suite.log as it goes, and the same command again goes on where it
left off (docs/notes/gpu.md).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from tests.gpu import deadline
from tests.gpu.wheels import ROOT, environment

# Of the time: to print stacks and end, where a test is stuck.
LAST = 15.0
CRASHES = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.gpu", description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="folder of junit.xml and suite.log (unset: plain pytest)")
    parser.add_argument("--seconds", type=float, default=deadline.SECONDS, help="with --out (default: 530)")
    parser.add_argument("--slice", default="", help="with --out, some of tests/gpu/junit.py's, separated by commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="(default: FSDP2_TEST_DEVICE, else cuda)")
    parser.add_argument("--quick", action="store_true", help="with --out, the first test of each slice, to try it")
    given, arguments = parser.parse_known_args()
    os.chdir(ROOT)
    # The project's own options need plugins of pytest, which a borrowed machine may lack.
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-rs", "-p", "no:cacheprovider", "tests/gpu"]
    command.append("--ignore=tests/gpu/fake")  # that is for machines without a GPU
    device = given.device or os.environ.get("FSDP2_TEST_DEVICE", "cuda")
    variables = {**environment(), "FSDP2_TEST_DEVICE": device}
    if given.out is None:
        os.execve(sys.executable, [*command, *arguments], variables)
    return in_time(given, [*command, *arguments], variables)


def in_time(given: argparse.Namespace, command: list[str], variables: dict[str, str]) -> int:
    """pytest in a process of its own, again if that ended in a test; its last exit status, 2 when the time was up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `run` ends what it has started
    until = deadline.Deadline(given.seconds - LAST)
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    variables |= {
        "FSDP2_JUNIT": str(out / "junit.xml"),
        "FSDP2_UNTIL": str(time.time() + until.left()),
        "FSDP2_SLICE": given.slice,
        "FSDP2_QUICK": "1" if given.quick else "",
    }
    # What ranks print goes into the log as it comes, stacks above all: so no files in the place of their outputs.
    command = [*command, "-v", "--capture=sys", "-p", "tests.gpu.junit"]
    status: int | None = None
    for _ in range(CRASHES):
        status = deadline.run(command, until.left(), log=out / "suite.log", environment=variables)
        if status is None or status >= 0:
            break
        print(f"--- pytest ended by signal {-status}; what is left is run", flush=True)
    print(f"--- {out / 'junit.xml'} says what ran; the same command goes on", flush=True)
    return 2 if status is None else status


if __name__ == "__main__":
    sys.exit(main())
