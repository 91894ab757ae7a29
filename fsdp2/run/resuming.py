"""A run that is resumed: which checkpoint `--resume` means, what of it has to fit, and what changes from there on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from fsdp2.checkpoint import meaning
from fsdp2.checkpoint.files import Files, is_there
from fsdp2.checkpoint.places import open_files
from fsdp2.checkpoint.store import MARKER, DamagedCheckpoint, Store, read_marker, require_metadata, says_finite, verify
from fsdp2.config import Config
from fsdp2.data import OWN
from fsdp2.options.errors import ConfigError, shown
from fsdp2.options.parser import files_at, to_flags
from fsdp2.options.values import is_step
from fsdp2.run.directory.marker import kept_files, shapes_of
from fsdp2.run.directory.rundir import RunDir
from fsdp2.run.job import Origin
from fsdp2.run.process.runtime import World
from fsdp2.run.schedule import Length

# Flags that a resumed run must share with its checkpoint, and what would go wrong if they differed.
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


def choose_checkpoint(config: Config, store: Store, committed: Sequence[int]) -> tuple[Origin, list[str]]:
    """Choose the checkpoint that `--resume` means, and say what becomes of others. Damage ends the run.

    `committed` are the steps that the run's own store holds. Raises ConfigError, and OSError for a folder that can't be
    read.
    """
    wanted, partial, notes = config.resume, config.resume_partial, list[str]()
    found, newest_kept = None, None
    if wanted == "auto":
        found = str(store.checkpoint(committed[-1]))
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


def check_resume(
    config: Config, world: World, model: nn.Module, origin: Origin
) -> tuple[int, Origin, tuple[str | None, ...]]:
    """Check that a checkpoint fits: the steps done by then, the origin with its length, and what changes from here on.

    Raises ConfigError as `check_checkpoint` does.
    """
    checkpoint = open_files(str(origin.checkpoint))
    marker = read_marker(checkpoint)
    check_checkpoint(config, model, checkpoint, marker)
    length = length_before(marker)
    changes = changed_batch(config, world, length), changed_flags(config, marker), changed_files(config, marker)
    return marker["step"], origin._replace(before=length), changes


def damaged(error: Exception) -> ConfigError:
    """The refusal of a damaged checkpoint."""
    fix = "choose an older one with --resume STEP, or --resume never"
    return ConfigError(f"--resume: the checkpoint is damaged: {error}; {fix}")


def checkpoint_at(place: str) -> str:
    """Resolve a place to a checkpoint: itself, or the newest of the run there. Raises ConfigError if there is none."""
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


def check_checkpoint(config: Config, model: nn.Module, checkpoint: Files, marker: Mapping[str, Any]) -> None:
    """Raise ConfigError if a run can't go on from a checkpoint: it has another model, or flags that may not change."""
    saved, ours = marker.get("model", {}), shapes_of(model)
    wrong = [f"{name}: {saved.get(name, 'absent')} there, {ours.get(name, 'absent')} here" for name in
             sorted(saved.keys() | ours.keys()) if saved.get(name) != ours.get(name)]  # fmt: skip
    run = str(checkpoint).rpartition("/checkpoints/")[0]
    has_all = f" (--config {run}/config.json has all that the run had)" if run else ""
    if wrong:
        raise ConfigError(
            f"--resume {config.resume}: {checkpoint} is of another model; {len(wrong)} tensors differ "
            f"({'; '.join(wrong[:3])}{'; …' if len(wrong) > 3 else ''}); give the --model and --model-size it was made "
            f"with{has_all}, another --run-dir, or --resume-partial for the weights that fit"
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
    # A run of an earlier version lacks newer flags, and did what their defaults mean.
    # None is a default where the field's type has it; elsewhere it stands for one that depends on the model.
    usual: dict[str, Any] = {
        one.name.replace("_", "-"): [] if one.default == () else one.default
        for one in fields(config)
        if one.default is not None or "None" in one.type
    }
    for flag, why in KEPT.items():
        kinds = {f"{str(one.get(flag)).partition(':')[0]}:" for one in (theirs, flags)}
        if flag == "dataset" and len(kinds) == 1 and kinds <= {*OWN}:
            continue  # wherever it lies now: its content is compared once it is read
        if (was := theirs.get(flag, usual.get(flag, flags[flag]))) != flags[flag]:
            raise ConfigError(
                f"--{flag} {flags[flag]}: the checkpoint to resume from was made with {was}; {why}. Use that"
                f"{has_all}, or start a new --run-dir, with --init-from for the weights alone"
            )
    if (theirs.get("mixed-precision") == "fp16") != (config.mixed_precision == "fp16"):
        raise ConfigError(
            f"--mixed-precision {config.mixed_precision or 'off'}: the checkpoint to resume from was made with "
            f"{theirs.get('mixed-precision') or 'off'}, and only fp16 has a gradient scaler; use the same"
        )


def changed_batch(config: Config, world: World, length: Length | None) -> str | None:
    """Say that steps have more or fewer samples from here on: without --global-batch-size they follow the ranks."""
    now = config.global_batch(world.world_size)
    if length is None or length.samples == now:
        return None
    keeps = f"--global-batch-size {length.samples} keeps that on any number of ranks"
    return f"{now} samples a step from here on, and {length.samples} before: {keeps}"


def length_before(marker: Mapping[str, Any]) -> Length | None:
    """The length of the run that wrote a checkpoint with this marker; None if it doesn't say, as an imported one."""
    flags = marker.get("config", {})
    epochs, most, samples = flags.get("epochs"), flags.get("max-steps"), flags.get("global-batch-size")
    parts = [flags.get("batch-size"), flags.get("grad-accumulation"), marker.get("world_size")]
    together = [flags.get(name, 1) for name in ("tp", "sp")]  # ranks that have the same samples
    if samples is None and all(type(one) is int and one > 0 for one in (*parts, *together)):
        samples = math.prod(parts) // math.prod(together)
    if not all(type(one) is int and one > 0 for one in (epochs, samples, 1 if most is None else most)):
        return None
    return Length(epochs, most, samples)


# Flags that change what a resumed run computes. Without `--init-from` it has more epochs by default.
_COMPUTES = ("epochs", "clip-grad-norm", "mixed-precision", "reduce-dtype", "float8", "on-nonfinite", "lora-dropout")


def changed_flags(config: Config, marker: Mapping[str, Any]) -> str | None:
    """Say that the steps from here on compute differently from those before the checkpoint; None if they don't."""
    then, now = marker.get("config", {}), to_flags(config)
    words = [
        f"--{flag} {now[flag] or 'off'} (before: {shown(then[flag] or 'off')})"
        for flag in _COMPUTES
        if flag in then and then[flag] != now[flag]
    ]
    return f"from here on {', '.join(words)}" if words else None


def changed_files(config: Config, marker: Mapping[str, Any]) -> str | None:
    """Name the files of a model or a tokenizer that have changed since: weights may mean something else then."""
    words, files = [], kept_files(config)
    for part, name in ((meaning.PART, config.model), (meaning.TOKENIZER, f"--tokenizer {config.tokenizer or 'unset'}")):
        found = meaning.others(marker, files.get(part, {}), part)
        if found and (part != meaning.PART or name.startswith("hf:")):
            words.append(f"{', '.join(map(shown, found[:3]))} of {name}")
    return f"since the checkpoint {' and '.join(words)} changed" if words else None
