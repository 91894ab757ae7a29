"""Which flags are fastest on Ray's workers?  python -m launchers.ray_fastest --model vit --num-workers 2

The search of `fsdp2.tune`, with its flags. Each of its launches is a trial of `launchers.ray_tune`'s machinery, with
workers as the trials of a search over flags have them.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp2.config import parser as train_parser
from fsdp2.options.errors import ConfigError
from fsdp2_tools.tune.__main__ import check, tune
from fsdp2_tools.tune.launch import KILLED, Launch
from fsdp2_tools.tune.options import OWN, add_own, take_own
from fsdp2_tools.tune.rounds import Candidate
from launchers import ray_train, ray_tune
from launchers.ray_options import RayOptions, read_groups, without_a_run

# As Ray words that a process of its own was killed.
LOST = ("worker process has died", "The actor died", "ActorDiedError")


def main(arguments: Sequence[str] | None = None) -> list[Candidate]:
    """The settings that were tried, as `fsdp2.tune` returns them. Raises ConfigError before anything is started."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = train_parser("launchers.ray_fastest", description="Which flags are fastest on Ray's workers?")
    add_own(parser, [name for name in OWN if name != "nproc"])
    (options,), config, own = read_groups(parser, words, {"Ray, for each launch": RayOptions}, take_own)
    workers = without_a_run(options)
    check(config, workers)
    ray_tune.prepare(options.address)
    with ray_train.cluster(options, log_to_driver=False), tempfile.TemporaryDirectory() as storage:
        gpu = ray_train.wants_gpu(options, config, ray_train.resources())
        command = f"python -m launchers.ray_fastest {shlex.join(words)}"
        with ray_tune.interruptible():
            return tune(own, config, workers, through_ray(options, gpu, storage), command)


def through_ray(options: RayOptions, gpu: bool, storage: str) -> Launch:
    """Launches as trials of Ray, one at a time: what runs beside a measurement slows it."""
    around, count = ray_train.surroundings(), iter(range(10**6))

    def launch(job: Path) -> str | None:
        name = f"launch-{next(count)}"

        def trial(_: dict[str, Any]) -> dict[str, Any]:
            from launchers.ray_worker import trial_worker

            work = {**around, "trials": json.loads(job.read_text())}
            cpus, place = ray_tune.CPUS_PER_WORKER, f"{name}-workers"
            try:
                ray_train.on_workers(trial_worker, work, options, gpu, storage, place, cpus_per_worker=cpus)
            except (ConfigError, ray_train.TrainingFailed) as error:
                return {"failed": reason_of(str(error))}
            return {"failed": None}

        (result,) = ray_tune.run_trials(trial, options, storage, name, at_once=1, param_space={})
        if result.error is not None:
            return reason_of(str(result.error))
        failed: str | None = result.metrics["failed"]
        return failed

    return launch


def reason_of(text: str) -> str:
    """The reason why a launch has failed, in one line."""
    if any(words in text for words in LOST):
        return KILLED
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without a word"


if __name__ == "__main__":
    ray_train.run_as_program(main)
