"""Is this cluster fit to train?  torchrun --nproc_per_node 2 -m fsdp2.doctor

Started as a training is, on the same ranks. Every other flag is one of `fsdp2.train`'s; `--run-dir` and `--device` say
where a run would write and compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp2.run.process import early
from fsdp2_tools.doctor.options import SECONDS, parser

if __name__ == "__main__":
    early.answer(parser().parse_args)

from fsdp2.config import Config
from fsdp2.options.parser import read_values
from fsdp2.options.values import checked, number
from fsdp2.run.process import ending
from fsdp2_tools.doctor import examine


def take_own(given: dict[str, Any]) -> dict[str, Any]:
    """The examination's own flags, taken out of a namespace, as arguments of `Options`. Raises ConfigError."""
    seconds = checked("--answer-within", given.pop("answer_within", str(SECONDS)), number(1, 3600))
    # A model that the flags name is one that somebody wants to train.
    step = not given.keys().isdisjoint({"model", "model_size", "config"})
    return {"seconds": seconds, "quick": given.pop("quick", False), "json": given.pop("json", False), "step": step}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of an examination, after it was printed. A collective call."""
    given = vars(parser().parse_args(arguments))
    own = take_own(given)
    return examine.reported(examine.Options(Config(**read_values(Config, given)), **own))


if __name__ == "__main__":
    with ending.exit_status():
        examine.leave(main())
