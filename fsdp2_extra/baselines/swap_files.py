"""`--nvme-offload`: the files in which DeepSpeed keeps a rank's state."""

from __future__ import annotations

import shutil
from pathlib import Path

from fsdp2.run.directory.lock import WriterLock


class SwapFiles:
    """They are one run's at a time, and removed when it ends.

    After a kill they stay until the next run rewrites them: a checkpoint doesn't need them.
    """

    def __init__(self, folder: str, rank: int) -> None:
        """Raises ConfigError if the folder can't be written or another run has it."""
        self._folder, self._rank = Path(folder), rank
        self._lock = WriterLock(self._folder, flag="--nvme-offload", name=f".rank{rank}.lock")

    def release(self) -> None:
        """Remove this rank's files, and let another run in."""
        if self._lock.lost() is None:  # else what is there now is another run's
            for path in self._folder.glob(f"zero_stage_3/*/rank{self._rank}"):
                shutil.rmtree(path)
        self._lock.release()
