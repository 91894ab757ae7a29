"""Runs the code blocks of a page in the order in which they stand, in one folder, as a reader would.

torchrun's ranks are those of `tests/harness.py`, and `make TARGET` is what `make -n` prints: a block costs seconds
and not a start of Python for each process. Trainings are shortened, as `shorter` says.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.harness import Ranks
from tests.programs import on_a_rank, on_ranks_of_its_own, result, started

ROOT = Path(__file__).parents[2]
STOPPED_BY_HAND = "Ctrl-C"  # a comment behind a command that says so


def shorter(arguments: list[str], has_output: bool, by_hand: bool, done: int) -> list[str]:
    """The flags of a training that doesn't take minutes: two steps, and the smallest model where its size isn't shown.

    A run that goes on has `done` steps behind it.
    """
    given = {argument.partition("=")[0] for argument in arguments}
    more = ["--device=cpu", "--threads=1"]
    if "--max-steps" not in given and not by_hand:
        more.append(f"--max-steps={done + 2}")
    if not has_output and not given & {"--model", "--model-size", "--config", "--init-from", "--resume"}:
        more.append("--model-size=tiny")
    if "--batch-size" not in given and "--config" not in given and not has_output:
        more.append("--batch-size=16")
    return [*more, *arguments] if "--config" in given else [*arguments, *more]


def smaller(arguments: list[str]) -> list[str]:
    """The flags of a plan of the model that `shorter` trains."""
    return arguments if {"--model", "--model-size"} & set(arguments) else [*arguments, "--model-size=tiny"]


def masked(text: str) -> str:
    """Numbers, and how lines are broken, don't count."""
    text = re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7,}\b", "#", text)
    return re.sub(r"\s+", " ", re.sub(r"\d[\d,.:]*(?:e[+-]?\d+)?", "#", text)).strip()


def left_out(expected: str, printed: str) -> list[str]:
    """What begins the lines of a run's header that a page lacks, though it shows the header from end to end."""
    header = re.compile(r"^model: .*?^steps: ", re.MULTILINE | re.DOTALL)
    shown, whole = header.search(expected), header.search(printed)
    if shown is None or whole is None or "\n…" in shown[0]:
        return []
    labels = [set(re.findall(r"^[a-z ]+: ", found[0], re.MULTILINE)) for found in (whole, shown)]
    return sorted(labels[0] - labels[1])


def missing(expected: str, printed: str) -> str | None:
    """The first of the lines that a page shows that isn't in what was printed, in this order.

    A page may leave lines out, and parts of them with "…". Two equal lines may be one: a run that was made shorter has
    fewer epochs.
    """
    text, at = masked(printed), 0
    for part in filter(None, map(masked, re.split(r"…|\n", expected))):
        found = text.find(part, at)
        if found < 0:
            return part
        at = found
    return None


