"""Where the suite's time goes:  python -m tests.profile suite.xml

The file is pytest's:  PYTEST_ADDOPTS=--junitxml=$PWD/suite.xml make test
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from xml.etree import ElementTree

SHOWN = 0.01  # of the whole time: what takes less is summed up in one row


def descending(seconds: Mapping[str, float], count: int) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])[:count]


def main(path: str) -> None:
    seconds: defaultdict[str, float] = defaultdict(float)
    tests: Counter[str] = Counter()
    slowest: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        module, took = case.get("classname", ""), float(case.get("time", 0))
        first = module.split(".")[1]  # tests.test_launch, or tests.remote.test_files
        place = f"`tests/{first}.py`" if first.startswith("test_") else f"`tests/{first}/`"
        seconds[place] += took
        tests[place] += 1
        name = f"{module.removeprefix('tests.')}::{case.get('name', '').partition('[')[0]}"
        slowest[name] = max(slowest[name], took)  # of its cases
    whole = sum(seconds.values())
    rest = [place for place, took in seconds.items() if took < SHOWN * whole]
    print("| where | tests | seconds |\n|---|---:|---:|")
    for place, took in descending(seconds, len(seconds) - len(rest)):
        print(f"| {place} | {tests[place]:,} | {took:.0f} |")
    print(
        f"| {len(rest)} more | {sum(tests[place] for place in rest):,} | {sum(seconds[place] for place in rest):.0f} |"
    )
    print(f"| all | {sum(tests.values()):,} | {whole:.0f} |")
    print("\n| the slowest tests, one case of each | seconds |\n|---|---:|")
    for test, took in descending(slowest, 10):
        print(f"| `{test}` | {took:.0f} |")


if __name__ == "__main__":
    main(sys.argv[1])
