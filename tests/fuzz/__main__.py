"""Fuzz for long:  python -m tests.fuzz [--minutes 60] [pytest's arguments]

Runs the folder's tests in rounds, each with a seed of its own, until the time is over or a test fails. The seed of a
failed round repeats it.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

TIMES = 10  # of the suite's examples in a round


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz until the time is over.")
    parser.add_argument("--minutes", type=float, default=60)
    options, further = parser.parse_known_args()
    end = time.monotonic() + options.minutes * 60
    rounds = examples = 0
    while rounds == 0 or time.monotonic() < end:
        seed = random.randrange(2**32)
        command = [sys.executable, "-m", "pytest", str(Path(__file__).parent), "-q", "-x", "--timeout=0"]
        command += [f"--hypothesis-seed={seed}", "--hypothesis-show-statistics", *further]
        done = subprocess.run(command, env={**os.environ, "FUZZ_TIMES": str(TIMES)}, capture_output=True, text=True)
        rounds += 1
        examples += sum(map(int, re.findall(r"(\d+) passing", done.stdout)))
        if done.returncode != 0:
            print(done.stdout + done.stderr)
            print(f"failed in round {rounds}, after {examples:,} examples: FUZZ_TIMES={TIMES} {' '.join(command)}")
            return 1
        print(f"round {rounds}, seed {seed}: {examples:,} examples have ended well", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
