"""The commands for the first half hour on a GPU, in their order:  python3 -m tests.gpu.first"""

from __future__ import annotations

from dataclasses import dataclass

from tests.gpu.deadline import SECONDS


@dataclass(frozen=True)
class Command:
    """Something to type in the repository's root, and what it needs."""

    what: str
    line: str
    needs: str


COMMANDS = (
    Command(
        "the suite: losses, memory, checkpoints, then processes",
        "python3 -m tests.gpu --out results",
        "one GPU with 4 GB (some tests two or four), 2 GB of disk",
    ),
    Command(
        "records: step time, tokens a second, MFU and peak memory of Llama 1B and 8B",
        "python3 benchmarks/records.py --out results",
        "8B: a GPU of 130 GB, with LoRA of 70 GB, and 50 GB of host memory; 1B: 40 GB; no disk; peft for LoRA",
    ),
    Command(
        "what a save costs, prefetching on two GPUs or more, and the plan beside the records",
        "python3 benchmarks/gpu.py --parts checkpoint,prefetch,calibration --out results",
        "one GPU with 8 GB, 10 GB of a disk that isn't memory (--dir)",
    ),
)


def text() -> str:
    lines = [
        "In the repository's root, with any python3 that has torch; wheels for the rest: make gpu-bundle, elsewhere."
    ]
    lines.append(
        f"Each ends by itself within {SECONDS / 60:.0f} minutes (--seconds) and writes into results/ as it goes; typed "
        "again, the first two go on. To try one on a CPU: --device cpu --quick"
    )
    for number, one in enumerate(COMMANDS, 1):
        lines += ["", f"{number}. {one.what}", f"   {one.line}", f"   needs: {one.needs}"]
    return "\n".join(lines)


if __name__ == "__main__":
    print(text())
