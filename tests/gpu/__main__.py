"""The GPU lane with any Python that has torch:  python3 -m tests.gpu [arguments of pytest]"""

from __future__ import annotations

import os
import sys

from tests.gpu.wheels import ROOT, environment

if __name__ == "__main__":
    os.chdir(ROOT)
    # The project's own options need plugins of pytest, which a borrowed machine may lack.
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-rs", "-p", "no:cacheprovider", "tests/gpu"]
    device = {"FSDP2_TEST_DEVICE": os.environ.get("FSDP2_TEST_DEVICE", "cuda")}
    os.execve(sys.executable, [*command, *sys.argv[1:]], {**environment(), **device})
