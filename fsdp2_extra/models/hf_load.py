"""A folder of transformers' model: where it is, and its weights as transformers reads them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp2.models.names import WEIGHTS, on_hub
from fsdp2.units import install
from fsdp2_extra.foreign.model_files import files_to_keep
from fsdp2_extra.models.hf_config import line, transformers_can

KEPT_FILES = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "special_tokens_map.json"),
    *("tokenizer*", "vocab*", "merges.txt", "*.model", "chat_template*", "added_tokens.json", "*.py"),
)
# What transformers calls the tensors of a file that aren't the model's.
DIFFERENCES = {
    "missing_keys": "only in the model",
    "unexpected_keys": "only in the file",
    "mismatched_keys": "another shape in the file",
}


def folder_of(place: str) -> Path:
    """The folder of a model. A name on the hub is looked up in its cache, or downloaded. Raises ValueError."""
    path = Path(place).expanduser()
    if path.is_dir():
        if adapters := sorted(path.glob("adapter_model.*")):
            other = ", or move them away to train the model without them" * (path / "config.json").is_file()
            raise ValueError(f"{adapters[0]}: adapters aren't loaded; merge them into their model with peft{other}")
        if not (path / "config.json").is_file():
            raise ValueError(f"{place}: has no config.json; give the folder that save_pretrained wrote")
        files_to_keep(path, KEPT_FILES)
        return path.absolute()
    if not on_hub(place):
        raise ValueError(f"{place}: is no folder; give one with a config.json, or a name on the hub, owner/model")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        # Ranks that ask at the same time wait for each other at the hub's own locks.
        return Path(snapshot_download(place, allow_patterns=[*KEPT_FILES, *WEIGHTS, "*.index.json"]))
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise ValueError(f"{place}: no folder here and no model on the hub has this name ({line(error)})") from None
    except (LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{place}: is not in the hub's cache, and can't be downloaded ({line(error)}); download it where there is "
            "a network and give its folder"
        ) from None


def load(
    auto: Any, config: Any, trusted: bool, place: Path,
    *, partial: bool = False, read: bool = True, packed: Sequence[str] = (),
) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:  # fmt: skip
    """`ModelSpec.load`, by a class of transformers that makes models of a configuration. Raises ValueError like it."""
    from transformers.utils import logging

    folder_of(str(place))  # refuses what isn't the folder of a whole model
    if not read and importlib.util.find_spec("accelerate") is None:
        raise ValueError(f"accelerate isn't installed; {install('hf')}")
    # As from_pretrained says it, files that lack something or have more are a warning; here they are an error.
    how = {"config": config, "trust_remote_code": trusted, "use_safetensors": True, "dtype": torch.float32}
    how |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "device_map": None if read else "meta"}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its report of them is a table, and the lines below say what it says
    try:
        with without_bars(), transformers_can(f"load {place}", place, trusted=trusted, fix="; give another"):
            model, info = auto.from_pretrained(place, **how)
    finally:
        logging.set_verbosity(verbosity)
    wrong = {
        str(one[0] if isinstance(one, tuple) else one): DIFFERENCES.get(kind, kind)  # a name, or it and two shapes
        for kind, found in info.items()
        for one in sorted(found)
    }
    state: Mapping[str, Tensor] = model.state_dict()
    if quantized := _weights_of(model, packed) - wrong.keys():
        raise ValueError(f"{place}: {min(quantized)} is of integers or 8 bits and needs scales; give 16 or more")
    if wrong and not (partial and state.keys() - wrong.keys()):
        lines = "; ".join(f"{name}: {kind}" for name, kind in [*wrong.items()][:20])
        raise ValueError(f"{place} is of another model; {len(wrong)} tensors differ: {lines}; use --init-partial")
    return state, wrong


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide the progress bars of transformers in the body."""
    from transformers.utils import logging

    as_before = logging.enable_progress_bar if logging.is_progress_bar_enabled() else logging.disable_progress_bar
    logging.disable_progress_bar()
    try:
        yield
    finally:
        as_before()


def _weights_of(model: nn.Module, packed: Sequence[str]) -> set[str]:
    """Names of a folder's tensors without those of tables and counters, and those that the class never reads."""
    own = {name.rpartition(".")[2] for name, one in model.named_buffers() if not one.is_floating_point()}
    ignored = re.compile("|".join(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ["$^"]))
    return {name for name in packed if name.rpartition(".")[2] not in own and not ignored.search(name)}
