"""A test that is `alone` has the machine for itself, and each other test of either lane runs once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from tests.harness import python_environment

ROOT = Path(__file__).parent.parent

CONFTEST = """
from tests import lanes
def pytest_configure(config):
    config.addinivalue_line("markers", "alone: as in the suite")
    lanes.configure(config)
"""
SUITE = """
import json, os, time, pytest
def note(number):
    began = time.monotonic()
    time.sleep(0.05)
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(json.dumps([number, number in ALONE, os.getpid(), began, time.monotonic()]) + "\\n")
ALONE = (1, 2, 5, 20)
@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.alone] * (n in ALONE)) for n in range(24)])
def test_it(number):
    note(number)
"""


def test_what_is_alone_runs_beside_nothing_and_the_rest_in_two_lanes(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_suite.py").write_text(SUITE)
    notes, report = tmp_path / "notes", tmp_path / "suite.xml"
    command = [sys.executable, "-m", "pytest", "-n2", "--dist=worksteal", "-p", "no:cacheprovider", "test_suite.py"]
    variables = {"NOTES": str(notes), "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": f"--junitxml={report}"}
    environment = {name: value for name, value in python_environment().items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment | variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout
    seen = [json.loads(line) for line in notes.read_text().splitlines()]
    assert sorted(number for number, *_ in seen) == list(range(24))
    assert len({lane for _, _, lane, *_ in seen} - {os.getpid()}) == 2
    for number, alone, _, began, ended in seen:
        beside = {other for other, _, _, since, until in seen if other != number and since < ended and began < until}
        assert not (alone and beside), f"{number} ran beside {beside}"
    together = any(a[0] < b[0] and a[3] < b[4] and b[3] < a[4] for a in seen for b in seen)
    assert together, "no two tests ran at the same time"
    (suite,) = ET.parse(report).getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("24", "0"), "one report has both lanes"
