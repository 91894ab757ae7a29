"""All pages of docs/ that have a GPU's figures:  python3 benchmarks/gpu.py

With any Python that has torch, also one without our environment (docs/notes/gpu.md). Each part ends by itself within 8
minutes and rewrites its page after each row or round, so that an interruption leaves what was measured until then.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.gpu.wheels import environment  # noqa: E402

SECONDS = 8 * 60
# Of a part's time: to build its sides, and to finish the round or row in which its time is up.
START, LAST = 30, 90

PARTS = {
    "memory": ("benchmarks/memory.py", ["--flags=--model-size=base --batch-size=256"]),
    "steps": ("benchmarks/steps.py", ["--flags=--model-size=base --batch-size=256", "--rounds=30"]),
    "checkpoint": ("benchmarks/checkpoint.py", ["--rounds=5"]),
}
QUICK = {
    "memory": ["--flags=--model-size=tiny --batch-size=8"],
    "steps": ["--flags=--model-size=tiny --batch-size=8", "--rounds=2", "--steps=2"],
    "checkpoint": ["--rounds=1", "--parameters=5000000"],
}


def run(name: str, ranks: int, given: argparse.Namespace) -> bool:
    """One part in processes of its own, ended by SIGTERM when its time is up; whether it ended by itself and well."""
    script, arguments = PARTS[name]
    page = given.out / f"{name if name != 'steps' else 'step'}-benchmark-gpu.md"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", script]
    command += [*(QUICK[name] if given.quick else arguments), f"--page={page}", f"--device={given.device}"]
    command += [f"--dir={given.dir}"] if name == "checkpoint" else []
    command += [f"--seconds={given.seconds - START - LAST}"]
    print(f"--- {name}: {' '.join(command[3:])}", flush=True)
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment())
    try:
        status = process.wait(given.seconds)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks
            process.wait()
    ended = "time is up" if status is None else f"exit status {status}"
    left = f"{page} is there" if page.is_file() else "it has left no page"
    print(f"--- {name}: {ended} after {time.monotonic() - began:.0f} s; {left}", flush=True)
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--parts", default=",".join(PARTS), help="(default: all)")
    parser.add_argument("--nproc", type=int, help="ranks (default: one for each GPU)")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of each part at most (default: 480)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "notes", help="where the pages go")
    parser.add_argument("--dir", type=Path, default=ROOT, help="where saves are measured, a disk (default: here)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny models, to try it")
    given = parser.parse_args()
    given.out = given.out.absolute()
    unknown = set(given.parts.split(",")) - set(PARTS)
    if unknown or given.seconds <= START + LAST:
        parser.error(f"--parts are of {', '.join(PARTS)}; --seconds is more than {START + LAST}")
    ranks = given.nproc or int(subprocess.check_output([sys.executable, "-c", COUNT], text=True))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `run` ends what it has started
    results = [run(name, ranks, given) for name in given.parts.split(",")]
    return 0 if all(results) else 1


COUNT = "import torch; print(max(1, torch.cuda.device_count()))"

if __name__ == "__main__":
    sys.exit(main())
