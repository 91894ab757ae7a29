"""Is this cluster fit to train through Ray?  python -m launchers.ray_doctor --num-workers 2

The examination of `fsdp2.doctor`, with its flags, report and exit status, on the workers that Ray gives a training.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Sequence

from fsdp2.options.errors import ConfigError
from fsdp2.run.process import ending
from fsdp2_tools.doctor import __main__ as doctor
from launchers import ray_train
from launchers.ray_console import plain_lines
from launchers.ray_options import RayOptions, read_groups, without_a_run


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status, after the report was printed. Raises ConfigError where none can be made."""
    parser = doctor.parser("launchers.ray_doctor")
    (options,), config, own = read_groups(parser, arguments, {"Ray": RayOptions}, doctor.take_own)
    without_a_run(options)
    ray_train.prepare(options.address)
    job = {**ray_train.surroundings(), "config": dataclasses.asdict(config), "examination": own}
    with plain_lines(), ray_train.cluster(options), tempfile.TemporaryDirectory() as storage:
        from launchers.ray_worker import doctor_worker

        gpu = ray_train.wants_gpu(options, config, ray_train.resources())
        result = ray_train.on_workers(doctor_worker, job, options, gpu, storage, "doctor")
    status: int = result.return_value["status"]
    return status


if __name__ == "__main__":
    with ending.exit_status():
        try:
            sys.exit(main())
        except ray_train.TrainingFailed as error:
            raise ConfigError(f"a worker has died in the examination; {error}") from None
