"""Search over flags:  python -m launchers.ray_tune --search "lr=loguniform(1e-4, 1e-2)" --trials 8

Each trial is a whole run of `launchers.ray_train`, with a run directory of its own that both launchers resume.
Trials that fall behind after an epoch are stopped (ASHA, https://arxiv.org/abs/1810.05934). The same name and
storage goes on with an interrupted search.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fsdp2.checkpoint.files import publish
from fsdp2.checkpoint.places import open_files
from fsdp2.config import Config
from fsdp2.options.errors import ConfigError, flag_of
from fsdp2.options.parser import to_flags, words_of
from fsdp2.options.settings_file import read_table
from fsdp2.options.values import check_values, one_of, option, patterns, switch, whole
from fsdp2.run.preflight import check_data, check_versions, check_world
from fsdp2.run.process.runtime import World
from fsdp2.units import short
from fsdp2_extra.trackers.logins import require_trackers
from launchers import ray_train
from launchers.ray_options import RayOptions, parse_groups, place, same_global_batch
from launchers.ray_search import Choice, Space, example_config, parse_search

HIGHER_IS_BETTER = {"accuracy": True, "test_loss": False, "loss": False}
SEARCH = "search.json"
# A trial's own process only waits for its workers, so both share their CPUs. What is left over is for the process
# of the next trial, which is there before that of the last has gone.
CPUS_PER_WORKER = 0.9
CPUS_PER_TRIAL_AND_WORKER = 0.04
SECONDS_TO_DIE = 5.0


@dataclass(frozen=True)
class TuneOptions:
    search: tuple[str, ...] = option(
        (), 'what to vary: a flag, such as "lr=loguniform(1e-4, 1e-2)", or a .py file; repeatable', patterns, many=True
    )
    trials: int = option(8, "runs, each with other values; with a grid, passes over it", whole(1, 10**6))
    metric: str = option("accuracy", "what the best trial is chosen by", one_of(*HIGHER_IS_BETTER))
    stop_early: bool = option(True, "stop trials that fall behind, by ASHA", switch)
    grace: int = option(1, "epochs before a trial may be stopped", whole(1))

    def __post_init__(self) -> None:
        check_values(self)


def main(arguments: Sequence[str] | None = None) -> Any:
    """Search as a command line says; Ray's ResultGrid. Raises ConfigError before anything is started."""
    (asked, options), config = parse_groups(
        arguments,
        "launchers.ray_tune",
        {"the search": TuneOptions, "Ray, for each trial": RayOptions},
        "Search over flags with Ray Tune. Each trial is a run of launchers.ray_train.",
    )
    space = parse_search(asked.search)
    example_config(config, space)
    check_versions(config)
    require_trackers(config)
    check_data(config)
    storage, name, config = place(options, config, prefix="tune")
    config = same_global_batch(options.num_workers, config)
    check_world(config, World(0, options.num_workers.most, 0, options.num_workers.most))
    what = {**to_flags(asked), **to_flags(config)}
    refuse_another_search(f"{storage}/{name}", what)
    prepare(options.address)
    with ray_train.cluster(options, log_to_driver=False):
        ray_train.wants_gpu(options, config, ray_train.resources())
        remember(f"{storage}/{name}", what)
        with interruptible():
            results = search(asked, options, config, space, storage, name)
    print("\n".join(table(results, asked, options, config, storage, name)))
    return results


def prepare(address: str | None) -> None:
    """`ray_train.prepare`, and what Ray Tune reads."""
    ray_train.prepare(address)
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # its boxes come even when nothing is to be printed


@contextmanager
def interruptible() -> Iterator[None]:
    """Raises KeyboardInterrupt at the end if there was a Ctrl-C.

    Tune has a handler of its own: it saves the state of the search, and returns what there is as if that were all, the
    trials that it has ended included. It tells of it in its log alone.
    """
    stopped: list[str] = []

    def look(record: logging.LogRecord) -> bool:
        told = record.getMessage()
        if told.startswith("Stop signal received"):
            stopped.append(told)
        # What it says of how to go on is for its own users; ours is the same command again.
        return not (stopped and record.levelno == logging.WARNING)

    logger = logging.getLogger("ray.tune.tune")
    logger.addFilter(look)
    try:
        yield
    finally:
        logger.removeFilter(look)
    if stopped:
        raise KeyboardInterrupt


