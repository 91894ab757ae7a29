"""The rules of the house that a reader relies on: which room loads which, what a module loads, how large a file may be.

Imports count wherever they stand, in functions and under TYPE_CHECKING too, and so do modules that are named by a
string: a circle that hides in one is still a circle.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.harness import python_environment

ROOT = Path(__file__).parents[1]
BOOK, EXTRA = "fsdp2", "fsdp2_extra"
BESIDE = (EXTRA, "fsdp2_tools", "migration", "fsdp1_interface", "launchers")
# What may name which other package of ours.
ARROWS = {
    BOOK: {EXTRA},  # where a flag asks for it: `loaded_at_once`
    EXTRA: {BOOK},
    "fsdp1_interface": set(),
    "fsdp2_tools": {BOOK, EXTRA, "fsdp1_interface", "migration"},
    "migration": {BOOK, EXTRA, "fsdp2_tools", "fsdp1_interface"},
    "launchers": {BOOK, EXTRA, "fsdp2_tools"},
}
TOOLS = sorted(path.parent.name for path in (ROOT / "fsdp2_tools").glob("*/__main__.py"))
NAMED = re.compile(rf"(?:{'|'.join((BOOK, *BESIDE))})(?:\.\w+)*")

Sources = Mapping[str, str]


@cache
def names(source: str, *, strings: bool = True) -> set[str]:
    """The modules of ours, or names in them, that a source imports, or names by a string of their own.

    Args:
        strings: count each such string, and not only those that are imported: a program's name is one, too.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import hides which room it leads to"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif strings or (isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func)):
            parts = node.args if isinstance(node, ast.Call) else [node]
            found |= {name for part in parts for name in _named(part)}
    return {name for name in found if name.partition(".")[0] in (BOOK, *BESIDE)}


def _named(node: ast.AST) -> set[str]:
    """A module's name, or the beginning of one."""
    first = node.values[0] if isinstance(node, ast.JoinedStr) else node
    text = str(first.value).rstrip(".") if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
    return {text} if NAMED.fullmatch(text) else set()


@cache
def sources() -> dict[str, str]:
    """Module -> its text, for each package of ours."""
    found = {}
    for package in (BOOK, *BESIDE):
        for file in sorted((ROOT / package).rglob("*.py")):
            found[".".join(file.relative_to(ROOT).with_suffix("").parts)] = file.read_text()
    return found


def book(sources: Sources) -> dict[str, str]:
    return {module: text for module, text in sources.items() if module.split(".")[0] == BOOK}


def wrong_packages(sources: Sources) -> set[tuple[str, str]]:
    """Modules that name another package than they may."""
    found = {
        (module, name)
        for module, text in sources.items()
        for name in names(text)
        if (to := name.split(".")[0]) != (own := module.split(".")[0]) and to not in ARROWS[own]
    }
    return found - {("fsdp2.run.beside", "fsdp2_tools"), ("fsdp2.__init__", "fsdp2_tools")}


def circles(sources: Sources) -> set[str]:
    """Modules from which imports lead back to themselves."""
    known = {module.removesuffix(".__init__"): text for module, text in sources.items()}
    arrows = {
        module: {name if name in known else name.rpartition(".")[0] for name in names(text, strings=False)}
        & known.keys() - {module}
        for module, text in known.items()
    }

    def reached(module: str) -> set[str]:
        seen: set[str] = set()
        ahead = [module]
        while ahead:
            new = arrows[ahead.pop()] - seen
            seen |= new
            ahead += new
        return seen

    return {module for module in arrows if module in reached(module)}


def rooms_of(sources: Sources, room: str) -> set[str]:
    """Rooms, and modules at the top of the book, that a room of it names; not itself."""
    own = f"{BOOK}.{room}."
    found = {name for module, text in sources.items() if module.startswith(own) for name in names(text)}
    return {name.split(".")[1] for name in found if name.startswith(f"{BOOK}.")} - {room}


def room_circles(sources: Sources) -> set[str]:
    rooms = {module.split(".")[1] for module in book(sources) if module.count(".") > 1}
    arrows = {room: rooms_of(sources, room) & rooms for room in rooms}

    def reached(room: str, seen: frozenset[str]) -> set[str]:
        new = arrows[room] - seen
        return new.union(*(reached(other, seen | new) for other in new))

    return {room for room in rooms if room in reached(room, frozenset())}


