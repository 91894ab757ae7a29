"""A run's decisions before its start, and its hold on the run directory until its end."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from fsdp2.checkpoint.disk import disk_errors, explained
from fsdp2.options.errors import ConfigError
from fsdp2.run.directory.lock import LostRunDir, WriterLock
from fsdp2.run.directory.rundir import RunDir
from fsdp2.run.process.group import RunStopped, broadcast, end_together, gather
from fsdp2.run.process.runtime import world
from fsdp2.run.schedule import Length
from fsdp2.units import tell

if TYPE_CHECKING:
    from fsdp2_extra.remote.files import RemoteFiles
    from fsdp2_extra.remote.lease import Lease


class Origin(NamedTuple):
    """The checkpoint that a run goes on from, or none.

    Attributes:
        checkpoint: where it is.
        partial: of it the weights that fit, and nothing else.
        in_memory: it is in each node's memory, and of this run.
        before: the length of the run that wrote it, as rank 0 knows.
        newest_kept: the step after which this run's directory's checkpoints are set aside; None for none of them.
    """

    checkpoint: str | None = None
    partial: bool = False
    in_memory: bool = False
    before: Length | None = None
    newest_kept: int | None = None


class Job:
    """A run's hold on its directory, and the decisions before its start.

    As a context it gives the run directory back at the end.

    Attributes:
        run: where it is written, as rank 0 has chosen once all ranks agree.
        origin: what it goes on from.
        optimizer: settings that came with an import, and that no flag says.
        note: what the opening event says of these decisions.
    """

    def __init__(self, place: str, model: str = "", origin: Origin = Origin()) -> None:  # noqa: B008 - never changes
        """`model`: what the model on this rank is made of."""
        self.run, self.origin, self._model = RunDir(place), origin, model
        self.optimizer: dict[str, Any] = {}
        self.note: str | None = None
        self._token = ""  # of the folder's one writer, known to all ranks that see it
        self._lock: WriterLock | None = None
        self._lease: Lease | None = None
        self._also_held = ExitStack()

    def go_on_from(self, origin: Origin, *notes: str | None) -> None:
        """Decide what the run goes on from, and say why in the opening event."""
        self.origin = origin
        for note in notes:
            self.add_note(note)

    def hold(self, release: Callable[[], None]) -> None:
        """Keep something beside the run directory, such as the lock of another folder, until the end."""
        self._also_held.callback(release)

    def take(self) -> None:
        """Become the one writer of the run directory. Raises ConfigError if another run is, or it can't be used."""
        run, self._lock = self.run, WriterLock(self.run.path)
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

    def has_folder(self) -> None:
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

    def still_ours(self) -> None:
        """On rank 0, raise LostRunDir or LeaseLost if another run may have taken this run's folder or URL over."""
        self.has_folder()
        if self._lease is not None:
            self._lease.check()

    def stop_if_lost(self) -> None:
        """Raise RunStopped on every rank if the folder is lost. A collective call."""
        lost = None
        if self._lock is not None:
            try:
                self.has_folder()
            except LostRunDir as error:
                lost = str(error)
        lost = broadcast(lost)
        if lost is not None:
            raise RunStopped(lost)

    def write(self, name: str, content: bytes) -> None:
        """Write a file of the run, from any rank. Raises LostRunDir rather than write into another run's folder."""
        self.has_folder()
        with disk_errors(self.run.files):
            self.run.files.write(name, content)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Run the body, which begins to write; a disk that takes nothing is a ConfigError on every rank. Collective.

        From then on nothing is written to a run at a URL while another run may have taken it over.
        """
        failure: Exception | None = None
        try:
            if self._lease is not None:
                self._lease.guard(cast("RemoteFiles", self.run.files))
            self.has_folder()
            yield
        except Exception as error:
            failure = ConfigError(str(error)) if isinstance(error, LostRunDir) else error
            if full := explained(error, self.run.path):
                failure = ConfigError(f"--run-dir {self.run.place}: {full.strerror}; mend that or choose another")
        end_together(failure)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, OSError):
                self.has_folder()  # if that is why, it says more than a file that isn't found
        finally:
            self.release(refused=kind is not None)

    def release(self, *, refused: bool) -> None:
        """Give the run directory back; if nothing was run there, without the folder that was made for it."""
        with ExitStack() as each:  # also if one can't be given back
            if self._lock is not None:
                each.callback(self._lock.release, refused=refused)
            if self._lease is not None:
                each.callback(self._lease.release)
            each.callback(self._also_held.close)

    def agree(self) -> None:
        """Take over what rank 0 has found out; it alone has looked at the run directory. A collective call.

        Raises ConfigError on every rank if one doesn't see the folder that rank 0 writes to: its shards of a
        checkpoint would be missing there. So it does if one has made another model: they would wait for ever.
        """
        found = self.run.place, self.origin.checkpoint, self.note, self._token
        place, checkpoint, self.note, token = broadcast(found)
        if place != self.run.place:
            self.run = RunDir(place)
        self.origin = self.origin._replace(checkpoint=checkpoint)
        sees = self.run.is_remote or WriterLock.is_seen(self.run.path, token, say=_say_once_a_node)
        if not self.run.is_remote:  # else each node has a local folder of its own
            self._token = token
        mine = hashlib.sha256(self._model.encode()).hexdigest()
        hosts, models = zip(*gather((None if sees else socket.gethostname(), mine)), strict=True)
        if other := [rank for rank, model in enumerate(models) if model != models[0]]:
            raise ConfigError(
                f"--model: rank {other[0]} made a model with other names, shapes or dtypes than rank 0's; the model "
                "must follow from the flags alone"
            )
        blind = [host for host in hosts if host is not None]
        if blind:
            raise ConfigError(
                f"--run-dir {self.run.place}: {len(blind)} ranks, on {', '.join(sorted(set(blind)))}, don't see what "
                "rank 0 writes there; give a folder that all nodes share, or a URL"
            )

    def restores_own(self) -> bool:
        """Return whether the checkpoint is of this run, and not of another that this one goes on from."""
        checkpoint = self.origin.checkpoint or ""
        return not self.origin.partial and (self.origin.in_memory or checkpoint.startswith(f"{self.run.store.files}/"))

    def staying(self) -> list[int]:
        """Steps of the run's checkpoints that stay until newer ones take their place."""
        newest = self.origin.newest_kept
        return [step for step in self.run.store.committed() if newest is None or step <= newest]

    def set_aside_newer(self) -> None:
        """On rank 0, rename the checkpoints that a run which goes back will write again."""
        if self.origin.newest_kept is not None:
            self.run.store.set_aside(self.origin.newest_kept)

    def add_note(self, text: str | None) -> None:
        """Add to what the opening event says, on rank 0, which alone shows and writes it."""
        self.note = "; ".join(filter(None, (self.note, text))) or None

    def opening_event(self, data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The `start` or `resume` event."""
        data = {**data, "note": self.note}
        if self.origin.checkpoint is None:
            return "start", data
        return "start" if self.origin.partial else "resume", {**data, "checkpoint": self.origin.checkpoint}

    def wants_full_model(self, step: int, *, changed: bool) -> bool:
        """Return whether full-model.pt of this step has to be written, as rank 0 sees it. A collective call.

        Raises RunStopped on every rank if the folder is lost.
        """
        self.stop_if_lost()
        return broadcast(changed or not self.run.has_full_model(step))


def _say_once_a_node(text: str) -> None:
    if world().local_rank == 0:
        tell(f"{socket.gethostname()}: {text}")
