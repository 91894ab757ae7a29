"""One writer to a run at a URL: who is alive keeps it, who is dead loses it, and who has lost it writes nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from fsdp2.checkpoint.files import Unreachable
from fsdp2_extra.remote.files import RemoteFiles
from fsdp2_extra.remote.lease import LEASE, Lease, LeaseLost, LeaseTaken
from tests.remote.runs import other_lease
from tests.remote.s3 import EVER, Bucket, Proxy


def stop_renewing(lease: Lease) -> None:
    """As in a process that stands still."""
    lease._stop.set()
    lease._thread.join()


def is_alive(lease: Lease) -> bool:
    try:
        lease.check()
    except LeaseLost:
        return False
    return True


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.alone
def test_who_is_alive_keeps_it(files: RemoteFiles, capsys: pytest.CaptureFixture[str]) -> None:
    lease = Lease(files, seconds=1)
    with pytest.raises(LeaseTaken, match=r"in use by a run that is still going \(process \d+ on .*\); wait or"):
        Lease(RemoteFiles(files.url), seconds=1)
    assert "or that run was killed; waiting up to" in capsys.readouterr().err
    lease.check()
    files.write("name", b"")
    lease.release()
    assert files.list("") == ["name"]
    Lease(RemoteFiles(files.url), seconds=1).release()
    assert capsys.readouterr().err == "", "nobody waits for a lease that was given back"
    with pytest.raises(LeaseLost, match="the lease was given back"):
        files.write("name", b"")


HOLDER = """
import sys, time
from fsdp2_extra.remote.lease import Lease
from fsdp2_extra.remote.files import RemoteFiles
lease = Lease(RemoteFiles(sys.argv[1]), seconds=1)
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.alone
def test_who_was_killed_loses_it(files: RemoteFiles, capsys: pytest.CaptureFixture[str]) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, files.url], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LeaseTaken, match=f"process {holder.pid} on "):
            Lease(RemoteFiles(files.url), seconds=1)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    dead = json.loads(files.read(LEASE))
    assert dead["pid"] == holder.pid
    lease = Lease(files, seconds=1)
    assert (
        f"by process {holder.pid} on {dead['host']}, or that run was killed; waiting up to 1 s"
        in capsys.readouterr().err
    )
    assert json.loads(files.read(LEASE))["id"] != dead["id"]
    lease.release()


@pytest.mark.parametrize("now", [other_lease(), b"{", b"[]", None], ids=["another's", "torn", "no object", "gone"])
def test_who_has_lost_it_writes_nothing(files: RemoteFiles, bucket: Bucket, now: bytes | None) -> None:
    store = files.at("checkpoints")
    store.write("name", b"before")
    lease = Lease(files, seconds=20)  # a busy machine takes a second to take it
    stop_renewing(lease)  # whose put could replace what comes now
    if now is None:
        bucket.delete(f"run/{LEASE}")
    else:
        bucket.put(f"run/{LEASE}", now)
    message = {None: "the lease is gone", other_lease(): "process 7 on elsewhere has taken it over"}.get(
        now, "an unknown process has taken it over"
    )
    with pytest.raises(LeaseLost, match=f"^{files.url}: {message}; this run writes nothing more there$"):
        lease.check()
    changes = [
        lambda: store.write("name", b"after"),
        lambda: store.put(__file__, "name"),
        lambda: store.unlink("name"),
        lambda: store.rename("name", "other"),
        lambda: store.mkdir("folder"),
        lambda: RemoteFiles.write(files, "metrics.jsonl", b""),
    ]
    for change in changes:
        with pytest.raises(LeaseLost, match="writes nothing more"):
            change()
    lease.release()
    assert bucket.get("run/checkpoints/name") == b"before"
    left = {"run/checkpoints/name": b"before"} | ({} if now is None else {f"run/{LEASE}": now})
    assert {key: bucket.get(key) for key in bucket.objects()} == left


def test_who_stood_still_finds_out_before_it_writes(files: RemoteFiles, bucket: Bucket) -> None:
    lease = Lease(files, seconds=2)
    stop_renewing(lease)
    second_files = RemoteFiles(files.url)
    second = Lease(second_files, seconds=2)
    with pytest.raises(LeaseLost, match="has taken it over"):
        files.write("name", b"of the first")
    second_files.write("name", b"of the second")
    second.check()
    second.release()
    assert bucket.get("run/name") == b"of the second"


def test_a_renewal_that_comes_late_takes_nothing_back(files: RemoteFiles, proxy: Proxy, bucket: Bucket) -> None:
    lease = Lease(files, seconds=1)
    # The next renewal has seen that the lease is its own, and then its put is on its way for a long time.
    proxy.fail("hang", f"PUT .*{LEASE}", times=1)
    wait_until(lambda: proxy.count("hang"))
    bucket.put(f"run/{LEASE}", other_lease())
    lease._thread.join(timeout=30)
    assert not lease._thread.is_alive()
    with pytest.raises(LeaseLost):
        lease.check()
    assert bucket.get(f"run/{LEASE}") == other_lease()
    lease.release()


def test_a_store_that_is_away_loses_nothing_while_nobody_takes_it(files: RemoteFiles, proxy: Proxy) -> None:
    lease = Lease(files, seconds=0.5)
    proxy.fail("refuse", times=EVER)
    with pytest.raises(Unreachable, match=f"renewing the lease of {files.url} failed 4 times, last with Unreachable"):
        lease.check()
    time.sleep(0.6)
    with pytest.raises(
        Unreachable, match=f"writing name to {files.url} failed 4 times, last with Unreachable: .*LEASE"
    ):
        files.write("name", b"")
    proxy.heal()
    files.write("name", b"")
    lease.check()
    lease.release()


def test_of_many_at_once_one_gets_it(files: RemoteFiles) -> None:
    started = threading.Barrier(4)
    leases: list[Lease] = []
    refused: list[str] = []

    def run() -> None:
        place = RemoteFiles(files.url)
        started.wait()
        try:
            leases.append(Lease(place, seconds=4))
        except LeaseTaken as error:
            refused.append(str(error))

    for _ in range(3):
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Who was stopped for long in the middle of taking it has overwritten another's: that one finds out.
        alive = [lease for lease in leases if is_alive(lease)]
        assert len(alive) == 1
        for lease in leases:
            lease.release()
        leases.clear()
    assert refused
    assert files.list("") == []


@pytest.mark.parametrize(
    "left", [b"", b"{}", b"null", other_lease(seconds="long"), other_lease(seconds=-1), other_lease(seconds=None)]
)
def test_a_damaged_lease_is_waited_for_and_taken(files: RemoteFiles, bucket: Bucket, left: bytes) -> None:
    bucket.put(f"run/{LEASE}", left)
    lease = Lease(files, seconds=1.0)  # a renewal has a quarter of it, also on a busy machine
    lease.check()
    lease.release()
    assert bucket.objects() == []


def test_a_refused_store_leaves_no_lease_and_no_thread(files: RemoteFiles, proxy: Proxy, bucket: Bucket) -> None:
    before = threading.active_count()
    proxy.fail("refuse", f"PUT .*{LEASE}", times=EVER)
    with pytest.raises(Unreachable, match="taking the lease of"):
        Lease(files, seconds=1)
    assert [thread.name for thread in threading.enumerate() if thread.name == "lease"] == []
    assert threading.active_count() <= before + 2
    assert bucket.objects() == []
