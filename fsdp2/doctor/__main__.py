"""Is this cluster fit to train?  torchrun --nproc_per_node 2 -m fsdp2.doctor

Started as a training is, on the same ranks. Every other flag is one of `fsdp2.train`'s; `--run-dir` and `--device` say
where a run would write and compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp2.config import Config
from fsdp2.doctor import examine
from fsdp2.doctor.asking import STARTING
from fsdp2.doctor.rows import Row, status
from fsdp2.options.parser import make_parser, read_values
from fsdp2.options.values import checked, number
from fsdp2.run import runtime


def parser(*, add_help: bool = True) -> Any:
    """The argparse parser of an examination; with `add_help=False` it is a parent for another parser."""
    found = make_parser(
        Config, prog="fsdp2.doctor", description=(__doc__ or "").partition("  ")[0], add_help=add_help
    )  # fmt: skip
    own = found.add_argument_group("the examination")
    own.add_argument("--quick", action="store_true", help="a few seconds, as fsdp2.train --doctor does it")
    own.add_argument(
        "--answer-within",
        metavar="SECONDS",
        help=f"for how long a rank may be silent after a question (default: {examine.SECONDS:g})",
    )
    own.add_argument("--json", action="store_true", help="print JSON and nothing else")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of an examination, after it was printed. A collective call."""
    given = vars(parser().parse_args(arguments))
    quick, as_json = given.pop("quick", False), given.pop("json", False)
    seconds = checked("--answer-within", given.pop("answer_within", str(examine.SECONDS)), number(1, 3600))
    config = Config(**read_values(Config, given))
    world = runtime.world()
    device = runtime.pick_device(config.device, world)
    runtime.set_threads(config.threads, world)

    def show(rows: list[Row], took: float) -> None:
        text = examine.as_json(rows, world) if as_json else "\n".join(examine.lines(rows, world.world_size, took))
        print(text, flush=True)

    store = runtime.meeting_point(world, STARTING + seconds, "doctor")
    return status(examine.run(examine.Options(config, seconds, quick), world, device, store, show))


if __name__ == "__main__":
    with runtime.exit_status():
        examine.leave(main())
