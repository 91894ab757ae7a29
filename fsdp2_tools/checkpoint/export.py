"""`export`: the model of a checkpoint in another format, one tensor at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fsdp2.checkpoint.disk import chain, explained
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.meaning import TOKENIZER, require_kept
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.sources.opening import opened, require_undamaged
from fsdp2.checkpoint.sources.pt_file import write_pt
from fsdp2.checkpoint.sources.source import averaged, weights
from fsdp2.checkpoint.store import DamagedCheckpoint
from fsdp2_extra.text.tokenizer_file import SETTINGS, is_tokenizers
from fsdp2_tools.checkpoint.adapters import Adapters, marker_of, merged, same_base, vouched, write_peft
from fsdp2_tools.checkpoint.card import NAME as CARD
from fsdp2_tools.checkpoint.dcp_write import write_dcp
from fsdp2_tools.checkpoint.hf_folder import dtype_of, tied, without_copies, write_hf
from fsdp2_tools.checkpoint.nonfinite import Nonfinite
from fsdp2_tools.checkpoint.options import FOLDERS
from fsdp2_tools.checkpoint.safetensors_write import write_safetensors
from fsdp2_tools.checkpoint.stopping import name_ends
from fsdp2_tools.results import sigterm_exits

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}  # as config.json has it -> ours
MAX_SHARD_SIZE = 4_000_000_000
NOTHING_OVERWRITTEN = "nothing is overwritten; choose another path"
WRITING = "another process is writing there, or has died: then remove it"


def export(
    place: str,
    out: str,
    to: str,
    *,
    dtype: str | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
    like: tuple[Any, Mapping[str, bytes]] | None = None,
    tokenizer: Mapping[str, bytes] | None = None,
    adapters: Adapters | None = None,
    base: str | None = None,
    average: bool = False,
    card: Callable[[int | None], bytes] | None = None,
    peft: Mapping[str, str] = MappingProxyType({}),
    talks: bool = False,
) -> str:
    """Write the model's weights with plain names; `out` is there as a whole or not at all.

    Args:
        place: what `opened` takes. A checkpoint's hashes are verified first.
        to: `pt` (a file), `safetensors` (a folder in Hugging Face's layout), `dcp` (a directory), or `hf` (a folder
            that `from_pretrained` loads), or `peft` (a folder of adapters, and their tokenizer).
        dtype: `bf16`, `fp16` or `fp32`, of floating point tensors; the others stay as they are. Unset = for `hf`, what
            the model's own config.json says, if `like` has one; else the source's.
        max_shard_size: bytes of tensors in one safetensors file.
        like: for `hf` and `peft`, transformers' model on meta, and name -> content of a file that goes with it. With
            it `safetensors` too writes what is tied once.
        average: the average of the weights in their place.
        tokenizer: for `hf` and `peft`, path -> content of the tokenizer that is written in the place of that of `like`;
            empty = none is. Unset = the model was trained with its own.
        adapters: as the run's file describes those of the checkpoint, which are added to the weights but for `peft`.
        card: makes the README.md of a folder of `hf` or `peft`, of the checkpoint's step if it has one.
        peft: for `peft`, `task_type` and `base_model_name_or_path` in the place of what the run's file says.
        base: where those weights are, if not where the file says.
        talks: the model has learned conversations, so that it stops where its chat template ends an answer.

    Returns a line that says what was written. Raises Refused, DamagedCheckpoint or OSError.
    """
    target, nonfinite, stops = new_path(out), Nonfinite(), ""
    config = like[1].get("config.json") if to == "hf" and like is not None and dtype is None else None
    implied = NAMES.get(dtype_of(config) or "") if config is not None else None
    dtype = dtype or implied
    aside = new_path(f"{target}.tmp", hint=WRITING)
    with ExitStack() as stack:
        source = stack.enter_context(opened(place))
        checked = require_undamaged(source)
        trained, marker = source, marker_of(source)
        if like is not None and marker:
            require_kept(marker, like[1], f"{place}: model")
            if to in FOLDERS:
                require_kept(marker, tokenizer or {}, f"{place}: {TOKENIZER}", TOKENIZER)
        adapters = vouched(adapters, source)
        if to == "peft" and adapters is None:
            raise Refused(f"--format peft: {place} holds no adapters, which runs with --lora have; use hf")
        if average:
            source = averaged(source)
        if adapters is not None and to != "peft":
            if "://" in adapters.base and base is None:
                url = adapters.base
                raise Refused(f"{place}: its adapters go beside weights at a URL; if you trust that, add --base {url}")
            under = stack.enter_context(opened(base or adapters.base))
            checked += same_base(source, under, tied(like[0]) if like is not None else [])
            source = trained = merged(source, under, adapters, rounded=dtype is None)
        names = weights(source)
        if like is not None:
            names = without_copies(trained, names, like[0])
        tensors = {name: _cast(name, source.tensors[original], dtype) for name, original in names.items()}

        beside = {} if like is None else _with_tokenizer(like[1], tokenizer)

        def read(name: str) -> Tensor:
            tensor = _cast(name, source.read(names[name]), dtype).contiguous()
            nonfinite.look(name, tensor)
            return tensor

        LocalFiles(target.parent).mkdir("")
        needed = sum(tensor.nbytes for tensor in tensors.values())
        with whole_or_absent(aside, folder=to != "pt", needed=needed):
            if to == "pt":
                write_pt(aside, tensors, read)
            else:
                if to == "safetensors":
                    write_safetensors(LocalFiles(aside), tensors, read, max_shard_size)
                elif adapters is not None and to == "peft":
                    beside = {name: content for name, content in beside.items() if is_tokenizers(name)}
                    write_peft(LocalFiles(aside), adapters, tensors, read, peft, beside)
                elif to == "hf":
                    assert like is not None
                    write_hf(aside, tensors, read, like[0], beside, max_shard_size)
                else:
                    write_dcp(LocalFiles(aside), tensors, {}, {name: (name,) for name in tensors}, read)
                if talks and to in FOLDERS and like is not None:
                    stops = name_ends(aside, like[1])
                if card is not None and to in FOLDERS and not (aside / CARD).exists():
                    (aside / CARD).write_bytes(card(marker.get("step")))
            give_name(aside, target)
    dtypes = sorted({str(one.dtype).removeprefix("torch.") for one in tensors.values() if one.is_floating_point()})
    said = f"{target}: {len(tensors)} tensors, {needed:,} bytes, {' and '.join(dtypes) or 'no floating point'}"
    if implied is not None:
        said += " as in the model's config.json (--dtype chooses another)"
    return "; ".join([said, f"the source is {checked}", *filter(None, [stops]), *nonfinite.note()])


def _with_tokenizer(beside: Mapping[str, bytes], tokenizer: Mapping[str, bytes] | None) -> dict[str, bytes]:
    """The files beside a model with another tokenizer in the place of its own. config.json stays the model's."""
    if tokenizer is None:
        return dict(beside)
    of_model = {name: content for name, content in beside.items() if not is_tokenizers(name)}
    return {**{name: content for name, content in tokenizer.items() if name != SETTINGS}, **of_model}


