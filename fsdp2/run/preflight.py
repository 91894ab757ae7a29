"""Every refusal that needs the machine, before a process group is made: world size, data, run directory, checkpoint.
A wrong combination must not cost a process group, a download or a run directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp2 import data
from fsdp2.checkpoint import meaning
from fsdp2.checkpoint.disk import explained, temporary_folder
from fsdp2.checkpoint.files import Files, NotAFile, Unreachable, is_there
from fsdp2.checkpoint.places import open_files
from fsdp2.checkpoint.store import MARKER, DamagedCheckpoint, Store, read_marker, require_metadata, says_finite, verify
from fsdp2.config import Config
from fsdp2.options import strategies
from fsdp2.options.checks import trackers_of
from fsdp2.options.errors import ConfigError, require
from fsdp2.options.own_model import blocks_of
from fsdp2.options.parser import files_at, to_flags
from fsdp2.options.values import is_step
from fsdp2.parallel.freeze import freeze
from fsdp2.parallel.groups import check_parameters, shard_groups
from fsdp2.run.directory.job import Job, Origin
from fsdp2.run.directory.lock import SwapFiles
from fsdp2.run.directory.marker import changed_files, changed_flags, kept_files, shapes_of
from fsdp2.run.directory.room import check_room
from fsdp2.run.directory.rundir import RunDir, default_path, large
from fsdp2.run.process.runtime import World
from fsdp2.run.schedule import Length, before

OLDEST_TORCH = (2, 11)

# Flags that a resumed run must share with its checkpoint, and what would go wrong otherwise.
KEPT = {
    **dict.fromkeys(
        ("dataset", "chat-fields", "bos", "seed", "seq-len"), "the place in the data would mean other samples"
    ),
    "documents": "tokens would see others than before, in training and in the test",
    **dict.fromkeys(("optimizer", "optimizer-state", "freeze"), "the optimizer's state would not fit"),
    **dict.fromkeys(("lora", "lora-alpha", "lora-targets"), "the adapters would be other ones"),
    **dict.fromkeys(("lr", "gamma"), "the checkpoint's learning rate counts, and the flag would do nothing"),
    **dict.fromkeys(("schedule", "warmup-steps", "lr-floor"), "the learning rate would jump"),
    "ema": "the average would begin in the middle, or end there",
    **dict.fromkeys(("betas", "weight-decay"), "the checkpoint's settings of the optimizer count"),
}


def examine_first(config: Config, world: World, device: torch.device) -> None:
    """With `--doctor`, examine the ranks before they train. A collective call. Raises ConfigError for what is bad."""
    if config.doctor:
        from fsdp2.run.beside import tool

        tool("--doctor", "doctor.examine").before_training(config, world, device)


def preflight(config: Config, world: World) -> Job:
    """Check everything; on rank 0 also take the run directory and find the checkpoint to resume from.

    Raises ConfigError: one line that names the flag and the fix.
    """
    check_versions(config)
    if world.rank == 0 and trackers_of(config):
        from fsdp2_extra.trackers.logins import require_trackers

        require_trackers(config)
    check_world(config, world)
    check_data(config, read=world.rank == 0)
    model = check_model(config)
    place = str(default_path(config.model).absolute()) if config.run_dir is None else config.run_dir
    if "://" in place:
        check_url(place, world)
    tensors = chain(model.named_parameters(), model.named_buffers())
    made_of = repr([(name, tuple(one.shape), one.dtype) for name, one in tensors])
    job = Job(place, made_of, Origin(partial=config.resume_partial))
    with ExitStack() as on_error:
        on_error.enter_context(job)
        if config.nvme_offload is not None:
            job.hold(SwapFiles(config.nvme_offload, world.rank))
        if world.rank != 0:
            if world.local_rank == 0:
                check_room(config, model, world)
            on_error.pop_all()
            return job
        with _explained(config, place, job.run):
            job.take()
            origin, notes = find_checkpoint(config, job.run.store)
            done, origin, changes = _going_on(config, world, model, origin)
            job.go_on_from(origin, *notes, *changes)
            stays = job.staying()
        starts = origin.checkpoint is None
        loads_whole = (starts or origin.partial) and not config.spec.initial_values
        if starts and config.weights is not None:
            from fsdp2.run.init_from import check_init_from

            note, by_library = check_init_from(config, model)
            job.add_note(note)
            loads_whole = by_library or (loads_whole and config.init_partial)
        elif config.init_from not in (None, "scratch") and config.lora is None:
            job.add_note(f"--init-from {config.init_from}: isn't read, since the run goes on from {origin.checkpoint}")
        if world.local_world_size % config.tp:
            job.add_note(f"--tp {config.tp}: its ranks are on several nodes; fsdp2.doctor measures both bandwidths")
        job.add_note(check_room(config, model, world, job.run, stays, done, loads_whole=loads_whole))
        on_error.pop_all()
    return job


@contextmanager
def _explained(config: Config, place: str, run: RunDir) -> Iterator[None]:
    """Raise ConfigError where the run directory, or the checkpoint, can't be read or written."""
    try:
        yield
    except Unreachable as error:
        flag = f"--run-dir {place}" if place in str(error) else f"--resume {config.resume}"
        raise ConfigError(f"{flag}: {error}; check the URL and the network") from None
    except NotAFile as error:
        raise ConfigError(f"--run-dir {place}: {error}") from None
    except OSError as error:
        full = explained(error, run.path)
        if full is None:
            raise
        raise ConfigError(f"--run-dir {place}: {full.strerror}; make room or choose another folder") from None


