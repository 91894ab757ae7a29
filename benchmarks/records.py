"""Records on a GPU that is there for minutes:  python3 benchmarks/records.py --out results

Step time, tokens a second, MFU and peak memory of Llama beside the ledger. Each row is a process of its own with a time
of its own. records.json, records.md and trials.json are replaced after each; the same command again goes on with the
rows that are missing. trials.json is what `fsdp2.plan --calibration` reads.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.gpu.deadline import SECONDS, Deadline, run  # noqa: E402
from tests.gpu.wheels import environment  # noqa: E402

sys.path.insert(0, str(ROOT / "benchmarks"))  # where a test imports this from elsewhere
from tables import write_page  # noqa: E402

COMMON = (
    "--model=llama --dataset=random-tokens --mixed-precision=bf16 --optimizer=adamw --chunked-loss --no-save-model "
    "--checkpoint-every=never"
)
BLOCK, OP = "--activation-checkpointing=block", "--activation-checkpointing=op"
LAST = 15.0  # seconds: to end what runs and to write the page


@dataclass(frozen=True)
class Row:
    """Flags beside COMMON; `size` is that of Llama, `least` the GPU memory in GB without which it isn't tried."""

    name: str
    flags: str
    size: str = "8b"
    least: float = 130
    seconds: float = 150

    @property
    def key(self) -> str:
        return f"{self.size}, {self.name}"


# Small ones first: where they fail, the others would have failed, too. Then those of the README's aims.
ROWS = (
    Row("bf16", "--batch-size=4", "1b", 40, 80),
    Row("bf16, compiled, recomputing", f"--batch-size=4 --compile {BLOCK}"),
    Row(
        "bf16, compiled, recomputing what is cheap, 8-bit moments",
        f"--batch-size=4 --compile {OP} --optimizer-state=8bit",
    ),
    Row("float8, compiled, recomputing", f"--batch-size=4 --compile {BLOCK} --float8=tensorwise"),
    Row(
        "float8, compiled, recomputing what is cheap, 8-bit moments",
        f"--batch-size=4 --compile {OP} --optimizer-state=8bit --float8=tensorwise",
    ),
    Row("float8 by rows, compiled, recomputing", f"--batch-size=4 --compile {BLOCK} --float8=rowwise"),
    Row("LoRA, compiled", "--batch-size=4 --lora=16 --init-from=made-up --compile"),
    Row("LoRA, compiled, recomputing", f"--batch-size=4 --lora=16 --init-from=made-up --compile {BLOCK}", least=70),
    Row("bf16, recomputing", f"--batch-size=4 {BLOCK}"),
    Row("bf16, compiled, recomputing, not sharded", f"--batch-size=4 --compile {BLOCK} --strategy=none"),
    *(
        Row(f"bf16, compiled, {how}, batch {batch}", f"--batch-size={batch} --compile {flag}", "1b", 40, 80)
        for how, flag in (("saving all", ""), ("recomputing what is cheap", OP), ("recomputing", BLOCK))
        for batch in (2, 8, 16)
    ),
    Row("bf16, not sharded", "--batch-size=4 --strategy=none", "1b", 40, 80),
)
QUICK = "--batch-size=2 --seq-len=64 --threads=1"


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/records.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results (default: results)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="when it ends (default: 530)")
    parser.add_argument("--rows", default="", help="those alone whose names match this pattern")
    parser.add_argument("--again", action="store_true", help="measure rows again that are there")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--nproc", type=int, help="ranks (default: one for each GPU)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="the smallest model, to try it")
    parser.add_argument("--dry-run", action="store_true", help="print the rows and end")
    given = parser.parse_args()
    until = Deadline(given.seconds - LAST)
    rows = [row for row in ROWS if re.search(given.rows, row.key)]
    if given.dry_run:
        print("\n".join(f"{row.key}: {' '.join(flags_of(row, given))}" for row in rows))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `run` ends what it has started
    given.out = given.out.absolute()
    given.out.mkdir(parents=True, exist_ok=True)
    records = Records(given.out)
    if not given.again and all(row.key in records.rows for row in rows):
        print(f"{records.page()}\n--- all {len(rows)} rows are there; --again measures them again", flush=True)
        return 0
    variables = environment() | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    gpus = machine_of(variables, given.device)
    given.nproc = given.nproc or gpus["count"]
    records.facts = {**gpus, "seq_len": 64 if given.quick else given.seq_len, "date": time.strftime("%Y-%m-%d")}
    results = [measured(row, given, records, until, variables) for row in rows]
    records.write()
    print(records.page(), flush=True)
    print(f"--- {sum(results)} of {len(rows)} rows are there; the same command goes on", flush=True)
    return 0


def flags_of(row: Row, given: argparse.Namespace) -> list[str]:
    flags = [f"--device={given.device}", *COMMON.split(), f"--model-size={row.size}", f"--seq-len={given.seq_len}"]
    flags += row.flags.split()
    return [*flags, "--model-size=debug", *QUICK.split()] if given.quick else flags


