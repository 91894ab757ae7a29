from __future__ import annotations

import importlib.util
import logging
import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fsdp2.units import install
from launchers import ray_train
from tests.launchers.through_ray import processes
from tests.remote.s3 import environment, s3_server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The time limit of tests on the cluster is a thread's: Ray's wait for a result loses the exception of an alarm."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(600, method="thread"))


@pytest.fixture(scope="package")
def s3() -> Iterator[str]:
    """An S3 server that this process and the cluster's find by their environment."""
    with s3_server() as endpoint, pytest.MonkeyPatch.context() as patch:
        for name, value in environment(endpoint).items():
            patch.setenv(name, value)
        yield endpoint


@pytest.fixture(scope="package")
def cluster(s3: str) -> Iterator[None]:
    """One cluster on this machine for all tests: starting one takes longer than training."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip(f"needs Ray: {install('ray')}")
    ray_train.prepare()
    import ray  # and not before: it reads its settings when it is imported

    before = ray_processes()
    ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    yield
    ray.shutdown()
    try:
        wait_for_end_of(before)
    except AssertionError as left:
        # An actor whose raylet has gone sometimes hangs in its own end (seen once, with Ray 2.60). That is Ray's: what
        # programs of this project leave is for `no_ray_left` to tell.
        warnings.warn(f"{left}; they are killed", stacklevel=1)
        for process in ray_processes() - before:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@pytest.fixture
def no_ray_left() -> Iterator[None]:
    """Fails a test that leaves a process of Ray's behind."""
    before = ray_processes()
    yield
    wait_for_end_of(before)


def wait_for_end_of(before: set[int]) -> None:
    """Until there are no processes of Ray's but those.

    Ray kills a raylet that hasn't ended a second after its SIGTERM, as on a busy machine. Its agents then try for 60 s
    to report that to a GCS that is gone, before they end too.
    """
    deadline = time.monotonic() + 120
    while left := ray_processes() - before:
        assert time.monotonic() < deadline, f"processes of Ray's are left: {', '.join(map(described, left))}"
        time.sleep(0.2)


def described(process: int) -> str:
    try:
        line = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return f"{process}, ended now"
    return f"{process} ({line.replace(bytes(1), b' ').decode(errors='replace').strip()})"


def ray_processes() -> set[int]:
    return set(processes(rb"ray::|/raylet/raylet|gcs_server|ray/dashboard"))
