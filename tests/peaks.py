"""The most memory that commands take, each beyond what there was before it, in a process of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.harness import python_environment

# Calls a function of the program, `command`.
PEAK_OF = """
import os, sys, threading, torch

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

def peak_of(*line):
    before, peak, done = anonymous(), 0, threading.Event()
    def watch():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous())
    thread = threading.Thread(target=watch)
    thread.start()
    command(*line)
    done.set()
    thread.join()
    print("peak", peak - before, *line)

os.chdir(sys.argv[1])
"""


def peaks_of(program: str, folder: Path) -> tuple[str, list[tuple[int, str]]]:
    """What a program prints that calls `peak_of` in a folder, which is removed; the bytes and line of each peak."""
    line = [sys.executable, "-c", PEAK_OF + program, str(folder)]
    done = subprocess.run(line, capture_output=True, text=True, env=python_environment(), timeout=240)
    shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    peaks = [line.split(" ", 2)[1:] for line in done.stdout.splitlines() if line.startswith("peak ")]
    return done.stdout, [(int(size), command) for size, command in peaks]
