"""One writer to a run at a URL: an object store has no lock that dies with its holder, so the lease expires.

The holder writes LEASE.json anew every few seconds. Who wants it watches that object: one that doesn't change
for its time to live has lost its holder and is taken over. No clock is compared with another machine's.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from typing import Any

from fsdp2.checkpoint.files import Files

LEASE = "LEASE.json"


class LeaseTaken(RuntimeError):
    """Another run holds the lease and is alive."""


class LeaseLost(RuntimeError):
    """This run can't be sure to be the only writer any more."""


class Lease:
    """Held from construction to `release`, and renewed by a thread in between.

    Args:
        seconds: after how long without a renewal it may be taken over.

    Construction waits as long as that if there is a lease, to see whether its holder is alive. Raises
    LeaseTaken if it is, OSError if the place can't be used.
    """

    def __init__(self, files: Files, *, seconds: float = 30.0) -> None:
        self._files, self._seconds = files, seconds
        self._me = {"id": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid(), "seconds": seconds}
        self._beat = 0
        self._trouble: Exception | None = None
        self._wait_for_a_dead_holder()
        self._write()
        # Of two that found it free, the later put stands: both read it after both have written.
        time.sleep(min(1.0, seconds / 10))
        self._require_mine()
        self._renewed = time.monotonic()
        self._lost: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def _read(self) -> dict[str, Any] | None:
        try:
            lease = json.loads(self._files.read(LEASE))
        except FileNotFoundError:
            return None
        except ValueError:
            return {"id": "unreadable", "seconds": self._seconds}
        return lease if isinstance(lease, dict) else {"id": "unreadable", "seconds": self._seconds}

    def _write(self) -> None:
        self._beat += 1
        self._files.write(LEASE, json.dumps({**self._me, "beat": self._beat}).encode())

    def _wait_for_a_dead_holder(self) -> None:
        first = self._read()
        if first is None:
            return
        seconds = float(first.get("seconds", self._seconds))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(seconds / 20)
            now = self._read()
            if now is None:
                return
            if now != first:
                raise LeaseTaken(
                    f"in use by a run that is still going (process {now.get('pid')} on {now.get('host')}); "
                    "wait for it or choose another URL"
                )

    def _require_mine(self) -> None:
        holder = self._read()
        if holder is None or holder.get("id") != self._me["id"]:
            raise LeaseTaken(
                f"taken by another run at the same moment (process {(holder or {}).get('pid')} on "
                f"{(holder or {}).get('host')}); wait for it or choose another URL"
            )

    def _renew(self) -> None:
        while not self._stop.wait(self._seconds / 3):
            try:
                self._require_mine()
                self._write()
                self._renewed = time.monotonic()
            except LeaseTaken as error:
                self._lost = str(error)
                return
            except OSError as error:
                # Not lost yet: it is when it could have expired, which `check` decides.
                self._trouble = error

    def check(self) -> None:
        """Raise LeaseLost if another run has the lease, or may have it because it could not be renewed."""
        if self._lost is not None:
            raise LeaseLost(f"{self._files}: {self._lost}; nothing more is written")
        age = time.monotonic() - self._renewed
        if age > self._seconds:
            raise LeaseLost(
                f"{self._files}: the lease could not be renewed for {age:.0f} s ({self._trouble}), and another run may "
                "have taken it; nothing more is written"
            )

    def release(self) -> None:
        """Let others in at once. A lease that can't be removed expires."""
        self._stop.set()
        self._thread.join()
        if self._lost is None:
            try:
                self._require_mine()
                self._files.unlink(LEASE)
            except (OSError, LeaseTaken) as error:
                print(
                    f"{self._files}: the lease could not be given back ({error}); it expires in {self._seconds:.0f} s"
                )