def _going_on(
    config: Config, world: World, model: nn.Module, origin: Origin
) -> tuple[int, Origin, tuple[str | None, ...]]:
    """The steps that are done, the origin with what its marker says, and what is different from here on."""
    if origin.checkpoint is None or origin.partial:
        return 0, origin, ()
    checkpoint = open_files(origin.checkpoint)
    check_checkpoint(config, model, checkpoint)
    marker = read_marker(checkpoint)
    length = before(marker)
    changes = changed_batch(config, world, length), changed_flags(config, marker), changed_files(config, marker)
    return marker["step"], origin._replace(before=length), changes


def check_model(config: Config) -> nn.Module:
    """The model on `meta`, with what is trained of it. Raises ConfigError for one that can't be built or sharded so."""
    try:
        model = config.spec.on_meta(config.model_size)
    except ValueError as error:
        raise ConfigError(f"--model {config.model}: {error}") from None
    try:
        blocks = blocks_of(config)(model)
    except ValueError as error:
        at = "--shard-modules" if config.shard_modules else f"--model {config.model}"
        raise ConfigError(f"{at}: {error}") from None
    if config.spec.kind == "language":
        from fsdp2.models.positions import too_long

        if why := too_long(config.spec, model, blocks, config.seq_len):
            raise ConfigError(
                f"--seq-len {config.seq_len}: is more than --model {config.model} has positions for ({why}); lower it"
            )
    for name in config.spec.methods:
        if not callable(getattr(model, name, None)):
            lacks = f"lists the method {name}, which {type(model).__name__} doesn't have"
            raise ConfigError(f"--model {config.model}: its ModelSpec {lacks}")
    if config.strategy == "fsdp2":
        try:
            check_parameters(model, shard_groups(model, blocks, config.shard_granularity))
        except ValueError as error:
            raise ConfigError(f"--model {config.model}: FSDP2 can't shard it: {error}") from None
    try:
        freeze(model, config.freeze)
    except ValueError as error:
        raise ConfigError(f"--freeze {error}") from None
    if config.float8:
        check_float8(config, blocks)
    return model


def check_float8(config: Config, blocks: Sequence[nn.Module]) -> None:
    from fsdp2_extra.low_precision import float8

    if not any(float8.layers(blocks)):
        raise ConfigError(
            f"--float8 {config.float8} with --model {config.model}: none of its blocks has a trained nn.Linear whose "
            f"sizes are multiples of {float8.MULTIPLE}; drop --float8"
        )


def torch_version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def check_versions(config: Config) -> None:
    if torch_version(torch.__version__) < OLDEST_TORCH:
        raise ConfigError(
            f"torch {torch.__version__} is installed and {'.'.join(map(str, OLDEST_TORCH))} is the oldest supported; "
            "install a newer torch and the torchvision that belongs to it"
        )
    if config.optimizer_state:
        require("torchao", "torchao", f"--optimizer-state {config.optimizer_state}")
    if config.float8:
        require("torchao", "torchao", f"--float8 {config.float8}")
    if config.profile:
        require("plotly", "plots", "--profile")
    if config.compile:
        from fsdp2.run.process.compilers import check_compiler

        check_compiler("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")


