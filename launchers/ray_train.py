"""Train through Ray:  python -m launchers.ray_train --num-workers 2

The same training, flags and run directory as `torchrun -m fsdp2.train`, on Ray's workers. It adds what Ray is
for: many nodes, and workers that are started again when they die. There is no training code here.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fsdp2.checkpoint.places import open_files
from fsdp2.config import Config
from fsdp2.options.checks import trackers_of
from fsdp2.options.errors import ConfigError
from fsdp2.run.directory.rundir import RunDir
from fsdp2.run.preflight import check_world, preflight
from fsdp2.run.process import ending
from fsdp2.run.process.group import RunStopped, backend
from fsdp2.run.process.runtime import World
from fsdp2.units import install, tell
from fsdp2_extra.remote.files import RemoteFiles
from fsdp2_extra.trackers.logins import VARIABLES
from launchers.artifacts import artifacts
from launchers.ray_console import plain_lines, quiet
from launchers.ray_options import RayOptions, parse, place, same_global_batch

# Read by Ray when it is imported or starts its processes.
ENVIRONMENT = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_worker_niceness": "0",  # else training yields to everything else on the machine
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # a report waits for it; 2 s otherwise
    # Ray chooses the number of workers before it knows that a node is dead, and waits so long (60 s otherwise) for
    # resources that are gone before it chooses again. It is no limit for what workers do when they start.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # else each line is printed twice
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_DEDUP_LOGS": "0",
    "RAY_prestart_worker_first_driver": "0",  # processes for tasks that never come, while the workers start
}
SECONDS_FOR_STATUS = 14.0  # of `ray status`, in check_address
SNAPSHOT = "checkpoint_manager_snapshot.json"


def main(arguments: Sequence[str] | None = None) -> Any:
    """Train as a command line says; Ray's Result. Raises ConfigError before anything is started."""
    options, config = parse(arguments, "launchers.ray_train", "Train a sharded model through Ray Train.")
    storage, name, config = place(options, config)
    workers = options.num_workers
    config = same_global_batch(workers, config)
    # All of `fsdp2.train`'s refusals, before Ray is started. Nothing is run here.
    for count in range(workers.least, workers.most):  # Ray may choose any of these
        check_world(config, World(0, count, 0, count))
    preflight(config, World(0, workers.most, 0, workers.most)).hold.release(refused=True)
    prepare(options.address)
    with plain_lines(), cluster(options):
        try:
            result = fit(options, config, storage, name, surroundings(config))
        except TrainingFailed as error:
            on = (
                "the same --run-dir, or --storage-path and --name, goes on; --max-failures N restarts workers by itself"
            )
            raise TrainingFailed(f"{error}\n{on}") from None
        print("\n".join(artifacts(RunDir(str(config.run_dir)).files)))
        return result


def prepare(address: str | None = None) -> None:
    """To be called before Ray is imported; `address` is of a cluster that is there. Raises ConfigError without Ray."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"Ray isn't installed; {install('ray')}")
    settings = dict(ENVIRONMENT)
    if "ray" in sys.modules or address is not None or "RAY_ADDRESS" in os.environ:
        # A cluster and its programs must agree on this. One that is there has chosen, and a program that has imported
        # Ray can't change it any more, but its Ray's processes would follow.
        del settings["RAY_AUTH_MODE"]
    os.environ.update({key: value for key, value in settings.items() if key not in os.environ})


@contextmanager
def cluster(options: RayOptions, *, log_to_driver: bool = True) -> Iterator[None]:
    """The cluster that this program is connected to, else the one at `--address`, else one of its own."""
    import ray

    if ray.is_initialized():
        yield
        return
    # Left to itself, Ray would take any cluster that was started on this machine for what is meant.
    where = options.address or os.environ.get("RAY_ADDRESS") or "local"
    if ":" in where:
        check_address(where, "--address" if options.address else "RAY_ADDRESS")
    try:
        ray.init(
            address=where,
            include_dashboard=False if where == "local" else None,
            logging_level=logging.WARNING,
            log_to_driver=log_to_driver,
            runtime_env={"worker_process_setup_hook": quiet},
        )
    except (ConnectionError, ray.exceptions.RayError) as error:
        raise ConfigError(f"--address {where}: no cluster answers there ({error})") from None
    try:
        yield
    finally:
        ray.shutdown()


def check_address(address: str, named: str = "--address") -> None:
    """Raise ConfigError, within 20 s, if no cluster answers at HOST:PORT. Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
        if not address.startswith("ray://"):
            # Something listens there. Whether it is Ray only Ray's protocol tells: its own command, which can be ended.
            status = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
            subprocess.run(status, check=True, capture_output=True, timeout=SECONDS_FOR_STATUS)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{named} {address}: nothing answers there as Ray does; is it a cluster's port?") from None
    except subprocess.CalledProcessError as error:
        *_, said = error.stderr.decode(errors="replace").strip().splitlines() or ["without a word"]
        # Ray's own words name a token, which lies there since Ray's first start.
        asks = "RAY_AUTH_MODE" in said and "RAY_AUTH_MODE" not in os.environ
        why = "it asks for a token; set RAY_AUTH_MODE=token" if asks else f"ray status fails there ({said})"
        raise ConfigError(f"{named} {address}: {why}") from None
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{named} {address}: nothing answers there ({error}); start a cluster with ray start --head"
        ) from None


def surroundings(config: Config | None = None) -> dict[str, Any]:
    """The folder and variables that workers take over from the process that starts them, logins of trackers too."""
    own = {"OMP_NUM_THREADS", *(VARIABLES if config is not None and trackers_of(config) else ())}
    environment = {name: value for name, value in os.environ.items() if name.startswith("FSDP2_") or name in own}
    return {"folder": os.getcwd(), "environment": environment}


