"""What the GPU lane needs beside torch, from wheels that `make gpu-bundle` has gathered, without pip or a network."""

from __future__ import annotations

import os
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
WHEELS, SITE = ROOT / "build" / "wheels", ROOT / "build" / "site"

# Module -> its wheel.
NEEDED = {
    "blake3": "blake3",
    "tqdm": "tqdm",
    "numpy": "numpy",
    "torchvision": "torchvision",
    "torchao": "torchao",
    "PIL": "pillow",
    "fsspec": "fsspec",
    "pytest": "pytest",
    "pluggy": "pluggy",
    "iniconfig": "iniconfig",
    "packaging": "packaging",
    "pygments": "pygments",
}


def environment() -> dict[str, str]:
    """The environment of a Python that finds this repository and all that it needs.

    Unpacks a wheel only for a module that is missing here, so that it never hides one that belongs to this torch.
    Exits with one line if a wheel is missing, too.
    """
    sys.path.insert(1, str(SITE))
    for module, name in NEEDED.items():
        if find_spec(module) is not None:
            continue
        found = sorted(path for path in WHEELS.glob("*.whl") if path.name.partition("-")[0].lower() == name)
        if not found:
            sys.exit(
                f"{sys.executable} has no {module}, and there is no {WHEELS}/{name}-*.whl: run make gpu-bundle first"
            )
        with zipfile.ZipFile(found[-1]) as wheel:
            wheel.extractall(SITE)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SITE), os.environ.get("PYTHONPATH", "")])}
