"""The weights of `--init-from`: loaded, and refused if they are damaged, of another model, NaN or infinite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fsdp2.checkpoint import meaning
from fsdp2.checkpoint.files import Files
from fsdp2.checkpoint.full_dtensor import scatter
from fsdp2.checkpoint.full_file import is_cast, verdict, vouched_step
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.sources.opening import is_checkpoint, opened, require_undamaged
from fsdp2.checkpoint.state import is_finite, plain_names
from fsdp2.checkpoint.store import DamagedCheckpoint, read_marker
from fsdp2.checkpoint.weights import OtherWeights, check_weights, load_weights
from fsdp2.config import Config
from fsdp2.models.initial import slices_of
from fsdp2.models.names import WEIGHTS
from fsdp2.options.errors import ConfigError
from fsdp2.parallel.meta import shared_names
from fsdp2.parallel.shards import local
from fsdp2.run.process.group import broadcast, gather, together

SCRATCH = "--init-from scratch for none"
SHOWN = 5


def library_loader(config: Config) -> Callable[..., Any] | None:
    """Make a function that loads the weights by the model's library, for a folder that the library wrote; else None."""
    spec, place = config.spec, Path(str(config.weights))
    has_own = (place / "config.json").is_file() and any(found for form in WEIGHTS for found in place.glob(form))
    if spec.load is None or not (config.init_from is None or has_own):
        return None
    return partial(spec.load, place, partial=config.init_partial)


def by_torch(config: Config) -> bool:
    """True if torch's API loads the weights to start from, a file of its own, and sends each whole from rank 0."""
    place = str(config.weights)
    is_file = "://" not in place and not Path(place).is_dir()  # a plan may be of one that isn't here
    return config.dcp_api and not config.init_partial and is_file and not place.endswith(".safetensors")


def _flag(config: Config) -> str:
    return f"--init-from {config.weights}" if config.init_from else f"--model {config.model}"


def check_init_from(config: Config, model: nn.Module) -> tuple[str, bool]:
    """Check the weights to start from. Returns a note, and whether rank 0 loads all of them by the model's library.

    Raises ConfigError if they are damaged or of another model.
    """
    place, spec, flag = str(config.weights), config.spec, _flag(config)
    fix = f"give weights of this model, or {SCRATCH}"
    load, other, packed = library_loader(config), "", list[str]()
    try:
        with opened(place) as source:
            packed += [name for name, tensor in source.tensors.items() if not is_cast(tensor.dtype)]
            if source.folder is not None and source.file is not None:
                vouched = verdict(vouched_step(source.folder, source.file))
            else:
                vouched = require_undamaged(source)
            if config.init_from and source.folder is not None:
                other = _other_meaning(source.folder, spec.files(config.model_size))
        tied = [list(spec.base_weights(group)) for group in shared_names(model)]
        some = config.init_partial and load is None
        check_weights(place, spec.base_weights(model.state_dict()), tied, partial=some)
    except DamagedCheckpoint as error:
        raise ConfigError(f"{flag}: is damaged: {error}; {fix}") from None
    except OtherWeights as error:
        if load is None:
            raise ConfigError(f"{flag}: {error}; {fix}") from None
        try:
            load(read=False, packed=packed)
        except ValueError as difference:
            raise ConfigError(f"{flag}: {difference}, or {SCRATCH}") from None
        why = "its files aren't the model's tensor by tensor; rank 0 loads the whole model by its library"
        return f"{flag}: {why}{other}", True
    except (OSError, Refused) as error:
        raise ConfigError(f"{flag}: can't be loaded ({error}); {fix}") from None
    return f"{flag}: {vouched}{other}", False


def _other_meaning(folder: Files, files: Mapping[str, bytes]) -> str:
    """Say that weights come with another config.json than the model's, which may give equal shapes other heads."""
    name = meaning.CONFIG
    if is_checkpoint(folder):
        other = name in meaning.others(read_marker(folder), files)
    else:
        size = folder.size(name) if name in files else None
        other = size is not None and (size != len(files[name]) or folder.read(name) != files[name])
    return f"; {name} there isn't the model's, so see that heads, positions and norms are the same" if other else ""


def require_finite(weights: Mapping[str, Tensor], what: str) -> None:
    """Raise ConfigError on every rank if weights from `what` hold NaN or infinity. A collective call."""
    tensors = {name: local(tensor) for name, tensor in weights.items()}
    wrong = {name: tensor for name, tensor in tensors.items() if not is_finite([tensor])}
    mine = {(name, "NaN") for name, tensor in wrong.items() if tensor.isnan().any()}
    mine |= {(name, "infinity") for name, tensor in wrong.items() if tensor.isinf().any()}
    everywhere = set[tuple[str, str]]().union(*gather(mine))
    if not everywhere:
        return
    names, kinds = (sorted(set(words)) for words in zip(*everywhere, strict=True))
    shown = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
    raise ConfigError(
        f"{what}: holds {' and '.join(kinds)}: {len(names)} of {len(tensors)} tensors ({shown}); the run that wrote it "
        "had diverged: use an older checkpoint of it"
    )


def load_into(model: nn.Module, config: Config) -> dict[str, Any]:
    """Put the weights that the run starts from into a model. A collective call; raises ConfigError on every rank.

    Returns, with `--init-partial`, how many tensors were loaded from where, and a line for each that was left out.
    """
    place, spec, flag = str(config.weights), config.spec, _flag(config)
    targets = spec.base_weights(plain_names(model))
    tied = [list(spec.base_weights(group)) for group in shared_names(spec.described(config.model_size))]
    load = library_loader(config)
    loaded, left_out = len(targets), list[str]()
    try:
        if by_torch(config):
            from fsdp2.checkpoint import full_dcp

            full_dcp.load_full_model_state(model, Path(place))
        else:
            fitting = load_weights(place, targets, slices_of, tied, partial=config.init_partial and load is None)
            loaded, left_out = len(fitting.names), list(fitting.left_out)
    except OtherWeights as error:
        if load is None:
            raise ConfigError(f"{flag}: {error}; give weights of this model, or --init-partial") from None
        full, wrong = load_by_library(load, flag)
        targets = {name: target for name, target in targets.items() if name not in wrong}
        scatter(full, targets)
        loaded, left_out = len(targets), [f"{name}: {why}" for name, why in wrong.items()]
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
    require_finite(targets, flag)
    return {"weights": place, "loaded": loaded, "left_out": left_out} if config.init_partial else {}


def load_by_library(
    load: Callable[[], tuple[Mapping[str, Tensor], Mapping[str, str]]], flag: str
) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:
    """Call `ModelSpec.load`, with the weights on rank 0 alone, in its memory. A collective call."""
    full: Mapping[str, Tensor] = {}
    wrong: Mapping[str, str] = {}
    with together():
        if dist.get_rank() == 0:
            try:
                full, wrong = load()
            except ValueError as error:
                raise ConfigError(f"{flag}: {error}, or {SCRATCH}") from None
    return full, broadcast(wrong)