def refuse_another_search(place: str, what: dict[str, Any]) -> None:
    """Raises ConfigError if the search that is there was another one: its trials would be mixed with these."""
    files = open_files(place)
    try:
        if files.size(SEARCH) is None:
            return
        before = read_table(f"{place}/{SEARCH}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{place}/{SEARCH}: {error}; use another --name, or remove what is there") from None
    for flag, value in what.items():
        if before.get(flag) != value:
            raise ConfigError(
                f"--{flag} {value}: the search in {place} has {before.get(flag)}; use that to go on with it, or "
                "another --name"
            )


def remember(place: str, what: dict[str, Any]) -> None:
    """Write down what is searched there."""
    files = open_files(place)
    files.mkdir("")
    publish(files, SEARCH, (json.dumps(what, indent=1) + "\n").encode())


def search(asked: TuneOptions, options: RayOptions, config: Config, space: Space, storage: str, name: str) -> Any:
    """Run the trials that are not done yet."""
    from ray import tune
    from ray.tune.schedulers import AsyncHyperBandScheduler

    around = ray_train.surroundings(config)

    def trial(sampled: dict[str, Any]) -> None:
        one = f"run-{tune.get_context().get_trial_id()}"
        own = dataclasses.replace(config, **sampled, run_dir=f"{storage}/{name}/{one}")
        ray_train.fit(
            options,
            own,
            f"{storage}/{name}",
            one,
            around,
            cpus_per_worker=CPUS_PER_WORKER,
            callbacks=[reports_to_tune()],
        )

    at_once = max(1, int(ray_train.resources().get("CPU", 0)) // options.num_workers.most)
    what = f"search: {asked.trials} trials of {config.epochs} epochs, {at_once} at a time, in {storage}/{name}"
    return run_trials(
        trial,
        options,
        storage,
        name,
        at_once=at_once,
        what=what,
        callbacks=[gives_back(asked.metric)],
        param_space={field: ray_way(choice) for field, choice in space.items()},
        num_samples=asked.trials,
        metric=asked.metric,
        mode="max" if HIGHER_IS_BETTER[asked.metric] else "min",
        # Before the last epoch's end: who gets there is not stopped while it writes its full model.
        scheduler=AsyncHyperBandScheduler(
            time_attr="epochs", max_t=config.epochs - 1, grace_period=asked.grace, stop_last_trials=False
        )
        if asked.stop_early and asked.grace < config.epochs
        else None,
    )


def run_trials(
    trial: Callable[[dict[str, Any]], Any],
    options: RayOptions,
    storage: str,
    name: str,
    *,
    at_once: int,
    what: str = "",
    callbacks: Sequence[Any] = (),
    param_space: dict[str, Any],
    **settings: Any,
) -> Any:
    """Run trials, each with workers of its own, or go on with those that are there; Ray's ResultGrid.

    Args:
        trial: starts its workers with CPUS_PER_WORKER each.
        what: a line to print when the search is new.
        settings: of Ray's TuneConfig.
    """
    from ray import tune

    path, filesystem = ray_train.ray_storage(storage)
    cpus = CPUS_PER_TRIAL_AND_WORKER * options.num_workers.most
    trainable = tune.with_resources(trial, {"cpu": cpus})
    if tune.Tuner.can_restore(f"{path}/{name}", storage_filesystem=filesystem):
        print(f"going on with the search in {storage}/{name}", flush=True)
        return tune.Tuner.restore(
            f"{path}/{name}", trainable=trainable, resume_errored=True, storage_filesystem=filesystem
        ).fit()
    if what:
        print(what, flush=True)
    return tune.Tuner(
        trainable,
        param_space=param_space,
        tune_config=tune.TuneConfig(
            max_concurrent_trials=at_once, trial_dirname_creator=lambda trial: f"tune-{trial.trial_id}", **settings
        ),
        run_config=tune.RunConfig(
            name=name, storage_path=path, storage_filesystem=filesystem, verbose=0, callbacks=list(callbacks)
        ),
    ).fit()


def ray_way(choice: Choice) -> Any:
    """A part of a search space as Ray Tune's object."""
    from ray import tune

    if choice.way == "grid":
        return tune.grid_search(list(choice.arguments))
    if choice.way == "choice":
        return tune.choice(list(choice.arguments))
    return getattr(tune, choice.way)(*choice.arguments)


def reports_to_tune() -> Any:
    """Hands each evaluation of a training to Tune, once."""
    from ray.tune.integration.ray_train import TuneReportCallback

    class Evaluations(TuneReportCallback):
        newest = 0

        def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
            if (step := metrics[0].get("test_step", 0)) > self.newest:
                self.newest = step
                super().after_report(run_context, metrics, checkpoint)

    return Evaluations()


def gives_back(metric: str | None = None) -> Any:
    """A callback of Tune's that gives back what stopped trials leave behind; with a metric, a line for each evaluation.

    A trial is stopped by killing its processes, and then its workers keep their CPUs: Ray Train's own cleaner of such
    leftovers asks the dashboard. Each report has to name what is to be given back, as `ray_worker.placement` does.
    """
    from ray import PlacementGroupID, tune
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    class GivesBack(tune.Callback):
        def __init__(self) -> None:
            self.left: list[tuple[float, str]] = []  # when, and which placement group

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **_: Any) -> None:
            if metric is not None:
                at = f"epoch {result['epoch'] + 1}  step {result['step']}"
                print(f"{trial.trial_id}  {at}  {metric} {result[metric]:.4f}  {said(trial.config)}", flush=True)

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
            group = (trial.last_result or {}).get("placement_group")
            if group is not None:
                self.left.append((time.monotonic(), group))

        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
            if metric is not None:
                print(f"{trial.trial_id}  failed; {said(trial.config)}", flush=True)
            self.on_trial_complete(iteration, trials, trial)

        def on_step_begin(self, iteration: int, trials: Any, **_: Any) -> None:
            self.give_back()

        def on_experiment_end(self, trials: Any, **_: Any) -> None:
            # There is no further step, and a user's cluster outlives the search.
            while self.left:
                time.sleep(max(0.0, self.left[0][0] + SECONDS_TO_DIE - time.monotonic()))
                self.give_back()

        def give_back(self) -> None:
            # Later, since a controller that still lives would start new workers.
            while self.left and time.monotonic() - self.left[0][0] >= SECONDS_TO_DIE:
                remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(self.left.pop(0)[1]))))

    return GivesBack()


