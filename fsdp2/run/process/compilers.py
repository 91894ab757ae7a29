"""The programs with which torch.compile builds kernels: without them a run fails at its first step."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from fsdp2.options.errors import ConfigError

DROP = "or drop --compile"


def check_compiler(device_type: str) -> None:
    """Raise ConfigError if what `--compile` needs for kernels of a device isn't installed.

    On a CPU that is a C++ compiler; on a GPU Triton, which builds a module of its own with a C compiler and Python's
    headers.
    Sources: torch/_inductor/config.py (cpp.cxx), torch/_inductor/scheduler.py (TritonMissing), triton/runtime/build.py
    """
    if device_type != "cuda":
        if not _found("CXX", "clang++" if sys.platform == "darwin" else "g++"):
            raise ConfigError(f"--compile: torch needs a C++ compiler on the CPU; install g++ or set CXX, {DROP}")
        return
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(f"--compile: torch compiles for GPUs with triton, which isn't installed; install it, {DROP}")
    if not _found("CC", "gcc", "clang"):
        raise ConfigError(f"--compile: triton needs a C compiler on a GPU, too; install gcc or set CC, {DROP}")
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        raise ConfigError(
            f"--compile: triton needs Python's headers on a GPU, and {headers} has no Python.h; install them (Debian: "
            f"python{sys.version_info.major}.{sys.version_info.minor}-dev), {DROP}"
        )


def _found(variable: str, *names: str) -> bool:
    """True if the program that a variable of the environment names is there; without the variable, one of some."""
    wanted = os.environ.get(variable)
    programs = names if wanted is None else shlex.split(wanted)[:1]  # a variable may hold flags, too
    return any(shutil.which(program) for program in programs)
