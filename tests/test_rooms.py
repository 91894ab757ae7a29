"""The rules of the house that a reader relies on: which room imports which, and how large a file may be."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.harness import python_environment

PACKAGE = Path(__file__).parents[1] / "fsdp2"
SOURCES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def _imports(file: Path) -> set[str]:
    """The modules, or names in them, that a file imports anywhere, functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide which room they lead to"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _modules(file: Path) -> set[str]:
    return {name for name in _imports(file) if name.startswith("fsdp2.")}


@cache
def _imported_by(room: str) -> set[str]:
    """Rooms, and modules at the top of the package, that a room imports; not those of the commands in it."""
    files = [file for file in (PACKAGE / room).rglob("*.py") if file.name != "__main__.py"]
    return {name.split(".")[1] for file in files for name in _modules(file)} - {room}


@pytest.mark.parametrize("room", ["parallel", "checkpoint", "models", "data"])
def test_a_room_that_can_be_copied_out_imports_no_other(room: str) -> None:
    assert _imported_by(room) <= {"units", "foreign"}


def test_the_doors_import_nothing_of_ours() -> None:
    assert _imported_by("foreign") == set()


def test_no_circle_between_rooms() -> None:
    def reached(room: str, seen: frozenset[str]) -> set[str]:
        direct = (_imported_by(room) & set(ROOMS)) - seen
        return direct.union(*(reached(other, seen | direct) for other in direct))

    assert {room for room in ROOMS if room in reached(room, frozenset())} == set()


def test_only_the_tuner_and_the_doctor_use_the_planner() -> None:
    users = {file for file in SOURCES if any(name.startswith("fsdp2.plan.") for name in _modules(file))}
    assert {file.parent.name for file in users} == {"plan", "tune", "doctor"}


def test_run_and_report_know_nothing_of_each_other() -> None:
    assert "report" not in _imported_by("run")
    assert "run" not in _imported_by("report")


def test_the_top_of_the_package_fits_on_a_screen() -> None:
    assert len([path for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]) <= 10


def test_only_the_command_knows_of_the_rewriter() -> None:
    users = [file for file in SOURCES if "rewriter" in {name.split(".")[0] for name in _imports(file)}]
    assert users == [PACKAGE / "migrate" / "__main__.py"]


def test_no_file_is_long() -> None:
    beside = [file for room in ("launchers", "rewriter") for file in (PACKAGE.parent / room).rglob("*.py")]
    lines = {file: len(file.read_text().splitlines()) for file in [*SOURCES, *beside]}
    assert {str(file): count for file, count in lines.items() if count > 400} == {}


def test_the_training_is_one_page() -> None:
    source = (PACKAGE / "train.py").read_text()
    (main,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "main")
    assert len(source.splitlines()) <= 250
    assert main.end_lineno is not None
    assert main.end_lineno - main.lineno < 110


def test_nothing_is_imported_that_the_run_does_not_use() -> None:
    program = (
        "import sys, fsdp2.train, fsdp2.infer; from fsdp2.config import Config; Config(model='transformer');"
        "print([m for m in ('sklearn', 'torchvision', 'matplotlib', 'tensorboard', 'ray', 'deepspeed',"
        " 'transformers', 'accelerate') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=python_environment()
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


@pytest.mark.parametrize(("module", "most"), [("fsdp2.parallelize", 20), ("fsdp2.train", 146)])
def test_a_reader_loads_few_files(module: str, most: int) -> None:
    """What a module loads is its size to a reader; the aim for `fsdp2.train` is 90."""
    program = f"import sys, {module}; print(sum(name.split('.')[0] == 'fsdp2' for name in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=python_environment()
    )
    assert 0 < int(result.stdout) <= most, result.stdout + result.stderr
