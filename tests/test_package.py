"""A wheel holds all that its commands read, and what they need beside torch is what the core installs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.harness import python_environment
from tests.test_rooms import BESIDE, BOOK

ROOT = Path(__file__).parents[1]
PACKAGES = (BOOK, *BESIDE)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# One of the book, one of another package by the book's name, and one that reads a table beside its code.
COMMANDS = (
    ["fsdp2.infer", "--help"],
    ["fsdp2.migrate", "options"],
    ["fsdp2.plan", "--model", "vit", "--ranks", "8", "--gpu", "h100"],
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of a wheel, as pip would lay it out. It is built of a copy, since building leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / "copy" / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "copy")
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=folder / "copy", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")
    return folder / "site"


def test_a_wheel_holds_each_file_of_the_packages(site: Path) -> None:
    def files(root: Path) -> set[str]:
        found = [file for package in PACKAGES for file in (root / package).rglob("*")]
        return {str(file.relative_to(root)) for file in found if file.is_file() and "__pycache__" not in file.parts}

    assert len(files(ROOT)) > 300
    assert files(site) == files(ROOT)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_command_runs_from_a_wheel(command: list[str], site: Path) -> None:
    line = [sys.executable, "-m", *command]
    environment = {**python_environment(), "PYTHONPATH": str(site)}
    done = subprocess.run(line, cwd=site, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def _needed(requirements: list[str]) -> set[str]:
    """The packages that requirements bring on this machine, themselves included."""
    from packaging.requirements import Requirement

    found: set[str] = set()
    ahead = [Requirement(line) for line in requirements]
    while ahead:
        one = ahead.pop()
        if one.name in found or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        found.add(one.name)
        ahead += [Requirement(line) for line in metadata.requires(one.name) or []]
    return found


def test_the_core_brings_no_library_of_pictures_or_statistics() -> None:
    found = _needed(PROJECT["dependencies"])
    assert "torch" in found
    assert not found & {"scikit-learn", "scipy", "pandas", "matplotlib", "plotly", "transformers", "ray"}
    assert "matplotlib" in _needed(PROJECT["optional-dependencies"]["plots"])


def _pins() -> dict[str, str]:
    """Package -> what constraints.txt says of it: the versions that it pins, and the hashes of their files."""
    found: dict[str, str] = {}
    for block in re.findall(r"^[a-z0-9].*(?:\n .*)*", (ROOT / "constraints.txt").read_text(), re.MULTILINE):
        name = re.split(r"[=\s]", block)[0]
        found[name] = found.get(name, "") + block + "\n"
    return found


def test_each_requirement_is_pinned_and_each_pin_has_hashes() -> None:
    from packaging.requirements import Requirement

    requirements = [
        *PROJECT["dependencies"],
        *(one for extra in PROJECT["optional-dependencies"].values() for one in extra),
    ]
    pins = _pins()
    names = {re.sub("[._]", "-", Requirement(line).name.lower()) for line in requirements} | {"uv", "tox"}
    assert sorted(names - pins.keys()) == [], "run make constraints"
    assert [name for name, text in pins.items() if "--hash=sha256:" not in text] == []
    assert "://" not in "".join(pins.values())


def _dry(*words: str) -> str:
    """What `make install` would do in a fresh clone."""
    command = ["make", "-n", "install", "VENV=build/none", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=python_environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installer_is_pinned_and_torch_without_cuda_is_taken_without_hashes_of_the_others() -> None:
    pinned = re.search(r"^uv==[\d.]+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert f"pip install --quiet {pinned[0]}\n" in _dry()
    assert "-c constraints.txt -e" in _dry()
    assert "-c build/none/constraints.txt -e '.[plots]'" in _dry("TORCH=cpu", "EXTRAS=plots")
    (line,) = (line for line in _dry("TORCH=cpu").splitlines() if line.startswith("sed "))
    plain = subprocess.run(line.partition(" >")[0], shell=True, cwd=ROOT, capture_output=True, text=True).stdout
    assert "--hash" not in plain
    assert "\\" not in plain
    assert len(plain.splitlines()) > 200


def test_the_image_is_made_by_the_same_command() -> None:
    text = (ROOT / "Containerfile").read_text()
    arguments = re.findall(r"^ARG (\w+)=", text, re.MULTILINE)
    assert arguments == ["TORCH", "EXTRAS"]
    assert "make install " + " ".join(f"{name}=${name}" for name in arguments) in text
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "runs/"} <= {*ignored}