def said(sampled: dict[str, Any]) -> str:
    return "  ".join(f"{flag_of(name)} {value}" for name, value in sampled.items())


def table(results: Any, asked: TuneOptions, options: RayOptions, config: Config, storage: str, name: str) -> list[str]:
    """The trials, best first, and the command that repeats the best. Raises TrainingFailed if none has a result."""
    sign = -1 if HIGHER_IS_BETTER[asked.metric] else 1
    done = sorted(
        (result for result in results if asked.metric in (result.metrics or {})),
        key=lambda result: (math.isnan(value := result.metrics[asked.metric]), sign * value),
    )
    if not done or math.isnan(done[0].metrics[asked.metric]):
        raise ray_train.TrainingFailed(f"no trial has a result; the first error:\n{next(iter(results.errors), None)}")
    lines = [f"{'trial':<14}  {asked.metric:>9}  epochs  {'steps':>6}  flags"]
    for result in done:
        value, steps = (result.metrics[key] for key in (asked.metric, "step"))
        epochs = result.metrics.get("epochs", result.metrics.get("epoch", -1) + 1)  # an earlier version had that alone
        lines.append(f"{result.metrics['trial_id']:<14}  {value:>9.4f}  {epochs:>6}  {steps:>6}  {said(result.config)}")
    best = dataclasses.replace(config, **done[0].config, run_dir=None)
    where = f"{storage}/{name}/run-{done[0].metrics['trial_id']}"
    return [
        *lines,
        *([f"{results.num_errors} trials failed; the same command tries them again"] if results.num_errors else []),
        f"best: {short(where)}",
        f"repeat it: {command(options, best)}",
    ]


def command(options: RayOptions, config: Config) -> str:
    """The command line that makes this Config."""
    words = ["python -m launchers.ray_train", f"--num-workers {options.num_workers}"]
    for field in dataclasses.fields(Config):
        value = getattr(config, field.name)
        if value != field.default:
            words += words_of(Config, field.name, value)
    return " ".join(words)


if __name__ == "__main__":
    ray_train.run_as_program(main)
