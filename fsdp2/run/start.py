"""The start of a run, in order, from the checkpoint that rank 0 finds to the files that are there at the first step.

What only some runs need is loaded by those: `choose_checkpoint`, `restore_run`, `first_forward` and `NodeMemory`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from fsdp2.checkpoint import meaning
from fsdp2.checkpoint.files import NotAFile, Unreachable
from fsdp2.checkpoint.state import AppState, Part, Progress, RandomState, SchedulerState
from fsdp2.checkpoint.store import Store
from fsdp2.config import Config
from fsdp2.data.loader import Batches
from fsdp2.data.splits import Dataset
from fsdp2.options.errors import ConfigError
from fsdp2.parallel.engine import Engine
from fsdp2.run.directory.hold import disk_refusals
from fsdp2.run.directory.marker import kept_files
from fsdp2.run.directory.room import check_room
from fsdp2.run.directory.rundir import LINEAGE, write_config
from fsdp2.run.initial_weights import DrawnWeights, LoadedWeights
from fsdp2.run.job import Job, Origin
from fsdp2.run.process.runtime import World

if TYPE_CHECKING:
    from fsdp2.parallel.ema import Ema
    from fsdp2_extra.elastic.node_memory import NodeFolder, NodeMemory


def begin(config: Config, world: World, model: nn.Module, job: Job) -> None:
    """On rank 0, take the run directory, find what to start from, and check that there is room for all of it."""
    place = config.run_dir or job.run.place
    try:
        with disk_refusals(job.run):
            job.hold.take(new=config.run_dir is None)
            done = _choose_origin(config, world, model, job)
            newest = job.origin.newest_kept
            stays = [step for step in job.run.store.committed() if newest is None or step <= newest]
    except Unreachable as error:
        flag = f"--run-dir {place}" if place in str(error) else f"--resume {config.resume}"
        raise ConfigError(f"{flag}: {error}; check the URL and the network") from None
    except NotAFile as error:
        raise ConfigError(f"--run-dir {place}: {error}") from None
    restoring, by_library = job.origin.checkpoint is not None, False
    if not restoring and config.weights is not None:
        from fsdp2.run.init_from import check_init_from

        note, by_library = check_init_from(config, model)
        job.add_note(note)
    elif config.init_from not in (None, "scratch") and config.lora is None:
        job.add_note(f"--init-from {config.init_from}: isn't read, since the run goes on from {job.origin.checkpoint}")
    drawn = DrawnWeights(config, brought=LoadedWeights(config, restoring=restoring).brings)
    if world.local_world_size % config.tp:
        job.add_note(f"--tp {config.tp}: its ranks are on several nodes; fsdp2.doctor measures both bandwidths")
    job.add_note(check_room(config, model, world, job.run, stays, done, loads_whole=by_library or drawn.makes_whole()))


def _choose_origin(config: Config, world: World, model: nn.Module, job: Job) -> int:
    """Decide what the job starts from: nothing, or a checkpoint. Returns the number of steps done by then."""
    origin, notes = find_origin(config, job.run.store)
    if origin.checkpoint is None or origin.partial:
        job.go_on_from(origin, *notes)
        return 0
    from fsdp2.run.resuming import check_resume

    done, origin, changes = check_resume(config, world, model, origin)
    job.go_on_from(origin, *notes, *changes)
    return done


def find_origin(config: Config, store: Store) -> tuple[Origin, list[str]]:
    """Find what `--resume` says to start from, and notes for the user. Removes dead saves.

    Raises ConfigError, for a damaged checkpoint too, and OSError for a folder that can't be read.
    """
    committed = store.committed()
    if committed and not config.saves:
        raise ConfigError(
            f"--checkpoint-every never: {store.files} holds checkpoints, and what is trained after them would be lost; "
            f"choose another --run-dir, with --resume {store.checkpoint(committed[-1])} to begin with the newest"
        )
    dead = store.remove_dead()
    notes = [f"removed {name}, a save that was never committed" for name in dead]
    if config.resume == "auto" and not committed:
        notes += ["no checkpoint was ever committed here; starting fresh"] * bool(dead)
        return Origin(), notes
    from fsdp2.run.resuming import choose_checkpoint

    origin, more = choose_checkpoint(config, store, committed)
    return origin, notes + more


def agree(config: Config, job: Job, world: World) -> NodeFolder | None:
    """Take over what rank 0 has found out. With `--memory-checkpoint`, find what is in the nodes' memories, and let
    `job` go on from it if it is newer. A collective call.

    Raises ConfigError on every rank, as `Job.agree` and `NodeFolder` do.
    """
    job.agree()
    if config.memory_checkpoint is None:
        return None
    from fsdp2_extra.elastic.node_memory import NodeFolder

    folder = NodeFolder(config, job.run, world, job.hold.also)
    if config.resume == "auto" and (found := folder.find(config, job.origin)) is not None:
        job.go_on_from(*found)
    return folder


def state_of_run(
    config: Config,
    engine: Engine,
    scheduler: LRScheduler,
    batches: Batches,
    progress: Progress,
    world: World,
    device: torch.device,
    also_saved: Mapping[str, Part] | None,
) -> AppState:
    """All that a checkpoint holds and a resume restores. Raises ValueError for a name that is taken."""
    parts: dict[str, Part] = {
        "scheduler": SchedulerState(scheduler),
        "scaler": engine.scaler,
        "batches": batches,
        "progress": progress,
        "rng": RandomState(world.rank, device, config.tp),
        **engine.parts,
    }
    if taken := sorted({"model", "optim", *parts} & set(also_saved or {})):
        raise ValueError(f"also_saved: {', '.join(taken)} is a part of each checkpoint already; choose another name")
    state, parts = engine.state, {**parts, **(also_saved or {})}
    return AppState(state["model"], state["optimizer"], parts, engine, engine.not_saved)


def resume(job: Job, app: AppState, average: Ema | None, *, hashes: bool = True) -> dict[str, Any]:
    """Load what the job starts from into `app` and --ema's average; compares hashes, or sizes alone. A collective call.

    Returns `random_state_restored`, `restore_seconds`, and with --resume-partial `loaded` and `left_out`. Raises
    ConfigError, on all ranks, if the checkpoint is damaged or doesn't fit.
    """
    if job.origin.checkpoint is None:
        return {"random_state_restored": True}
    from fsdp2.run.restoring import restore_run

    return restore_run(job, app, average, hashes=hashes)


def try_out(config: Config, engine: Engine, dataset: Dataset, device: torch.device) -> None:
    """Try a language model as `first_forward.try_out` does. A collective call; raises ConfigError on every rank."""
    if config.spec.kind == "language":
        from fsdp2.run import first_forward

        first_forward.try_out(config, engine, dataset, device)


def keep_in_memory(config: Config, folder: NodeFolder | None, app: AppState, device: torch.device) -> NodeMemory | None:
    """Keep further checkpoints in memory, in place of those that this run replaces. A collective call."""
    if folder is None:
        return None
    from fsdp2_extra.elastic.node_memory import NodeMemory

    return NodeMemory(config, folder, app, device)


def write_start(
    config: Config, job: Job, world: World, files: Mapping[str, bytes], *, in_memory: bool, finished: bool
) -> None:
    """On rank 0, write what a run directory holds before the first step, and put aside what this run replaces.

    Args:
        files: further ones by name, the engine's own.
        in_memory: the run keeps checkpoints in memory, and so has written `memory.json` itself.
        finished: there is nothing to train, so what an earlier run left is still true.
    """
    if world.rank != 0:
        return
    run = job.run
    if not in_memory and run.files.size(LINEAGE) is not None:
        run.files.unlink(LINEAGE)
    if job.origin.newest_kept is not None:
        run.store.set_aside(job.origin.newest_kept)
    if not finished:
        run.outdate_full_model()
    if not (finished and run.config.exists()):  # a finished run keeps what it was trained with
        earlier = run.flags() or {}
        write_config(run, config, world.world_size)
        for name, content in files.items():
            run.files.write(name, content)
        if model := config.spec.files(config.model_size):
            run.files.mkdir("model")
        for name, content in model.items():
            run.files.write(f"model/{name}", content)
        if any(one not in (None, "bytes") for one in (earlier.get("tokenizer"), config.tokenizer)):
            from fsdp2_extra.text.tokenizer_file import is_kept

            meaning.replace(run.files.at(meaning.TOKENIZER), kept_files(config).get(meaning.TOKENIZER, {}), is_kept)
