from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp2_extra.remote import files as remote
from fsdp2_extra.remote.files import RemoteFiles
from tests.harness import Ranks, small
from tests.remote.runs import Events, Run, main_at
from tests.remote.s3 import Bucket, Proxy, environment, s3_server, surroundings


@pytest.fixture(scope="package")
def network() -> Iterator[tuple[str, Proxy]]:
    with s3_server() as endpoint, Proxy(endpoint) as proxy:
        yield endpoint, proxy


@pytest.fixture
def proxy(network: tuple[str, Proxy]) -> Iterator[Proxy]:
    yield network[1]
    network[1].heal()


@pytest.fixture
def bucket(network: tuple[str, Proxy]) -> Bucket:
    return Bucket(network[0])


@pytest.fixture
def here(proxy: Proxy, tmp_path: Path) -> Iterator[None]:
    """This process where `run_at`'s ranks are by default, with short pauses."""
    (tmp_path / "here").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, surroundings(environment(proxy.endpoint), tmp_path / "here"):
        patch.setattr(remote, "FIRST_PAUSE_SECONDS", 0.02)
        yield


@pytest.fixture
def files(here: None, bucket: Bucket) -> RemoteFiles:
    return RemoteFiles(bucket.url())


@pytest.fixture
def run_at(ranks: Ranks, proxy: Proxy, bucket: Bucket, tmp_path: Path) -> Run:
    """`fsdp2.train` on N ranks with s3://BUCKET/run, on a "machine" of its own; each rank's events and error."""

    def run(
        *flags: str, n: int = 2, steps: int = 6, machine: str = "here", url: str | None = None, **more: str
    ) -> list[tuple[Events, str | None]]:
        (tmp_path / machine).mkdir(exist_ok=True)
        line = small(url or bucket.url(), f"--max-steps={steps}", *flags)
        results: list[tuple[Events, str | None]] = ranks.run(
            main_at, environment(proxy.endpoint, **more), tmp_path / machine, line, ranks=n
        )
        return results

    return run
