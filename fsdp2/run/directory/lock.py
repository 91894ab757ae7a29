"""One writer to a folder: a lock that the operating system frees, and that notices when its folder has gone."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from fsdp2.checkpoint.disk import explained, file_system
from fsdp2.checkpoint.files import LocalFiles, NotTheWriter
from fsdp2.options.errors import ConfigError
from fsdp2.units import tell

# A network file system may show other nodes an older state of a folder for as long; NFS does for up to 60 s.
SECONDS_TO_BE_SEEN = 90.0
_SECONDS_IN_SILENCE = 10.0
# On these a server holds locks. NFSv4 frees those of a node that has died after its lease, which is 90 s by default.
NETWORK = ("nfs", "lustre", "ceph", "gpfs", "beegfs", "cifs", "smb")
SECONDS_OF_THE_DEAD = 120.0
# Errors of a folder that was removed or moved; the last is NFS's word for it.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class LostRunDir(NotTheWriter):
    """The run directory was removed, moved or taken while a run was writing there."""


def new_folder(path: Path) -> Path:
    """Make a folder that nobody else has made, with a number behind its name where there is one. Raises OSError."""
    LocalFiles(path.parent).mkdir("")
    for number in count(1):
        made = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with suppress(FileExistsError):
            made.mkdir()
            break
    return made


class WriterLock:
    """Holds a folder for one writer; the operating system frees it when the process dies.

    `flag` is what the folder was given by, `name` the file that is locked, and with `new` it is a `new_folder`.
    """

    def __init__(self, folder: Path, *, flag: str = "--run-dir", name: str = ".lock", new: bool = False) -> None:
        """Raises ConfigError if the folder can't be written or locked, or another run has it."""
        self._is_new = new or not folder.exists()
        self.token = uuid.uuid4().hex  # of this run, for who wants to know whether they see the same folder
        self._file = self._folder = -1
        try:
            folder = new_folder(folder) if new else folder
            self.folder, self._path = folder, folder / name
            LocalFiles(folder).mkdir("")
            self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            how = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
            self._file = os.open(self._path, how, 0o644)
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise ConfigError(f"{flag} {folder}: its {name} isn't a plain file; remove it or choose another folder")
            self._lock(flag)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, self.token.encode(), 0)
            os.fsync(self._file)  # other nodes read it
            os.fsync(self._folder)
        except OSError as error:
            self._close()
            why = explained(error, folder) or error
            raise ConfigError(f"{flag} {folder}: can't be written ({why.strerror}); choose a folder that can") from None
        except ConfigError:
            self._close()
            raise

    def _lock(self, flag: str) -> None:
        kind = file_system(self.folder)
        until = time.monotonic() + (SECONDS_OF_THE_DEAD if kind.startswith(NETWORK) else 0.0)
        said = False
        try:
            while not self._is_locked():
                if time.monotonic() >= until:
                    raise ConfigError(
                        f"{flag} {self.folder}: in use by a run that is still going; wait for it or choose another "
                        "folder"
                    )
                if not said:
                    said = True
                    tell(
                        f"{flag} {self.folder}: in use; waiting up to {SECONDS_OF_THE_DEAD:.0f} s, since {kind} keeps "
                        "the lock of a node that has died"
                    )
                time.sleep(0.5)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL):
                raise
            raise ConfigError(
                f"{flag} {self.folder}: its file system can't lock files ({error.strerror}), so that two runs could "
                "write there; mount it with locks (Lustre: -o flock), choose another folder, or a URL for --run-dir"
            ) from None

    def _is_locked(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def lost(self) -> tuple[str, Path | None] | None:
        """None while the folder is this writer's; else how it was lost, and where it is now, if anywhere.

        The lock itself is no proof: it holds a file, which may have left its path.
        """
        try:
            there, lock = os.stat(self.folder), os.stat(self._path)
            mine = os.path.samestat(there, os.fstat(self._folder)) and os.path.samestat(lock, os.fstat(self._file))
            if mine and self._path.read_bytes() == self.token.encode():
                return None
        except OSError as error:
            if error.errno not in _GONE:
                return f"can't be looked at any more ({error.strerror})", self.folder
        return self._where()

    def _where(self) -> tuple[str, Path | None]:
        try:
            now = os.readlink(f"/proc/self/fd/{self._folder}")
        except OSError:
            return "was removed or moved", None  # there is no /proc: which, can't be told
        if now.endswith(" (deleted)") or not os.path.isdir(now):
            return "was removed", None
        if Path(now) == self.folder.resolve():
            return f"has lost its {self._path.name}: it was removed, or another run has written there", self.folder
        return f"was moved to {now}", Path(now)

    @staticmethod
    def is_seen(
        folder: Path, token: str, *, seconds: float = SECONDS_TO_BE_SEEN, say: Callable[[str], None] = lambda _: None
    ) -> bool:
        """Return whether the writer with this token has this folder, waiting for a network file system to show it.

        `say` gets one line if that takes long.
        """
        began, said = time.monotonic(), False
        while True:
            with suppress(OSError):  # it may be on its way
                os.listdir(folder)  # makes NFS ask the server again
                if (folder / ".lock").read_bytes() == token.encode():
                    return True
            waited = time.monotonic() - began
            if waited >= seconds:
                return False
            if waited > _SECONDS_IN_SILENCE and not said:
                said = True
                say(
                    f"waiting up to {seconds:.0f} s to see what rank 0 has written to {folder}: a network file system "
                    "may show it late"
                )
            time.sleep(0.2)

    def release(self, *, refused: bool = False) -> None:
        """Let others in. A folder that was made for a run which is then refused is removed while it is empty."""
        try:
            if refused and self._is_new and self.lost() is None and os.listdir(self.folder) == [self._path.name]:
                self._path.unlink()
                self.folder.rmdir()
        finally:
            self._close()

    def _close(self) -> None:
        for descriptor in (self._file, self._folder):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._folder = -1  # another file may get these numbers
