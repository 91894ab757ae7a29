"""Show that both launchers train the same:  python -m launchers.parity --model cnn --max-steps 20

Trains with the same flags under torchrun and through Ray, and compares the loss of every step, bit for bit.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fsdp2.options.errors import ConfigError
from fsdp2.options.own_model import code_flags
from fsdp2.options.parser import to_flags
from fsdp2.report import records
from fsdp2.run.process import ending
from fsdp2.units import short
from launchers.ray_options import parse

COLUMN = 22


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all losses are equal, 1 if not, after both columns. Raises ConfigError for what neither could run."""
    options, config = parse(
        arguments, "launchers.parity", "Train under torchrun and through Ray, and compare the loss of every step."
    )
    if options.num_workers.least != options.num_workers.most:
        raise ConfigError(f"--num-workers {options.num_workers}: torchrun is not elastic; give one number")
    if options.name is not None or options.storage_path is not None:
        raise ConfigError("--name and --storage-path: there are two runs; --run-dir is the folder of both")
    if config.resume not in ("auto", "never"):
        raise ConfigError(f"--resume {config.resume}: each comparison starts from nothing; drop it")
    folder = Path(config.run_dir or f"runs/parity-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    if folder.exists():
        raise ConfigError(f"--run-dir {folder}: exists; each comparison starts from nothing, so give a new folder")
    folder.mkdir(parents=True)
    flags = folder / "flags.json"
    flags.write_text(json.dumps({"flags": to_flags(config)}))
    rays = [f"--use-gpu={options.use_gpu}", f"--max-failures={options.max_failures}"]
    rays += [f"--address={options.address}"] if options.address else []
    losses = {}
    for name, further in (("torchrun", []), ("ray", rays)):
        run = folder / name
        print(f"training under {name} …", flush=True)
        losses[name] = train(
            [*command(name, options.num_workers.most, run), f"--config={flags}", *code_flags(config), *further], run
        )
    return compare(losses["torchrun"], losses["ray"], short(folder))


def command(launcher: str, ranks: int, run: Path) -> list[str]:
    """The start of a command line that trains under `torchrun` or `ray`; flags of `fsdp2.train` may follow."""
    start = {
        "torchrun": ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m", "fsdp2.train"],
        "ray": ["launchers.ray_train", f"--num-workers={ranks}"],
    }[launcher]
    return [sys.executable, "-m", *start, f"--run-dir={run}"]


def train(command: list[str], run: Path) -> dict[int, float]:
    """Step -> loss of a run. Raises ConfigError with what it said last if it failed."""
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        said = re.search(r"^fsdp2: (?:error|stopped): (.*)", result.stdout + result.stderr, re.MULTILINE)
        if said:
            raise ConfigError(said[1])
        print(result.stdout + result.stderr, file=sys.stderr)
        raise ConfigError(f"{run.name} ended with status {result.returncode}; its output is above")
    try:
        found = records.read(run / "metrics.jsonl")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return {record["step"]: record["loss"] for record in found if record["kind"] == "train"}


def compare(torchrun: dict[int, float], ray: dict[int, float], where: str) -> int:
    """Print both columns and what they say."""
    print(f"{'step':>6}  {'torchrun':<{COLUMN}}  {'ray':<{COLUMN}}")
    different = []
    for step in sorted(torchrun.keys() | ray.keys()):
        ours, theirs = (str(losses.get(step, "-")) for losses in (torchrun, ray))  # so two that are NaN are alike
        if ours != theirs:
            different.append(step)
        print(f"{step:>6}  {ours:<{COLUMN}}  {theirs:<{COLUMN}}  {'' if ours == theirs else 'differs'}".rstrip())
    if different:
        print(f"they differ first at step {different[0]}, and in {len(different)} of {len(torchrun)} steps; {where}")
        return 1
    print(f"equal: {len(torchrun)} of {len(torchrun)} losses, bit for bit; both runs are in {where}")
    return 0


def cli() -> None:
    with ending.exit_status():
        sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    cli()
