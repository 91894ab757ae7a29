"""A copy of a finished run to damage, the commands that then look at it, and what must hold afterwards."""

from __future__ import annotations

import io
import os
import resource
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from fsdp2 import infer
from fsdp2.checkpoint.saver import SaveFailed
from fsdp2.checkpoint.store import MARKER
from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.run.process.group import RunStopped
from fsdp2.train import main as train
from fsdp2_tools.checkpoint.__main__ import main as commands
from fsdp2_tools.memory.__main__ import main as memory_of
from tests.fuzz.common import one_line, refused
from tests.harness import small

FLAGS = ("--model=cnn", "--max-steps=3", "--checkpoint-every=2", "--memory-snapshot")
SECONDS = 30
BYTES = 1536 << 20  # more than this process has, and more than any command takes for a run of this size

Tree = dict[str, Any]


class Hangs(BaseException):
    """No Exception: code that handles those of a file must not handle it."""


def tree(folder: Path) -> Tree:
    """What is below a folder: name -> content of a file, or what else it is. Locks are left out."""
    found: Tree = {}
    for place, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = os.path.join(place, name)
            kind: Any = f"mode {os.lstat(path).st_mode:o}"
            if os.path.islink(path):
                kind = os.readlink(path)
            elif os.path.isfile(path):
                kind = _content(path)
            if name != ".lock":
                found[os.path.relpath(path, folder)] = kind
    return found


def _content(path: str) -> Any:
    if os.path.getsize(path) > 1 << 27:
        return f"{os.path.getsize(path)} bytes"
    with open(path, "rb") as file:
        return file.read()


def committed(run: Tree) -> dict[str, Tree]:
    """Folder of a checkpoint in a run's tree -> its files, of those with a marker."""
    folders = [name.removesuffix(f"/{MARKER}") for name in run if name.endswith(f"/{MARKER}")]
    return {
        folder: {name: kind for name, kind in run.items() if name.startswith(f"{folder}/")}
        for folder in folders
        if folder.startswith("run/checkpoints/")
    }


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the address of a socket is short
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("s")
    os.rename("s", path)
    os.chdir(here)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 32)


def _outside(path: Path) -> Path:
    return next(above for above in path.parents if above.name == "stage") / "outside"


# What may stand where a file or a folder belongs.
KINDS: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda path: None,
    "an empty file": Path.touch,
    "a text": lambda path: path.write_text("text"),
    "zeros": lambda path: path.write_bytes(bytes(5000)),
    "a large file": _sparse,
    "a folder": Path.mkdir,
    "a full folder": lambda path: (path / "in" / "it").mkdir(parents=True),
    "a pipe": os.mkfifo,
    "a socket": _socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a loop": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to a file outside": lambda path: path.symlink_to(_outside(path) / "file"),
    "a link to a folder outside": lambda path: path.symlink_to(_outside(path)),
}


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


@contextmanager
def limits() -> Iterator[None]:
    """End what hangs or takes memory without bound; `MemoryError` and `Hangs` are no refusals."""

    def stop(*_: object) -> None:
        raise Hangs(f"after {SECONDS} seconds")

    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler, (left, _) = signal.signal(signal.SIGALRM, stop), signal.setitimer(signal.ITIMER_REAL, SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, handler)