def new_path(out: str, hint: str = NOTHING_OVERWRITTEN) -> Path:
    """The path to write to. Raises Refused for a URL, or with the hint for what exists."""
    if "://" in out:
        raise Refused(f"{out}: is a URL; write to a local path and copy it from there")
    path = Path(out).absolute()
    if path.exists() or path.is_symlink():
        raise Refused(f"{out}: exists; {hint}")
    return path


def give_name(aside: Path, target: Path) -> None:
    """Give what was written aside its name, durably. Raises Refused for what has come there meanwhile."""
    folder = LocalFiles(target.parent)
    folder.fsync(aside.name)
    try:
        if aside.is_dir():
            folder.rename(aside.name, target.name)  # of folders the system replaces an empty one alone
        else:
            os.link(aside, target)  # a rename would replace a file
    except OSError:
        # A server that is asked again answers that it is there.
        if os.path.lexists(target) and not (aside.is_file() and os.path.samefile(aside, target)):
            raise Refused(f"{target}: exists since a moment; {NOTHING_OVERWRITTEN}") from None
        if aside.is_dir():
            raise
        if not os.path.lexists(target):
            folder.rename(aside.name, target.name)  # where a file system has no hard links
    if aside.is_file():
        aside.unlink()
    folder.fsync("")


@contextmanager
def whole_or_absent(path: Path, *, folder: bool, needed: int | None = None) -> Iterator[None]:
    """Make a new folder or file, and remove it if its writing, of `needed` bytes, ends with an error or a signal.

    Raises Refused for one that exists, and OSError in the place of an error that a disk has caused.
    """
    try:
        if folder:
            path.mkdir()
        else:
            path.touch(exist_ok=False)
    except FileExistsError:  # since `new_path` looked, perhaps
        raise Refused(f"{path}: exists; {WRITING}") from None
    except OSError as error:
        raise OSError(f"{path} was not written: {error}") from error
    try:
        with sigterm_exits():
            yield
    except BaseException as error:
        # torch.save, which could not write, fails with an error of its own because of it. Looked at first: what is
        # free now is not what was free.
        cause: OSError | None = explained(error, path.parent, needed)
        cause = cause or next((one for one in chain(error) if isinstance(one, OSError)), None)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if isinstance(error, (Refused, DamagedCheckpoint)):
            raise
        if cause is not None:
            raise OSError(f"{path} was not written: {cause}") from error
        raise


def _cast(name: str, tensor: Tensor, dtype: str | None) -> Tensor:
    if dtype is None or not tensor.is_floating_point():
        return tensor
    cast = tensor.to(DTYPES[dtype])
    narrower = torch.finfo(cast.dtype).max < torch.finfo(tensor.dtype).max
    if narrower and not tensor.is_meta and int(cast.isinf().sum()) != int(tensor.isinf().sum()):
        largest = f"{tensor.abs().max().item():g}"
        raise Refused(f"--dtype {dtype}: {name} has values up to {largest}, too large for it; use --dtype fp32")
    return cast