def check_world(config: Config, world: World) -> None:
    size = world.world_size
    strategies.check_world(config, size)
    for flag, count, ranks in (
        ("--tp", config.tp, size),
        ("--sp", config.sp, size // config.tp),
        ("--replicas", config.replicas, size // config.tp // config.sp),
    ):
        if ranks % count or not ranks:
            each = "" if ranks == size else f" / {size // ranks}"
            raise ConfigError(
                f"{flag} {count}: doesn't divide the world size {size}{each}; use one of "
                f"{', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}"
            )
    shards = size // config.tp // config.replicas
    n = config.reshard_after_forward
    if n is not None and not isinstance(n, bool) and (shards % n or n >= shards):
        fitting = [str(k) for k in range(2, shards) if shards % k == 0]
        raise ConfigError(
            f"--reshard-after-forward {n}: must be a divisor of the {shards} ranks that shard the model, and fewer "
            f"than they are; use {' or '.join([*fitting, 'true, which reshards to all of them'])}"
        )
    shares = size // config.tp // config.sp
    if config.global_batch_size is not None and config.global_batch_size < shares * config.grad_accumulation:
        raise ConfigError(
            f"--global-batch-size {config.global_batch_size}: is less than one sample for each of {shares} ranks and "
            f"{config.grad_accumulation} microbatches; use {shares * config.grad_accumulation} or more"
        )
    if config.tp > 1 and config.writes_full_model and large(config, config.spec):
        raise ConfigError(
            f"--save-model with --tp {config.tp}: a large model is written by all ranks in whole rows, and --tp splits "
            "columns too; add --no-save-model, and python -m fsdp2.checkpoint export writes it from the last checkpoint"
        )


def check_data(config: Config, *, read: bool = True) -> None:
    if config.dataset.startswith(data.OWN):
        from fsdp2_extra.text.refusals import check_own_text

        check_own_text(config, read=read)
    if config.data_root is None:
        return
    missing = data.missing_files(config.dataset, config.data_root)
    if missing:
        raise ConfigError(
            f"--data-root {config.data_root}: {missing[0]} is missing; give the folder above it, in torchvision's "
            "layout, or drop --data-root to download"
        )


def check_url(url: str, world: World) -> None:
    if url.startswith("memory://") and world.world_size > 1:
        raise ConfigError(
            f"--run-dir {url} with {world.world_size} ranks: memory:// lives inside one process, so the shards of the "
            "others would be lost; use a folder that all ranks see"
        )
    files_at(url, "--run-dir")
    try:
        temporary_folder()
    except OSError as error:
        raise ConfigError(f"--run-dir {url}: uploads are collected in a folder first: {error}") from None


def find_checkpoint(config: Config, store: Store) -> tuple[Origin, list[str]]:
    """Decide from `--resume` what to go on from, and say what was found. Dead saves are cleaned; damage stops the run.

    Raises ConfigError, and OSError for a folder that can't be read.
    """
    wanted, committed = config.resume, store.committed()
    partial, found, newest_kept = config.resume_partial, None, None
    if committed and not config.saves:
        raise ConfigError(
            f"--checkpoint-every never: {store.files} holds checkpoints, and what is trained after them would be lost; "
            f"choose another --run-dir, with --resume {store.checkpoint(committed[-1])} to begin with the newest"
        )
    dead = store.remove_dead()
    notes = [f"removed {name}, a save that was never committed" for name in dead]
    if wanted == "auto":
        if committed:
            found = str(store.checkpoint(committed[-1]))
        elif dead:
            notes.append("no checkpoint was ever committed here; starting fresh")
    elif wanted == "never":
        if committed:
            newest_kept = -1
            notes.append(f"--resume never: {len(committed)} checkpoints of the earlier run are set aside")
    elif is_step(wanted):
        if int(wanted) not in committed:
            raise ConfigError(
                f"--resume {wanted}: {store.files} holds no committed checkpoint of that step; "
                + (f"it has {', '.join(map(str, committed))}" if committed else "it has none at all")
            )
        found = str(store.checkpoint(int(wanted)))
        # A partial load begins a new training; else this one goes on from that step.
        newest_kept = -1 if partial else int(wanted)
        newer = [step for step in committed if step > newest_kept]
        if newer:
            notes.append(f"--resume {wanted}: checkpoints {', '.join(map(str, newer))} are set aside")
    else:
        found = checkpoint_at(wanted)
        if committed:
            raise ConfigError(
                f"--resume {wanted}: {store.files} has checkpoints of its own; choose another --run-dir, "
                "or --resume auto to go on with those"
            )
    if found is not None:
        try:
            checkpoint = open_files(found)
            marker = read_marker(checkpoint)
            require_metadata(checkpoint, marker)
            verify(checkpoint, hashes=False)
            if not says_finite(marker):
                notes.append(f"{found}: its weights hold NaN or infinity; --resume STEP chooses an older one")
        except DamagedCheckpoint as error:
            raise damaged(error) from None
    return Origin(found, partial, newest_kept=newest_kept), notes


def damaged(error: Exception) -> ConfigError:
    return ConfigError(
        f"--resume: the checkpoint is damaged: {error}; choose an older one with --resume STEP, or --resume never"
    )


def checkpoint_at(place: str) -> str:
    """Where a checkpoint is, or the newest of the run that is there. Raises ConfigError if there is none."""
    place = place.rstrip("/") if "://" in place else str(Path(place).absolute())
    files = files_at(place, "--resume")
    if is_there(files, MARKER):
        return place
    store = RunDir(place).store
    steps = store.committed()
    if not steps:
        raise ConfigError(
            f"--resume {place}: holds no committed checkpoint (no {MARKER}); give a step, the folder of a "
            "checkpoint or the folder of a run"
        )
    return str(store.checkpoint(steps[-1]))


def check_checkpoint(config: Config, model: nn.Module, checkpoint: Files) -> None:
    marker: dict[str, Any] = read_marker(checkpoint)
    saved, ours = marker.get("model", {}), shapes_of(model)
    wrong = [f"{name}: {saved.get(name, 'absent')} there, {ours.get(name, 'absent')} here" for name in
             sorted(saved.keys() | ours.keys()) if saved.get(name) != ours.get(name)]  # fmt: skip
    if wrong:
        raise ConfigError(
            f"--resume {config.resume}: {checkpoint} is of another model; {len(wrong)} tensors differ "
            f"({'; '.join(wrong[:3])}{'; …' if len(wrong) > 3 else ''}); give the --model and --model-size it was made "
            "with, another --run-dir, or --resume-partial for the weights that fit"
        )
    if config.model.startswith("hf:") and meaning.CONFIG in meaning.others(marker, kept_files(config)[meaning.PART]):
        raise ConfigError(
            f"--resume {config.resume}: {meaning.CONFIG} of --model {config.model} isn't as it was for {checkpoint}; "
            "it says what weights mean (heads, positions, norms); put it back (a run has it in model/), or start a new "
            "--run-dir with --init-from for the weights alone"
        )
    if marker.get("imported"):
        return  # by a program that had no flags of ours
    theirs, flags = marker.get("config", {}), to_flags(config)
    run = str(checkpoint).rpartition("/checkpoints/")[0]
    has_all = f" (--config {run}/config.json has all that the run had)" if run else ""
    for flag, why in KEPT.items():
        if flag in theirs and theirs[flag] != flags[flag]:
            raise ConfigError(
                f"--{flag} {flags[flag]}: the checkpoint to resume from was made with {theirs[flag]}; {why}. Use that"
                f"{has_all}, or start a new --run-dir, with --init-from for the weights alone"
            )
    if (theirs.get("mixed-precision") == "fp16") != (config.mixed_precision == "fp16"):
        raise ConfigError(
            f"--mixed-precision {config.mixed_precision or 'off'}: the checkpoint to resume from was made with "
            f"{theirs.get('mixed-precision') or 'off'}, and only fp16 has a gradient scaler; use the same"
        )


def changed_batch(config: Config, world: World, length: Length | None) -> str | None:
    """Say that steps will be of more or fewer samples than before, as they are where they follow the ranks."""
    now = config.global_batch(world.world_size)
    if length is None or length.samples == now:
        return None
    keeps = f"--global-batch-size {length.samples} keeps that on any number of ranks"
    return f"{now} samples a step from here on, and {length.samples} before: {keeps}"