def command(*words: object) -> int:
    """One of `python -m fsdp2.checkpoint`'s commands: its status is 0, 1 or 2, and each line of its errors is one."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as errors:
        status = commands([str(word) for word in words])
    lines = errors.getvalue().split("\n")[:-1]
    for line in lines:
        one_line(line)
    assert status in (0, 1, 2)
    assert status != 2 or (len(lines) == 1 and lines[0].startswith("fsdp2.checkpoint: error: ")), lines
    return status


def quietly(action: Callable[[], Any]) -> Any:
    """What it returns, or None if it is refused, or stopped, in one line."""
    # `exit_status` makes one line of those that are suppressed.
    with redirect_stdout(io.StringIO()), mock.patch.object(infer, "draw"), suppress(RunStopped, SaveFailed):
        return refused(action, ConfigError)
    return None


class Stage:
    """A folder with a copy of the run, that an example changes, and a file outside of it, that nobody touches."""

    def __init__(self, finished: Path, folder: Path) -> None:
        self.finished, self.folder, self.run = finished, folder / "stage", folder / "stage" / "run"
        self.step = self.run / "checkpoints" / "step-00000003"

    def set(self) -> Path:
        """A new copy. Its files are links to the original's: replace them, and write into none."""
        remove(self.folder)
        shutil.copytree(self.finished, self.run, copy_function=os.link, ignore=shutil.ignore_patterns(".lock"))
        self.write(self.run / "metrics.jsonl", (self.run / "metrics.jsonl").read_bytes())  # a resume writes into it
        (self.folder / "outside").mkdir()
        (self.folder / "outside" / "file").write_text("of somebody else")
        return self.run

    def write(self, path: Path, content: bytes) -> None:
        remove(path)
        path.write_bytes(content)

    def look(self, *names: str) -> None:
        """Look at the run in these ways, of `READERS` and `WRITERS`: each ends well or in one line."""
        for name in names:
            before = tree(self.folder)
            with limits():
                well = READERS[name](self.run, self.folder) if name in READERS else WRITERS[name](self.run)
            for made in ("out", "out.tmp", "new"):
                assert well or made == "new" or not os.path.lexists(self.folder / made), name
                remove(self.folder / made)
            after = tree(self.folder)
            if name in READERS:
                assert after == before, name
            else:
                self._has_kept(before, after, well)

    def _has_kept(self, before: Tree, after: Tree, well: bool) -> None:
        """Whoever resumes removes dead saves, and sets checkpoints aside; a refused one changes nothing else."""
        for folder, files in committed(before).items():
            start, name = os.path.split(folder)
            moved = [folder, *(f"{start}/superseded-{number}-{name}" for number in range(1, 9))]
            kept = [{name.replace(now, folder, 1): after.get(name) for name in after if name.startswith(f"{now}/")}
                    for now in moved]  # fmt: skip
            assert files in kept, f"{folder} was changed"
        if not well:
            changed = {name for name in before if after.get(name) != before[name]}
            assert after.keys() <= before.keys()
            assert all(name.startswith("run/checkpoints/") for name in changed), changed
        assert [after.get(f"outside{name}") for name in ("", "/file")] == [before["outside"], before["outside/file"]]


def _resume(*flags: str, to: str = "run") -> Callable[[Path], bool]:
    return lambda run: quietly(lambda: train(parse([*small(run.with_name(to), *FLAGS[:-1]), *flags]))) is not None


READERS: dict[str, Callable[[Path, Path], bool]] = {
    "list": lambda run, _: command("list", run) == 0,
    "verify": lambda run, _: command("verify", run) < 2,
    "verify one": lambda run, _: command("verify", run / "checkpoints" / "step-00000003") < 2,
    "show": lambda run, _: command("show", run) == 0,
    "show the model": lambda run, _: command("show", run / "full_model" / "full-model.pt") == 0,
    "diff": lambda run, _: command("diff", run, run / "full_model" / "full-model.pt") < 2,
    "export": lambda run, at: command("export", run, at / "out", "--format=pt") == 0,
    "export the model": lambda run, at: (
        command("export", run / "full_model" / "full-model.pt", at / "out", "--format=dcp") == 0
    ),
    "import": lambda run, at: command("import", run, at / "out") == 0,
    "infer": lambda run, _: quietly(lambda: infer.main(run)) is not None,
    "infer sharded": lambda run, _: quietly(lambda: infer.main(run, sharded=True)) is not None,
    "resume elsewhere": lambda run, _: _resume(f"--resume={run}", to="new")(run),
    "init from": lambda run, _: _resume(f"--init-from={run}/full_model/full-model.pt", to="new")(run),
    "memory": lambda run, _: quietly(lambda: memory_of([str(run), "--no-pages"])) is not None,
}
WRITERS: dict[str, Callable[[Path], bool]] = {
    "resume": _resume(),
    "resume the older": _resume("--resume=2"),
    "resume never": _resume("--resume=never"),
}
