"""One writer to a run at a URL: an object store has no lock that dies with its holder, so the lease expires.

The holder rewrites LEASE.json every few seconds. Who wants it watches that object: one that doesn't change
for its time to live has lost its holder and is taken over. No clock is compared with another machine's.

    FSDP2_LEASE_SECONDS  that time to live; 30
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from typing import Any

from fsdp2.checkpoint.files import NotTheWriter
from fsdp2.units import tell
from fsdp2_extra.remote.files import RemoteFiles, positive_number

LEASE = "LEASE.json"
# Nobody writes a longer one; a damaged object must not make anyone wait for a day.
LONGEST_SECONDS = 600.0


class LeaseTaken(NotTheWriter):
    """Another run holds the lease and is alive."""


class LeaseLost(NotTheWriter):
    """Another run has the lease, or has had it."""


class Lease:
    """Held from construction to `release`, and renewed by a thread in between.

    Args:
        files: of the run. While the lease isn't certain, what changes them is refused.
        seconds: after how long without a renewal it may be taken over; unset = $FSDP2_LEASE_SECONDS.

    Construction waits as long as the holder's lease lives, if there is one, to see whether that renews it.
    Raises LeaseTaken if it does, OSError if the place can't be used, ValueError for a wrong variable.
    """

    def __init__(self, files: RemoteFiles, *, seconds: float | None = None) -> None:
        seconds = positive_number("FSDP2_LEASE_SECONDS", 30) if seconds is None else seconds
        self._files, self._seconds = files, min(seconds, LONGEST_SECONDS)
        # A renewal that hangs is given up in time for another one. It is not repeated blindly: it must never
        # overwrite the lease of whoever has taken over in the meantime.
        self._hasty = files.hasty(self._seconds / 4)
        # Of two that found it free, the later put stands: each reads after a pause in which the other has put.
        self._pause = min(1.0, self._seconds / 10)
        self._me = {"id": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid(), "seconds": self._seconds}
        self._beat = 0
        self._lost: str | None = None
        self._renewing = threading.Lock()
        self._dead = self._wait_for_a_dead_holder()
        files.again("taking the lease of", self._take)
        self.guard(files)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_stopped, name="lease", daemon=True)
        self._thread.start()

    def _wait_for_a_dead_holder(self) -> dict[str, Any] | None:
        """The lease of a holder that has been seen to be dead; None if there is no lease."""
        first = _read(self._files)
        if first is None:
            return None
        seconds = _seconds_of(first, self._seconds)
        holder = f"{_who(first)}, or that run was killed"
        tell(f"{self._files} is in use by {holder}; waiting up to {seconds:.0f} s to see which")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(seconds / 20)
            now = _read(self._files)
            if now is None:
                return None
            if now != first:
                raise LeaseTaken(f"in use by a run that is still going ({_who(now)}); wait or choose another URL")
        return first

    def _take(self) -> None:
        began = time.monotonic()
        # An earlier attempt may have put it and not heard of that, and others may have come since.
        holder = _read(self._hasty)
        if holder in (None, self._dead) or self._is_mine(holder):
            self._write()
            time.sleep(self._pause + time.monotonic() - began)
            holder = _read(self._hasty)
        if not self._is_mine(holder):
            raise LeaseTaken(f"taken by another run at the same moment ({_who(holder)}); wait or choose another URL")
        self._renewed = began

    def _is_mine(self, holder: dict[str, Any] | None) -> bool:
        return holder is not None and holder.get("id") == self._me["id"]

    def _write(self) -> None:
        self._beat += 1
        self._hasty.write(LEASE, json.dumps({**self._me, "beat": self._beat}).encode())

    def _require_mine(self) -> None:
        if self._lost is None:
            holder = _read(self._hasty)
            if not self._is_mine(holder):
                self._lost = "the lease is gone" if holder is None else f"{_who(holder)} has taken it over"
        if self._lost is not None:
            raise LeaseLost(f"{self._files}: {self._lost}; this run writes nothing more there")

    def _renew(self) -> None:
        """Rewrite the lease if it is still ours. Raises LeaseLost if it isn't, OSError if that isn't known."""
        with self._renewing:
            began = time.monotonic()
            self._require_mine()
            self._write()
            if began - self._renewed > self._seconds:
                # Somebody who has watched it expire may be about to take it.
                time.sleep(self._pause)
                self._require_mine()
            # The time before the put: nobody can have seen it earlier.
            self._renewed = began

    def _renew_until_stopped(self) -> None:
        wait = self._seconds / 3
        while not self._stop.wait(wait):
            try:
                self._renew()
                wait = self._seconds / 3
            except LeaseLost as error:
                tell(str(error))
                return
            except OSError:
                # Nothing is lost yet; whoever writes next renews it, or says why that fails.
                wait = self._seconds / 10

    def guard(self, files: RemoteFiles) -> None:
        """Refuse changes to `files`, by LeaseLost, from when this lease is lost."""
        files.guards.append(self._require_fresh)

    def _require_fresh(self) -> None:
        """Check the lease if it hasn't been renewed lately: nobody takes it over within its time to live."""
        if self._lost is not None or time.monotonic() - self._renewed > self._seconds / 2:
            self._renew()

    def check(self) -> None:
        """Renew it now. Raises LeaseLost if another run has the lease or has had it, OSError if that isn't known."""
        self._files.again("renewing the lease of", self._renew)

    def release(self) -> None:
        """Let others in at once. A lease that can't be removed expires."""
        self._stop.set()
        self._thread.join()
        if self._lost is not None:
            return
        try:
            self._require_mine()
            self._lost = "the lease was given back"
            self._hasty.unlink(LEASE)
        except (OSError, LeaseLost) as error:
            tell(f"the lease could not be given back: {error}")


def _read(files: RemoteFiles) -> dict[str, Any] | None:
    try:
        lease = json.loads(files.read(LEASE))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        return {}
    return lease if isinstance(lease, dict) else {}


def _seconds_of(lease: dict[str, Any], otherwise: float) -> float:
    seconds = lease.get("seconds")
    return min(seconds, LONGEST_SECONDS) if isinstance(seconds, (int, float)) and seconds > 0 else otherwise


def _who(lease: dict[str, Any] | None) -> str:
    return f"process {lease.get('pid')} on {lease.get('host')}" if lease else "an unknown process"