class Shell:
    """What runs a page's commands; `whole`: its trainings are as small as they are."""

    def __init__(
        self, ranks: Ranks, folder: Path, places: dict[str, str], environment: dict[str, str], *, whole: bool = False
    ) -> None:
        self.ranks, self.folder, self.places, self.environment, self.whole = ranks, folder, places, environment, whole
        for name in ("configs", "examples", "docs", "Makefile", "README.md"):
            (folder / name).symlink_to(ROOT / name)

    def run(self, command: str, *, has_output: bool) -> tuple[int, str]:
        """The exit status of a command and what it printed."""
        by_hand = STOPPED_BY_HAND in command
        if runs := sorted(self.folder.glob("runs/*/config.json"), key=lambda path: path.stat().st_mtime):
            command = re.sub(r"runs/(?:RUN|\w+-\d{8}-\d{6})", f"runs/{runs[-1].parent.name}", command)
        for place, here in self.places.items():
            command = command.replace(place, here)
        if found := re.fullmatch(r"python - <<'PY'\n(.*)\nPY", command, re.DOTALL):
            file = self.folder / "typed.py"
            file.write_text(found[1])
            return self._in_a_process(str(file), [], False)
        words = shlex.split(command, comments=True)
        if words[0] == "make":
            return self._make(words[1:], has_output, by_hand)
        while "=" in words[0]:
            words.pop(0)
        name = Path(words[0]).name
        if name == "torchrun":
            return self._torchrun(words[1:], has_output, by_hand)
        if name in ("python", "python3") and words[1] == "-m":
            arguments = words[3:]
            if words[2] == "fsdp2.train":
                arguments = self._trained(arguments, has_output, by_hand)
            if words[2] == "fsdp2.plan" and not has_output:
                arguments = smaller(arguments)
            return self._in_a_process(f"-m {words[2]}", arguments, by_hand)
        done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    def _trained(self, arguments: list[str], has_output: bool, by_hand: bool) -> list[str]:
        if self.whole:
            return [*arguments, "--device=cpu", "--threads=1"]
        return shorter(arguments, has_output, by_hand, self._done(arguments))

    def _done(self, arguments: list[str]) -> int:
        """Steps of the run that a command line goes on with."""
        place = (
            arguments[arguments.index("--run-dir") + 1] if "--config" in arguments and "--run-dir" in arguments else ""
        )
        file = self.folder / place / "metrics.jsonl"
        return file.read_text().count('"kind": "train"') if place and file.exists() else 0

    def _make(self, words: list[str], has_output: bool, by_hand: bool) -> tuple[int, str]:
        done_before = [f"-o{name}" for name in (".venv/.installed", ".venv/.deepspeed", ".venv/.bench")]
        listed = subprocess.run(
            ["make", "-n", *done_before, *words], cwd=self.folder, capture_output=True, text=True, timeout=60
        )
        if listed.returncode:
            return listed.returncode, listed.stderr
        status, printed = 0, ""
        for line in listed.stdout.replace("\\\n", " ").splitlines():
            if line.startswith("test ") or not line.strip():
                continue
            line = line.replace("exec env ", "")
            status, text = self.run(line + f"  # {STOPPED_BY_HAND}" * by_hand, has_output=has_output)
            printed += text
        return status, printed

    def _torchrun(self, words: list[str], has_output: bool, by_hand: bool) -> tuple[int, str]:
        number = 1
        while words[0].startswith("--"):
            flag, _, value = words.pop(0).partition("=")
            value = value or words.pop(0)
            number = min(4, int(value)) if flag == "--nproc_per_node" else number
        target, arguments = (f"-m {words[1]}", words[2:]) if words[0] == "-m" else (str(ROOT / words[0]), words[1:])
        if target == "-m fsdp2.train":
            arguments = self._trained(arguments, has_output, by_hand)
        where = (str(self.folder), self.environment, by_hand)
        if target != "-m fsdp2.train":
            return on_ranks_of_its_own(number, target, arguments, self.folder, self.environment)
        results = self.ranks.run(on_a_rank, target, arguments, *where, ranks=number)
        return max(status for status, _ in results), "".join(text for _, text in results)

    def _in_a_process(self, target: str, arguments: list[str], by_hand: bool) -> tuple[int, str]:
        return result(*started(target, arguments, str(self.folder), self.environment, by_hand))


def commands(source: str) -> Iterator[tuple[str, str]]:
    """(command, what a page shows of its output), of a block of commands or of a session with `$`."""
    lines = source.rstrip("\n").split("\n")
    session = any(line.startswith("$ ") for line in lines)
    command, shown = "", ""
    while lines:
        line = lines.pop(0)
        if session and not line.startswith("$ "):
            shown += line + "\n"
            continue
        if command:
            yield command, shown
        command, shown = "", ""
        line = line.removeprefix("$ ")
        while line.rstrip().endswith("\\"):
            line = line.rstrip()[:-1] + " " + lines.pop(0).strip()
        if "<<'PY'" in line:
            while line.rpartition("\n")[2] != "PY":
                line += "\n" + lines.pop(0)
        if line.strip() and not line.startswith("#"):
            command = line
    if command:
        yield command, shown