def ray_storage(place: str) -> tuple[str, Any]:
    """A folder or URL as Ray takes it: a path, and the file system that it is in; None for the local one."""
    files = open_files(place)
    if not isinstance(files, RemoteFiles):
        return place, None
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    # The same client as the training's: one set of credentials and one endpoint for both.
    client, path = files.fsspec
    return path, PyFileSystem(FSSpecHandler(client))


def fit(options: RayOptions, config: Config, storage: str, name: str, around: dict[str, Any], **settings: Any) -> Any:
    """Run the training `name`, below the folder or URL `storage`, on a connected cluster; Ray's Result.

    Args:
        around: of `surroundings`; further values of a worker's job too.
        settings: of `on_workers`.
    """
    from launchers.ray_worker import train_worker

    gpu = wants_gpu(options, config, resources())
    run = RunDir(str(config.run_dir))
    # Our store alone knows what is committed. Ray's list would refuse what retention has removed since.
    if run.files.size(SNAPSHOT) is not None:
        run.files.unlink(SNAPSHOT)
    job = {**around, "config": dataclasses.asdict(config), "filesystem": ray_storage(storage)[1]}
    result = on_workers(train_worker, job, options, gpu, storage, name, options.max_failures, **settings)
    if stopped := (result.return_value or {}).get("stopped"):
        raise RunStopped(stopped)
    return result


def on_workers(
    function: Callable[[dict[str, Any]], Any],
    job: dict[str, Any],
    options: RayOptions,
    gpu: bool,
    storage: str,
    name: str,
    max_failures: int = 0,
    *,
    cpus_per_worker: float = 1.0,
    callbacks: Sequence[Any] = (),
) -> Any:
    """Call a function with a job on each worker, in one process group; Ray's Result.

    Raises ConfigError if a worker did, and TrainingFailed with the first cause of any other end.
    """
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    least, most = options.num_workers
    path, filesystem = ray_storage(storage)
    trainer = TorchTrainer(
        function,
        train_loop_config=job,
        torch_config=TorchConfig(backend=backend(gpu=gpu)),
        scaling_config=ScalingConfig(
            num_workers=most if least == most else (least, most),
            use_gpu=gpu,
            resources_per_worker={"CPU": cpus_per_worker, **({"GPU": 1} if gpu else {})},
            elastic_resize_monitor_interval_s=options.resize_every,
        ),
        run_config=RunConfig(
            name=name,
            storage_path=path,
            storage_filesystem=filesystem,
            failure_config=FailureConfig(max_failures=max_failures),
            logging_config=LoggingConfig(log_level="WARNING"),
            callbacks=list(callbacks),
        ),
    )
    interrupted = signal.getsignal(signal.SIGINT)
    try:
        return trainer.fit()
    except TrainingFailedError as error:
        refused = refusal_in(error)
        if refused is not None:
            raise ConfigError(refused) from None
        raise TrainingFailed(cause(error)) from None
    except SystemExit:
        # Ray's own handler of Ctrl-C has ended the workers, and would end this program as if all were well.
        raise KeyboardInterrupt from None
    finally:
        # Ray leaves its handler, which holds the run's controller: the actor would live on and get each later Ctrl-C.
        if interrupted is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupted)


class TrainingFailed(RuntimeError):
    """The workers have failed more often than --max-failures allows; the first cause."""


def refusal_in(error: Exception) -> str | None:
    """The text of a ConfigError that a worker raised, among what Ray says its workers raised."""
    failures = [failure for _, failure in sorted(getattr(error, "worker_failures", {}).items())]
    return next((str(failure) for failure in failures if isinstance(failure, ConfigError)), None)


def cause(error: Exception) -> str:
    """Find the first failure, as its rank printed it: a rank that lost its peer is no cause."""
    failures = {rank: str(failure) for rank, failure in sorted(getattr(error, "worker_failures", {}).items())}
    first = {rank: text for rank, text in failures.items() if not ending.lost_peer(text)} or failures
    return "\n".join(f"rank {rank}:\n{text.strip()}" for rank, text in list(first.items())[:1]) or str(error)


def resources() -> dict[str, float]:
    """The connected cluster's resources, by Ray's names."""
    import ray

    return dict(ray.cluster_resources())


def wants_gpu(options: RayOptions, config: Config, resources: dict[str, float]) -> bool:
    """Return whether each worker gets a GPU. Raises ConfigError if there are fewer resources than workers."""
    count, gpus, cpus = options.num_workers.least, int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    wanted = options.use_gpu == "yes" or config.device == "cuda"
    if wanted and gpus < count:
        raise ConfigError(f"--use-gpu yes with {count} workers: Ray sees {gpus} GPU; use fewer workers or --use-gpu no")
    if cpus < count:
        raise ConfigError(
            f"--num-workers {options.num_workers}: Ray has {cpus} CPU, and each worker takes one; use fewer, "
            "or add nodes"
        )
    return wanted or (options.use_gpu == "auto" and config.device != "cpu" and gpus >= count)


def run_as_program(main: Callable[[Sequence[str]], Any]) -> None:
    """Call `main` with the command line's words. Print failures for its user, and exit with their status."""
    with ending.exit_status():
        try:
            main(sys.argv[1:])
        except TrainingFailed as error:
            tell(f"error: {error}")
            sys.exit(1)
        except KeyboardInterrupt:
            tell("interrupted; the same --run-dir, or --storage-path and --name, goes on")
            sys.exit(130)


if __name__ == "__main__":
    run_as_program(main)