def to_be_copied(sources: Sources) -> dict[str, set[str]]:
    """What a room that can be copied out names of the book beside what it may."""
    found = {
        room: rooms_of(sources, room) - {"units", "beside"} for room in ("parallel", "checkpoint", "models", "data")
    }
    return {room: names for room, names in found.items() if names}


def loaded_at_once(sources: Sources) -> set[str]:
    """Modules of the book that load an extra part whether a flag asks for it or not."""
    return {
        module
        for module, text in book(sources).items()
        for node in ast.parse(text).body
        if isinstance(node, ast.Import | ast.ImportFrom) and any(wide(name, EXTRA) for name in names(ast.unparse(node)))
    }


def wide(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def extra_rooms(sources: Sources) -> dict[str, set[str]]:
    """Of each room of the extra parts the rooms, and modules at the top of the book, that it names."""
    found: dict[str, set[str]] = {}
    for module, text in sources.items():
        if wide(module, EXTRA) and module.count(".") > 1:
            parts = [name.split(".") for name in names(text)]
            room = module.split(".")[1]
            named = {part[1] if part[0] == BOOK else f"{EXTRA}.{part[1]}" for part in parts if len(part) > 1}
            found[room] = found.get(room, set()) | named - {f"{EXTRA}.{room}"}
    return found


def tool_users(sources: Sources) -> set[str]:
    """Modules of the book that load a tool, which only a flag may ask for."""
    return {module for module, text in book(sources).items() if re.search(r"\btool\(\"--", text)}


def programs_started(sources: Sources) -> set[str]:
    """Modules of the book with a program's `-m` in a string: what they start is an arrow too."""
    return {
        module
        for module, text in book(sources).items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and node.value == "-m"
    }


def tools_by_the_books_name(sources: Sources) -> set[tuple[str, str]]:
    """Modules that name a part of a tool as the commands do: it would be loaded as a second module."""
    hidden = tuple(f"{BOOK}.{tool}." for tool in TOOLS if not (ROOT / BOOK / tool).exists())
    return {(module, name) for module, text in sources.items() for name in names(text) if name.startswith(hidden)}


def users(sources: Sources, package: str) -> set[str]:
    return {module for module, text in sources.items() if any(wide(name, package) for name in names(text))}


def test_a_package_names_only_those_below_it() -> None:
    assert wrong_packages(sources()) == set()
    assert tools_by_the_books_name(sources()) == set()


def test_no_circle_between_files_and_none_between_rooms() -> None:
    assert circles(sources()) == set()
    assert room_circles(sources()) == set()


def test_a_room_that_can_be_copied_out_imports_no_other() -> None:
    assert to_be_copied(sources()) == {}


def test_the_book_loads_a_tool_for_two_flags_and_starts_no_program() -> None:
    assert tool_users(sources()) == {"fsdp2.run.preflight", "fsdp2.observing"}
    assert programs_started(sources()) == set()


def test_only_the_tuner_and_the_doctor_use_the_planner() -> None:
    found = {module.split(".")[1] for module in users(sources(), "fsdp2_tools.plan")}
    assert found == {"plan", "tune", "doctor"}


def test_an_extra_part_is_loaded_by_a_flag_alone_and_names_few_rooms() -> None:
    assert loaded_at_once(sources()) == set()
    rooms = extra_rooms(sources())
    assert rooms.pop("foreign") == set(), "the doors stand alone"
    assert {room: found - {"units", "options"} for room, found in rooms.items()} == {
        "allocations": {"parallel", "config"},
        "baselines": {"parallel", "run"},
        "elastic": {"checkpoint", "parallel", "config", "run"},
        "low_precision": {"parallel"},
        "models": {"models", f"{EXTRA}.foreign"},
        "remote": {"checkpoint", f"{EXTRA}.foreign"},
        "text": {"data", "run", "config", f"{EXTRA}.foreign"},
        "trackers": {"checkpoint"},
    }


def test_run_and_report_know_nothing_of_each_other() -> None:
    assert "report" not in rooms_of(sources(), "run")
    assert "run" not in rooms_of(sources(), "report")


def test_only_the_command_knows_of_the_rewriter() -> None:
    others = {module for module in users(sources(), "migration.rewriter") if ".rewriter." not in module}
    assert others == {"migration.__main__"}


@pytest.mark.parametrize(
    ("module", "added", "rule"),
    [
        ("fsdp2.run.start", "def f():\n    from fsdp2_tools.plan import execute\n", wrong_packages),
        ("fsdp2.report.header", "NAME = 'fsdp2_tools.doctor.examine'\n", wrong_packages),
        ("fsdp2.report.header", "def f(x):\n    return f'fsdp2_tools.{x}'\n", wrong_packages),
        ("fsdp1_interface.shard", "import fsdp2.units\n", wrong_packages),
        ("fsdp2_tools.plan.page", "from fsdp2.plan.memory import peak\n", tools_by_the_books_name),
        ("fsdp2.options.values", "if TYPE_CHECKING:\n    from fsdp2.config import Config\n", circles),
        ("fsdp2.options.values", "def f():\n    return importlib.import_module('fsdp2.config')\n", circles),
        ("fsdp2.options.values", "from fsdp2.run.directory import job\n", room_circles),
        ("fsdp2.models.vit", "from fsdp2.parallel import groups\n", to_be_copied),
        ("fsdp2_extra.foreign.code", "from fsdp2 import units\n", extra_rooms),
        ("fsdp2.report.header", "from fsdp2_extra.models import hf\n", loaded_at_once),
        ("fsdp2.report.header", 'PAGE = tool("--profile", "memory.page")\n', tool_users),
        ("fsdp2.run.start", "LINE = [sys.executable, '-m', 'torch.distributed.run']\n", programs_started),
    ],
)  # fmt: skip
def test_a_rule_sees_what_breaks_it(module: str, added: str, rule: object) -> None:
    assert callable(rule)
    assert rule({**sources(), module: sources()[module] + added}) != rule(sources())


def test_each_tool_is_run_by_the_name_of_the_book() -> None:
    lines = [f"importlib.util.find_spec('fsdp2.{tool}.__main__').origin" for tool in TOOLS]
    result = _python(f"import importlib.util; print(*[{', '.join(lines)}], sep='\\n')")
    assert result.split() == [str(ROOT / "fsdp2_tools" / tool / "__main__.py") for tool in TOOLS]


def test_the_top_of_the_book_fits_on_a_screen() -> None:
    assert len([module for module in book(sources()) if module.count(".") == 1]) <= 10


def test_no_file_is_long() -> None:
    texts = {**sources(), **{str(file): file.read_text() for file in (ROOT / "tests").rglob("*.py")}}
    lines = {name: len(text.splitlines()) for name, text in texts.items()}
    assert {name: count for name, count in lines.items() if count > 400} == {}


def test_the_book_and_the_repository_are_no_larger_than_they_say() -> None:
    files = {package: list((ROOT / package).rglob("*.py")) for package in (BOOK, *BESIDE, "benchmarks", "examples")}
    require_at_most(17_620, files[BOOK], BOOK)
    require_at_most(55_519, [one for found in files.values() for one in found], "all packages")


def require_at_most(most: int, files: list[Path], where: str) -> None:
    lines = sum(len(file.read_text().splitlines()) for file in files)
    fix = "make something simpler, or raise the number here by the lines of your flag, model or row"
    assert lines <= most, f"{where}: {lines:,} lines, {lines - most} more than {most:,}; {fix} (docs/contributing.md)"


def test_the_training_is_one_page() -> None:
    source = sources()["fsdp2.train"]
    (main,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "main")
    assert len(source.splitlines()) <= 250
    assert main.end_lineno is not None
    assert main.end_lineno - main.lineno < 110


def in_the_loop(source: str) -> set[str]:
    """The objects that change in the loop of `main`, which a reader has to keep in mind."""
    tree = ast.parse(source)
    (main,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    (loop,) = (node for node in ast.walk(main) if isinstance(node, ast.While))
    names = [node for node in ast.walk(loop) if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    called = {node.func.id for node in ast.walk(loop) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    never_change = {"config", "spec", "world"}
    return {node.id for node in names} - own - called - never_change


def test_the_loop_has_few_objects() -> None:
    source = sources()["fsdp2.train"]
    assert in_the_loop(source) == {
        "batches", "between", "checkpoints", "engine", "log", "progress", "schedule",
    }  # fmt: skip
    assert in_the_loop(source.replace("accuracy = test()\n", "accuracy = test(garbage)\n")) > in_the_loop(source)


def test_nothing_is_imported_that_the_run_does_not_use() -> None:
    program = (
        "import sys, fsdp2.train, fsdp2.infer; from fsdp2.config import Config; Config(model='transformer');"
        "print([m for m in ('sklearn', 'torchvision', 'matplotlib', 'tensorboard', 'ray', 'deepspeed',"
        " 'transformers', 'accelerate') if m in sys.modules])"
    )
    assert _python(program).strip() == "[]"


QUICK = ("plan", "doctor", "compare", "tune", "memory", "checkpoint", "data", "migrate")


@pytest.mark.parametrize(
    "words",
    [
        *("train --help", "train --lr -1", "train --modle x", "train --batch-size"),
        *(f"{tool} --help" for tool in QUICK),
        *(f"{tool} --modle x" for tool in QUICK),
    ],
)
def test_help_and_a_refused_flag_are_answered_without_torch(words: str) -> None:
    """torch takes seconds to load, and an answer that needs none of it takes a tenth of one."""
    program, *flags = words.split()
    command = [sys.executable, "-X", "importtime", "-m", f"fsdp2.{program}", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=python_environment(), cwd=ROOT)
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time:")}
    said = [line for line in result.stderr.splitlines() if not line.startswith("import time:")]
    assert "fsdp2.options.errors" in loaded
    assert not loaded & {"torch", "numpy", "libcst"}
    if "--help" in flags:
        assert (result.returncode, said) == (0, [])
        assert result.stdout.startswith("usage: ")
    else:
        assert (result.returncode, len(said), result.stdout) == (2, 1, "")
        assert " error: " in said[0]


@pytest.mark.parametrize("command", ["check", "rewrite"])
def test_code_is_read_without_torch(command: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "def make(net, loader):\n    model = FSDP(net)\n    loader.step()\n    model.clip_grad_norm_(1.0)\n"
    )
    program = (
        "import sys, migration.__main__ as migrate\n"
        f"sys.argv[1:] = {command!r}, {str(tmp_path)!r}\n"
        "try:\n    migrate.main_of_files()\nexcept SystemExit:\n    print('torch' in sys.modules)"
    )
    assert _python(program).splitlines()[-1] == "False"


def test_an_encoding_without_a_sign_ends_nothing() -> None:
    program = "from fsdp2.run.process import early; early.answer(lambda: None); print('3 \\u00d7 4')"
    assert _python(program, PYTHONIOENCODING="ascii") == "3 ? 4\n"


def test_one_of_several_ranks_refuses_with_the_others() -> None:
    """Else each would print the line, and a launcher would end rank 0 before it has spoken."""
    program = (
        "import os; os.environ['RANK'] = '1'; from fsdp2.config import parse; from fsdp2.run.process import early;"
        " early.answer(lambda: parse(['--lr', '-1'])); print('goes on')"
    )
    assert _python(program) == "goes on\n"


@pytest.mark.parametrize(
    ("module", "most", "longest"),
    [("fsdp2.train", 89, 11_000), ("fsdp2.parallelize", 14, 1_260), ("fsdp2.minimal", 9, 845)],
)
def test_a_reader_loads_few_files(module: str, most: int, longest: int) -> None:
    """What a module loads is its size to a reader."""
    found = f"[one.__file__ for name, one in sys.modules.items() if name.split('.')[0] in {(BOOK, *BESIDE)!r}]"
    files = list(map(Path, _python(f"import sys, {module}; print(*{found}, sep='\\n')").splitlines()))
    assert 0 < len(files) <= most
    require_at_most(longest, files, f"what {module} loads")


def _python(program: str, **variables: str) -> str:
    command, environment = [sys.executable, "-c", program], python_environment() | variables
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout
