"""A pytest plugin for a run that may be interrupted: a JUnit file that is valid at every moment, and goes on from it.

    python3 -m tests.gpu --out results     (the same again goes on)

What has passed according to the file isn't run again; what has failed comes after what hasn't run yet. Tests run in the
order of SLICES, and none begins for which there is too little time.
"""

from __future__ import annotations

import os
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.gpu.deadline import Deadline

FILE, UNTIL, QUICK, SLICE = "FSDP2_JUNIT", "FSDP2_UNTIL", "FSDP2_QUICK", "FSDP2_SLICE"
NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
LONGEST = 20_000  # characters of a test's output


@dataclass(frozen=True)
class Slice:
    """Tests that cost about the same, by patterns of `file::test`; seconds that one may take."""

    patterns: tuple[str, ...]
    seconds: float


# The most telling first: each later one needs what those before it show. Patterns are tried in this order.
SLICES = {
    "first": Slice(
        (
            "test_losses.py::test_close_to_the_cpu*",
            "test_process.py::test_one_group_takes*<1]",
            "test_losses.py::test_ddp_and_a_plain*",
            "test_memory.py::test_the_ledger*",
            "test_checkpoints.py::test_a_resumed_run*<1-flags0]",
        ),
        30,
    ),
    "losses": Slice(("test_losses.py::*",), 45),
    "memory": Slice(("test_memory.py::*",), 45),
    "pinned": Slice(("test_process.py::test_batches*", "test_process.py::test_one_group*"), 30),
    "checkpoints": Slice(("test_checkpoints.py::*",), 45),
    "launches": Slice(("test_process.py::*", "test_doctor.py::test_one_gpu*"), 90),
    "rest": Slice(("*",), 90),
}


def slice_of(nodeid: str) -> str:
    """The first slice with a pattern for `folder/file::test`."""
    return _place(nodeid)[0]


def _place(nodeid: str) -> tuple[str, int]:
    """The slice, and where in it: tests come in the order of the patterns."""
    # "[" begins a set in a pattern, and stands for itself in a test's name.
    plain = nodeid.rpartition("/")[2].replace("[", "<")
    places = ((key, at) for key, one in SLICES.items() for at, p in enumerate(one.patterns) if fnmatch(plain, p))
    return next(places)


@dataclass
class Case:
    """A test: passed, failed, skipped, or begun; and what it has to say."""

    nodeid: str
    outcome: str = "begun"
    seconds: float = 0.0
    message: str = ""
    output: str = ""


class JUnit:
    """The file. It is replaced as a whole whenever a test begins or ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cases: dict[str, Case] = {}
        if path.is_file():
            for element in ET.parse(path).getroot().iter("testcase"):
                case = Case(element.get("nodeid", ""), "passed", float(element.get("time", 0)))
                for child in element:
                    if child.tag in TAGS:
                        case.outcome, case.message = TAGS[child.tag], child.get("message", "")
                    elif child.tag == "system-out":
                        case.output = child.text or ""
                self.cases[case.nodeid] = case

    def write(self) -> None:
        suite = ET.Element("testsuite", name="gpu", tests=str(len(self.cases)))
        counts = dict.fromkeys(TAGS, 0)
        for case in self.cases.values():
            file, _, name = case.nodeid.partition("::")
            element = ET.SubElement(
                suite,
                "testcase",
                classname=file.removesuffix(".py").replace("/", "."),
                name=clean(name),
                nodeid=clean(case.nodeid),
                time=f"{case.seconds:.3f}",
            )
            for tag, outcome in TAGS.items():
                if case.outcome == outcome:
                    counts[tag] += 1
                    ET.SubElement(element, tag, message=clean(case.message))
            if case.output:
                ET.SubElement(element, "system-out").text = clean(case.output)
        for tag, key in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            suite.set(key, str(counts[tag]))
        suite.set("time", f"{sum(case.seconds for case in self.cases.values()):.3f}")
        root = ET.Element("testsuites")
        root.append(suite)
        new = self.path.with_name(f".{self.path.name}.new")
        new.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True))
        os.replace(new, self.path)


# A test in which the process ended is an error: it never came to a result.
TAGS = {"failure": "failed", "error": "begun", "skipped": "skipped"}


def clean(text: str) -> str:
    return NOT_IN_XML.sub("?", text)[-LONGEST:]


class GoOn:
    """The plugin."""

    def __init__(self, junit: JUnit, deadline: Deadline, slices: Sequence[str] = (), *, quick: bool = False) -> None:
        self.junit, self.deadline, self.slices, self.quick = junit, deadline, slices, quick
        self.left = 0

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        before = {case.nodeid: case.outcome for case in self.junit.cases.values()}
        order = list(SLICES)

        def turn(item: pytest.Item) -> tuple[bool, int, int]:
            key, at = _place(item.nodeid)
            return before.get(item.nodeid) in ("failed", "begun"), order.index(key), at

        wanted = [
            item
            for item in items
            if before.get(item.nodeid) != "passed" and (not self.slices or slice_of(item.nodeid) in self.slices)
        ]
        wanted.sort(key=turn)
        if self.quick:
            first: dict[str, pytest.Item] = {}
            for item in wanted:
                first.setdefault(slice_of(item.nodeid), item)
            wanted = list(first.values())
        if dropped := [item for item in items if item not in wanted]:
            config.hook.pytest_deselected(items=dropped)
        items[:] = wanted
        self.left = len(items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        needed = SLICES[slice_of(item.nodeid)].seconds / (3 if self.quick else 1)
        if not self.deadline.allows(needed):
            item.session.shouldstop = (
                f"{self.deadline.left():.0f} s are left and the next test may take {needed:.0f}: {self.left} tests "
                "have not run; the same command goes on with them"
            )
            return True
        self.left -= 1
        self.junit.cases[item.nodeid] = Case(item.nodeid, message="the process ended in this test")
        self.junit.write()
        return None

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        outcome = yield
        report = outcome.get_result()  # type: ignore[attr-defined]
        case = self.junit.cases[item.nodeid]
        case.seconds += report.duration
        if report.skipped:
            case.outcome, case.message = "skipped", str(report.longrepr[-1] if report.longrepr else "")
        elif report.failed:
            case.outcome, case.message = "failed", f"{report.when}: {report.longreprtext[-4000:]}"
        elif report.when == "call":
            case.outcome, case.message = "passed", ""
        if report.when == "teardown":
            case.output = "\n".join(text for _, text in report.sections)
            self.junit.write()


def pytest_configure(config: pytest.Config) -> None:
    """For `-p tests.gpu.junit`: what `python -m tests.gpu` has put into the environment."""
    until = Deadline(float(os.environ[UNTIL]) - time.time())
    slices = [name for name in os.environ.get(SLICE, "").split(",") if name]
    quick = os.environ.get(QUICK) == "1"
    config.pluginmanager.register(GoOn(JUnit(Path(os.environ[FILE])), until, slices, quick=quick), "go-on")
