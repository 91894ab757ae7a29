"""Pages with a GPU's figures:  python3 benchmarks/gpu.py --out results

With any Python that has torch, also one without our environment (docs/notes/gpu.md). It ends by itself. Each part has
its share of the time and rewrites its page after each row or round, so that an interruption leaves what was measured
until then.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.gpu import deadline  # noqa: E402
from tests.gpu.wheels import environment  # noqa: E402

# Of a part's time: to build its sides, and to finish the round or row in which its time is up.
START, LAST = 30, 90
ENDING = 10  # seconds of the whole, for stacks to be printed

PREFETCH = "--sides=explicit-prefetching"
PARTS = {
    "steps": ("benchmarks/steps.py", ["--flags=--model-size=base --batch-size=256", "--rounds=30"]),
    "checkpoint": ("benchmarks/checkpoint.py", ["--rounds=5"]),
    "prefetch": ("benchmarks/steps.py", ["--flags=--model-size=base --batch-size=64", PREFETCH, "--rounds=30"]),
    "calibration": ("benchmarks/calibrate.py", []),
}
QUICK = {
    "steps": ["--flags=--model-size=tiny --batch-size=8", "--rounds=2", "--steps=2"],
    "checkpoint": ["--rounds=1", "--parameters=5000000"],
    "prefetch": ["--flags=--model-size=tiny --batch-size=8", PREFETCH, "--rounds=2", "--steps=2"],
    "calibration": [],
}


def run(name: str, ranks: int, seconds: float, given: argparse.Namespace) -> bool:
    """One part in processes of its own, which print their stacks when its time is up; True if it ended well."""
    script, arguments = PARTS[name]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=given.dir, prefix="gpu-benchmark-") as saves:
        if name == "calibration":
            page = given.out / "records-planned.md"
            if not (given.out / "records.json").is_file():
                print(f"--- {name}: {given.out} has no records.json; benchmarks/records.py makes it", flush=True)
                return False
            command = [sys.executable, script, str(given.out)]
        else:
            page = given.out / f"{name if name != 'steps' else 'step'}-benchmark-gpu.md"
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            command = [sys.executable, *launcher, script]
            command += [*(QUICK[name] if given.quick else arguments), f"--page={page}", f"--device={given.device}"]
            command += [f"--dir={saves}"] if name == "checkpoint" else []
            command += [f"--seconds={max(1, seconds - START - LAST):.0f}"]
        print(f"--- {name}: {' '.join(command[1:])}", flush=True)
        status = deadline.run(command, seconds, log=given.out / "gpu.log", environment=environment(), cwd=ROOT)
    ended = "time is up" if status is None else f"exit status {status}"
    left = f"{page} is there" if page.is_file() else "it has left no page"
    print(f"--- {name}: {ended} after {time.monotonic() - began:.0f} s; {left}", flush=True)
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--parts", default="steps,checkpoint", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--nproc", type=int, help="ranks (default: one for each GPU)")
    parser.add_argument("--seconds", type=float, default=deadline.SECONDS, help="when it ends (default: 530)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "notes", help="where the pages go")
    parser.add_argument("--dir", type=Path, default=ROOT, help="where saves are measured, a disk (default: here)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny models, to try it")
    parser.add_argument("--dry-run", action="store_true", help="print the parts and end")
    given = parser.parse_args()
    until = deadline.Deadline(given.seconds - ENDING)
    given.out = given.out.absolute()
    names = given.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"--parts {','.join(sorted(unknown))}: give some of {', '.join(PARTS)}")
    if given.dry_run:
        print("\n".join(names))
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    count = [sys.executable, "-c", COUNT]
    ranks = given.nproc or int(subprocess.check_output(count, text=True, env=environment()))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `run` ends what it has started
    if ranks == 1 and "prefetch" in names:
        names.remove("prefetch")
        print("--- prefetch: one rank gathers nothing ahead; it is measured where there are more", flush=True)
    # A part that ends early leaves its time to the others.
    results = [run(name, ranks, until.left() / (len(names) - at), given) for at, name in enumerate(names)]
    return 0 if all(results) else 1


COUNT = "import torch; print(max(1, torch.cuda.device_count()))"

if __name__ == "__main__":
    sys.exit(main())