def measured(row: Row, given: argparse.Namespace, records: Records, until: Deadline, variables: dict[str, str]) -> bool:
    """Measure a row if there is time for it; True if the page has it."""
    if row.key in records.rows and not given.again:
        return True
    memory = records.facts["memory"]
    flags = flags_of(row, given)
    if memory is not None and memory < 1e9 * row.least and not given.quick:
        records.add(row, flags, {"failed": f"needs a GPU of {row.least:.0f} GB"})
        return True
    if not until.allows(row.seconds / (3 if given.quick else 1)):
        print(f"--- {row.key}: {until.left():.0f} s are left, and it may take {row.seconds:.0f}", flush=True)
        return False
    seconds = min(row.seconds, until.left())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={given.nproc}"]
        command = [sys.executable, *(launcher if given.nproc > 1 else ()), str(ROOT / "benchmarks" / "record_row.py")]
        command += [str(out), str(seconds), *flags]
        print(f"--- {row.key}: {' '.join(flags)}", flush=True)
        began = time.monotonic()
        status = run(command, seconds, log=given.out / "records.log", environment=variables)
        found = json.loads(out.read_text()) if out.is_file() else {}
        if not found:
            why = f"not done in {seconds:.0f} s" if status is None else f"ended with status {status}: see records.log"
            found = {"failed": why}
        print(f"--- {row.key}: {brief(found)}, in {time.monotonic() - began:.0f} s", flush=True)
        records.add(row, flags, found)
    return True


class Records:
    """The measurements, in files that are valid at every moment.

    Attributes:
        rows: key -> flags, and what record_row.py has found or why it failed.
        facts: of the machine, and of this command.
    """

    def __init__(self, out: Path) -> None:
        self.out, file = out, out / "records.json"
        before = json.loads(file.read_text()) if file.is_file() else {"facts": {}, "rows": {}}
        self.facts: dict[str, Any] = before["facts"]
        self.rows: dict[str, dict[str, Any]] = before["rows"]

    def add(self, row: Row, flags: list[str], found: dict[str, Any]) -> None:
        """Keep a row, and write all files."""
        self.rows[row.key] = {"flags": flags, **found}
        self.write()

    def write(self) -> None:
        write_page(self.out / "records.json", json.dumps({"facts": self.facts, "rows": self.rows}, indent=1))
        write_page(self.out / "records.md", self.page())
        done = [row for row in self.rows.values() if "step_ms" in row]
        if done:
            trials = [{"flags": row["settings"], "measured": {"step_ms": row["step_ms"]}} for row in done]
            facts = {"device": done[0]["device"], "world_size": done[0]["world_size"]}
            write_page(self.out / "trials.json", json.dumps({"facts": facts, "trials": trials}, indent=1))

    def page(self) -> str:
        facts = self.facts
        cells = [(key, *figures(row)) for key, row in self.rows.items()]
        failed = [f"- {key}: {row['failed']}" for key, row in self.rows.items() if "failed" in row]
        flags = [f"- {key}: `{' '.join(row['flags'])}`" for key, row in self.rows.items()]
        parts = [
            "# Records",
            ABOUT,
            f"- Ranks: {facts['count']}, sequences of {facts['seq_len']} tokens\n- Date: {facts['date']}\n"
            f"- Machine: {facts['name']}\n- Versions: {facts['versions']}",
            table(("", *COLUMNS), cells),
            *(["Not measured:", "\n".join(failed)] if failed else []),
            "Flags:",
            "\n".join(flags),
        ]
        return "\n\n".join(parts) + "\n"


ABOUT = """\
Written by `benchmarks/records.py`. Each row is a process of its own: three steps, and the median of up to twelve more.
Tokens, TFLOP/s and MFU are as in docs/speed.md. The allocator's peak is `torch.cuda.max_memory_allocated` of the timed
steps. The ledger counts the tensors of a further step; the ratio is the allocator's peak in that step, less what it had
beside them, by the ledger's. Compiled graphs allocate where no ledger looks. `benchmarks/calibrate.py` puts the plan
beside these rows."""
COLUMNS = ("step, ms", "tokens/s", "TFLOP/s a GPU", "MFU", "peak, allocator, GB", "reserved, GB", "allocator ÷ ledger")


def figures(row: dict[str, Any]) -> list[str]:
    """A cell for each of COLUMNS; "" for what there isn't."""

    def cell(name: str, form: str, unit: float = 1.0) -> str:
        return format(row[name] / unit, form) if name in row else ""

    ledger = row.get("ledger", {})
    ratio = f"{ledger['allocated'] / ledger['ledger']:.3f}" if ledger.get("allocated") else ""
    return [
        cell("step_ms", ".1f"),
        cell("tokens_per_second", ",.0f"),
        cell("tflops", ".0f"),
        cell("mfu", ".1%"),
        cell("allocated_bytes", ".1f", 1e9),
        cell("reserved_bytes", ".1f", 1e9),
        ratio,
    ]


def brief(found: dict[str, Any]) -> str:
    if "failed" in found:
        return str(found["failed"])
    return ", ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, figures(found), strict=True) if cell)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, made without torch: this process is there before and after each of the rows."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# In a process of its own, since a CUDA context takes half a gigabyte of the GPU for as long as its process lives.
MACHINE = """
import json, platform, sys
sys.path.insert(0, "benchmarks")
import torch
from step_page import versions
from tables import machine
gpu = sys.argv[1] == "cuda"
print(json.dumps({
    "count": torch.cuda.device_count() if gpu else 1,
    "name": torch.cuda.get_device_name(0) if gpu else machine(),
    "memory": torch.cuda.get_device_properties(0).total_memory if gpu else None,
    "versions": ", ".join([f"Python {platform.python_version()}", *versions()]),
}))
"""


def machine_of(variables: dict[str, str], device: str) -> dict[str, Any]:
    command = [sys.executable, "-c", MACHINE, device]
    found: dict[str, Any] = json.loads(subprocess.check_output(command, text=True, cwd=ROOT, env=variables))
    if device == "cuda" and not found["count"]:
        sys.exit("torch sees no GPU; to try it: --device cpu --quick")
    return found


if __name__ == "__main__":
    sys.exit(main())
