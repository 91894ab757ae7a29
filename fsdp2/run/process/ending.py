"""The end of a process: what its user sees, its exit status, and what torchrun repeats at its own end."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname

import torch.distributed as dist

from fsdp2.checkpoint.disk import explained
from fsdp2.checkpoint.files import NotTheWriter
from fsdp2.checkpoint.refusal import refusal
from fsdp2.checkpoint.saver import SaveFailed
from fsdp2.data.errors import UnusableText
from fsdp2.options.errors import ConfigError
from fsdp2.run.process.agreement import tell_others
from fsdp2.run.process.group import RunStopped
from fsdp2.run.process.runtime import world
from fsdp2.run.process.variables import speaks
from fsdp2.units import tell

# How much later than another rank rank 0 may come to the same refusal.
SECONDS_FOR_RANK_0 = 20.0


def _ended_by_launcher(seconds: float = SECONDS_FOR_RANK_0) -> bool:
    """Wait for the end of rank 0, which says what is wrong; False if it doesn't end, and so has said nothing.

    torchrun ends all ranks as soon as one has ended, and would end rank 0 before it has spoken.
    """
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    return ended.wait(seconds)


# Messages of gloo, nccl and the store when the other side of a connection has gone.
_PEER_LOST = (
    *("closed by peer", "reset by peer", "Broken pipe", "Socket closed"),
    *("remote process exited", "remote server shutdown"),
)
_TIMED_OUT = "Timed out waiting"  # gloo; nccl's watchdog ends the process itself


def lost_peer(text: str) -> bool:
    """Return whether an error says that another rank has gone, and so is not the cause itself."""
    return any(sign in text for sign in _PEER_LOST)


def _say(line: str) -> None:
    """Print why this process ends, and hand the line to torchrun, whose report of 40 lines ends with it.

    Source: https://docs.pytorch.org/docs/stable/elastic/errors.html
    """
    tell(line)
    if place := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        told = {"message": {"message": f"fsdp2: {line}", "extraInfo": {"timestamp": str(int(time.time()))}}}
        with suppress(OSError):  # torchrun's folder is full or gone; the line is printed all the same
            Path(place).write_text(json.dumps(told))


@contextmanager
def exit_status() -> Iterator[None]:
    """Turn the ways a run can fail into what a user sees, and an exit status.

    A ConfigError is one line and status 2; a RunStopped, a failed save and a lost run directory are one line and
    status 1, Ctrl-C one line and status 130. Rank 0 alone prints it, if all ranks have it. One rank's error of a disk,
    of data or of a peer is one line and ends this process at once. Another is a line and its traceback.
    """
    try:
        yield
    except (ConfigError, RunStopped, SaveFailed, NotTheWriter) as error:
        status, kind = (2, "error") if isinstance(error, ConfigError) else (1, "stopped")
        first = dist.get_rank() == 0 if dist.is_initialized() else speaks(os.environ)
        line = f"{kind}: {refusal(str(error))}"
        if first:
            _say(line)
        tell_others(str(error))
        if not first and not _ended_by_launcher():
            _say(line)
        sys.exit(status)
    except KeyboardInterrupt:  # outside of the training loop, which takes it as a stop signal
        if speaks(os.environ):
            tell("stopped by Ctrl-C")
        sys.exit(130)
    except Exception as error:
        own: object = explained(error, error.filename or os.curdir) if isinstance(error, OSError) else None
        if isinstance(error, UnusableText):  # a loader's process puts its traceback before it
            own = f"--dataset: {refusal(str(error).rpartition('UnusableText: ')[2])}"
        if own is not None:
            _say(f"stopped: rank {world().rank}: {own}")
            os._exit(1)  # as below
        text = str(error) if isinstance(error, RuntimeError) else ""  # as gloo, nccl and the store raise
        if _TIMED_OUT in text:
            why = "another rank kept it waiting for half an hour: that one is stuck or slow"
        elif lost_peer(text):
            why = (
                "another rank ended or was killed; its traceback, or the signal that torchrun names "
                "(exitcode -9: SIGKILL, perhaps because memory ran out), is the cause; without one its node died"
            )
        else:  # torchrun's report may name another rank, which was only ended for this one's error
            tell(f"stopped: rank {world().rank} on {gethostname()}: {type(error).__name__}: {refusal(str(error))}")
            raise
        tell(f"rank {world().rank} stopped because {why}")
        # Not sys.exit: at exit torch would wait for threads that wait for the rank that is gone.
        os._exit(1)
