"""A run's hold on its directory: one writer from the first look until the end, and a stop where it is lost."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fsdp2.checkpoint.disk import disk_errors, explained
from fsdp2.options.errors import ConfigError
from fsdp2.run.directory.lock import LostRunDir, WriterLock
from fsdp2.run.directory.rundir import RunDir
from fsdp2.run.process.group import RunStopped, broadcast, gather, together
from fsdp2.run.process.runtime import world
from fsdp2.units import tell

if TYPE_CHECKING:
    from fsdp2_extra.remote.files import RemoteFiles
    from fsdp2_extra.remote.lease import Lease


class Hold:
    """One run's hold on its directory. Rank 0 has the lock, and at a URL the lease; other ranks know its token.

    As a context it gives the directory back at the end.

    Attributes:
        run: the directory, as rank 0 has chosen it once all ranks agree.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._token = ""  # of the folder's one writer, known to all ranks that see it
        self._lock: WriterLock | None = None
        self._lease: Lease | None = None
        self._also = ExitStack()

    def also(self, release: Callable[[], None]) -> None:
        """Keep something beside the run directory, such as the lock of another folder, until the end."""
        self._also.callback(release)

    def take(self, *, new: bool) -> None:
        """Become the one writer of the run directory, or of a `new` one. Raises ConfigError if it can't be used."""
        self._lock = WriterLock(self.run.path, new=new)
        run = self.run = RunDir(str(self._lock.folder)) if new else self.run
        self._token = self._lock.token
        run.require_plain()
        if run.is_remote:
            from fsdp2_extra.remote.lease import Lease, LeaseTaken

            try:
                self._lease = Lease(cast("RemoteFiles", run.files))
            except (LeaseTaken, ValueError) as error:
                raise ConfigError(f"--run-dir {run.place}: {error}") from None
            except OSError as error:
                raise ConfigError(f"--run-dir {run.place}: can't be used ({error}); check the URL and access") from None
            run.fetch()
        run.require_own()

    def agree(self) -> None:
        """Take over which directory rank 0 has taken. A collective call.

        Raises ConfigError on every rank if one doesn't see the folder that rank 0 writes to: its shards of a
        checkpoint would be missing there.
        """
        place, token = broadcast((self.run.place, self._token))
        if place != self.run.place:
            self.run = RunDir(place)
        if self.run.is_remote:
            return  # each node has a local folder of its own
        self._token = token
        sees = WriterLock.is_seen(self.run.path, token, say=_say_once_a_node)
        blind = [host for host in gather(None if sees else socket.gethostname()) if host is not None]
        if blind:
            raise ConfigError(
                f"--run-dir {self.run.place}: {len(blind)} ranks, on {', '.join(sorted(set(blind)))}, don't see what "
                "rank 0 writes there; give a folder that all nodes share, or a URL"
            )

    def require_folder(self) -> None:
        """Raise LostRunDir if the folder was removed, moved or taken; rank 0 knows which, and what is left of it."""
        if self._lock is not None:
            if (lost := self._lock.lost()) is not None:
                how, now = lost
                raise LostRunDir(f"--run-dir {self._lock.folder}: it {how} during this run; {self._left(now)}")
        elif self._token and not WriterLock.is_seen(self.run.path, self._token, seconds=0):
            raise LostRunDir(f"--run-dir {self.run.place}: it was removed, moved or taken during this run")

    def _left(self, now: Path | None) -> str:
        """Say what a run leaves whose folder is lost, for the user who wants to go on with it."""
        if self.run.is_remote:
            return f"its checkpoints are in {self.run.store.files}; the same command goes on with them"
        store = None if now is None else RunDir(now).store
        steps = [] if store is None else store.committed()
        if store is None or not steps:
            return "no checkpoint of it is left; start again in a folder that stays"
        return f"its last checkpoint is {store.checkpoint(steps[-1])}; --run-dir {now} goes on with it"

    def require_ours(self) -> None:
        """On rank 0, raise LostRunDir or LeaseLost if another run may have taken this run's folder or URL over."""
        self.require_folder()
        if self._lease is not None:
            self._lease.check()

    def stop_if_lost(self) -> None:
        """Raise RunStopped on every rank if the folder is lost. A collective call."""
        lost = None
        if self._lock is not None:
            try:
                self.require_folder()
            except LostRunDir as error:
                lost = str(error)
        lost = broadcast(lost)
        if lost is not None:
            raise RunStopped(lost)

    def write(self, name: str, content: bytes) -> None:
        """Write a file of the run, from any rank. Raises LostRunDir rather than write into another run's folder."""
        self.require_folder()
        with disk_errors(self.run.files):
            self.run.files.write(name, content)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Run the body, which begins to write; a disk that takes nothing is a ConfigError on every rank. Collective.

        From then on nothing is written to a run at a URL while another run may have taken it over.
        """
        with self._together():  # before the body, which has collectives of its own
            if self._lease is not None:
                self._lease.guard(cast("RemoteFiles", self.run.files))
            self.require_folder()
        with self._together():
            yield

    @contextmanager
    def _together(self) -> Iterator[None]:
        with together(), disk_refusals(self.run):
            try:
                yield
            except LostRunDir as error:
                raise ConfigError(str(error)) from None

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, OSError):
                self.require_folder()  # if that is why, it says more than a file that isn't found
        finally:
            self.release(refused=kind is not None)

    def release(self, *, refused: bool) -> None:
        """Give the run directory back; if nothing was run there, without the folder that was made for it."""
        with ExitStack() as each:  # also if one can't be given back
            if self._lock is not None:
                each.callback(self._lock.release, refused=refused)
            if self._lease is not None:
                each.callback(self._lease.release)
            each.callback(self._also.close)


@contextmanager
def disk_refusals(run: RunDir) -> Iterator[None]:
    """Raise a disk's error in the body as a ConfigError that names the run directory."""
    try:
        yield
    except ConfigError:  # says more
        raise
    except Exception as error:
        if full := explained(error, run.path):
            raise ConfigError(f"--run-dir {run.place}: {full.strerror}; mend that or choose another") from None
        raise


def _say_once_a_node(text: str) -> None:
    if world().local_rank == 0:
        tell(f"{socket.gethostname()}: {text}")
