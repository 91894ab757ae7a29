"""Plain PyTorch FSDP2 training: start reading in `fsdp2/train.py`."""

import os

# The process that started this one, asked for before anything that takes time is imported: later it may have died.
STARTED_BY = os.getppid()


def beside(*room: str) -> str:
    """The folder of a tool, which is run by the book's name, as in `python -m fsdp2.plan`. The book loads none."""
    return os.path.join(os.path.dirname(os.path.dirname(__file__)), "fsdp2_tools", *room)


__path__.append(beside())
