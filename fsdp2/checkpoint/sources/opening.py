"""Find out what a path or URL is, and open it as a `Source`: a checkpoint, a run, a .pt file, safetensors.

Reading runs no code from a file and follows no name out of its folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from fsdp2.checkpoint.files import Files, LocalFiles, is_there
from fsdp2.checkpoint.full_file import vouched_step
from fsdp2.checkpoint.places import open_files
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.sources.dcp_tensors import DcpTensors
from fsdp2.checkpoint.sources.pt_file import open_pt
from fsdp2.checkpoint.sources.safetensors_files import open_safetensors, read_index
from fsdp2.checkpoint.sources.source import Source, local_copy
from fsdp2.checkpoint.store import INDEX, MARKER, METADATA, STEP, Store, read_marker, verify

SAFETENSORS = ("model.safetensors", INDEX)
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"  # Hugging Face's older files
PART = re.compile(r"-[0-9]+-of-[0-9]+\.safetensors$")


# A run's checkpoint, also one that a run which went back has set aside.
CHECKPOINT_NAME = re.compile(rf"(superseded-[0-9]+-)?{STEP}")


def files_at(place: str) -> Files:
    """The files of a folder or URL. Raises Refused."""
    try:
        return open_files(place)
    except (ImportError, ValueError) as error:
        raise Refused(f"{place}: {error}") from None


def is_checkpoint(files: Files) -> bool:
    """Return whether this is one checkpoint, committed or not, rather than a run of them."""
    return is_there(files, MARKER) or is_there(files, METADATA)


def is_safetensors(files: Files) -> bool:
    """Return whether a folder holds a model in Hugging Face's layout, such as a run's full model."""
    return not is_there(files, METADATA) and any(is_there(files, name) for name in SAFETENSORS)


def is_hf(files: Files) -> bool:
    """True if a folder is a model of Hugging Face's, which never had a marker, rather than a run's that lost it."""
    return model_file(files) is not None and is_there(files, "config.json") and not is_checkpoint(files)


@contextmanager
def opened(place: str, kind: str = "auto") -> Iterator[Source]:
    """Open a checkpoint, a run (its newest checkpoint), a .pt file or safetensors, at a path or URL.

    Args:
        kind: `pt`, `safetensors` or `dcp` where `auto` can't tell.

    Raises Refused, DamagedCheckpoint or OSError.
    """
    with ExitStack() as stack:
        yield _open(place.rstrip("/") or place, kind, stack)


def _open(place: str, kind: str, stack: ExitStack) -> Source:
    folder, file = _folder_and_file(place)
    if file is not None:
        if kind == "dcp":
            raise Refused(f"{place}: is a file; a DCP checkpoint is a directory with {METADATA}, give that")
        if kind == "safetensors" or (kind == "auto" and file.endswith(".safetensors")):
            return open_safetensors(place, folder, {file: None}, stack)
        return replace(open_pt(place, local_copy(folder, file, stack)), folder=folder, file=file)
    model = model_file(folder)
    steps = Store(folder.at("checkpoints")).committed() if kind in ("auto", "dcp") else []
    if kind == "auto" and model is not None:
        _require_one_answer(place, folder, model, steps)
    if kind in ("auto", "dcp") and (model is None or kind == "dcp"):
        if is_checkpoint(folder):
            return _open_dcp(place, folder, stack)
        if steps:
            newest = Store(folder.at("checkpoints")).checkpoint(steps[-1])
            return _open_dcp(str(newest), newest, stack)
    if model is not None and kind in ("auto", "safetensors" if model in SAFETENSORS else "pt"):
        return replace(_open_model(place, folder, model, stack), folder=folder)
    if kind in ("auto", "safetensors"):
        names = [name for name in folder.list("") if name.endswith(".safetensors")]
        if len(names) > 1 or any(PART.search(name) for name in names):
            raise Refused(
                f"{place}: has {len(names)} of several safetensors files and no {INDEX}, which names them all"
            )
        if names:
            return replace(open_safetensors(place, folder, {names[0]: None}, stack), folder=folder)
    if kind in ("auto", "dcp") and (names := dcp_folders(folder)):
        return _together(place, [_open_dcp(f"{place}/{name}", folder.at(name), stack) for name in names])
    missing = {
        "auto": f"no {METADATA}, no committed checkpoint, no .safetensors and no {BIN}",
        "dcp": f"no {METADATA} and no committed checkpoint",
        "safetensors": "no .safetensors",
        "pt": "no file, but a folder",
    }[kind]
    raise Refused(f"{place}: is {missing}" if kind == "pt" else f"{place}: holds {missing}; give a folder that does")


def model_file(folder: Files) -> str | None:
    """The file by which transformers reads the weights of a folder, in its order; None for a folder without any."""
    return next((name for name in (*SAFETENSORS, BIN, BIN_INDEX) if folder.size(name) is not None), None)


def _require_one_answer(place: str, folder: Files, model: str, steps: list[int]) -> None:
    """Refuse a model whose folder holds other weights that a reader might take, or that its marker doesn't list."""
    other = METADATA if is_there(folder, METADATA) else f"checkpoints/ with {len(steps)} steps" if steps else None
    if other is not None:
        raise Refused(f"{place}: holds {model}, and a checkpoint too ({other}); move one of them to another folder")
    if is_there(folder, MARKER) and model not in read_marker(folder)["files"]:
        raise Refused(f"{place}: holds {model}, which its {MARKER} doesn't list; move that file away")


def _open_model(place: str, folder: Files, model: str, stack: ExitStack) -> Source:
    if model == INDEX:
        return open_safetensors(place, folder, read_index(place, folder), stack)
    if model in SAFETENSORS:
        return open_safetensors(place, folder, {model: None}, stack)
    files = [BIN] if model == BIN else list(read_index(place, folder, BIN_INDEX))
    for file in files:
        if folder.size(file) is None:
            raise Refused(f"{place}: {file} is missing, which {BIN_INDEX} names")
    return _together(place, [open_pt(f"{place}/{file}", local_copy(folder, file, stack)) for file in files])


def dcp_folders(folder: Files) -> list[str]:
    """Those in a folder that are DCP directories of other programs.

    accelerate, and transformers' Trainer with it, leaves `pytorch_model_fsdp_0` and `optimizer_0`.
    """
    found = (name for name in folder.folders("") if is_there(folder, f"{name}/{METADATA}"))
    return [name for name in found if not is_there(folder, f"{name}/{MARKER}")]


def _together(place: str, sources: list[Source]) -> Source:
    """Join sources of a model, or of a model and its optimizer. Raises Refused for a name that two of them hold."""
    owner: dict[str, Source] = {}
    tops: dict[str, Source] = {}  # of nested state dicts
    for source in sources:
        for name, path in source.paths.items():
            for held, key in ((owner, name), (tops, str(path[0]))):
                if (other := held.setdefault(key, source)) is not source:
                    both = " and in ".join(one.place.rsplit("/", 1)[-1] for one in (other, source))
                    raise Refused(f"{place}: {key} is in {both}; give one of them")
    return Source(
        place,
        {name: source.tensors[name] for name, source in owner.items() if name in source.tensors},
        [name for source in sources for name in source.values],
        {name: source.paths[name] for name, source in owner.items()},
        lambda name: owner[name].read(name),
        part=lambda name, ranges: owner[name].read_part(name, ranges),
    )


def _folder_and_file(place: str) -> tuple[Files, str | None]:
    """The place's files and None if it is a folder; else its folder's files and its name."""
    if "://" in place:
        parent, _, name = place.rpartition("/")
        if not parent.endswith("/"):  # not a bucket alone
            folder = files_at(parent)
            if folder.size(name) is not None:
                return folder, name
        return files_at(place), None
    path = Path(place).absolute()
    if not path.exists():
        raise Refused(f"{place}: there is nothing; give a checkpoint, the folder of a run, a .pt or safetensors")
    return (LocalFiles(path), None) if path.is_dir() else (LocalFiles(path.parent), path.name)


def _open_dcp(place: str, files: Files, stack: ExitStack) -> Source:
    try:
        listed = read_marker(files)["files"] if is_there(files, MARKER) else None
        found = DcpTensors(files, listed)
    except FileNotFoundError:
        flat = [name for name in files.list("") if name.endswith(".pt")]
        hint = f"; {flat[0]} is there, give that if it is meant" if flat else ""
        raise Refused(f"{place}: has no {METADATA}, which says what is in a checkpoint's files{hint}") from None
    stack.callback(found.close)
    in_files = sorted(found.files_of_values())
    return Source(
        place, found.tensors, found.values, found.paths, found.read, files, value_files=in_files, part=found.read_part
    )


VERIFIED = "verified"
FOREIGN = "a Hugging Face folder, taken as it is, since it has no hashes"


def verified(source: Source, names: Iterable[str] | None = None) -> str:
    """Compare what was opened with the hashes in its marker: VERIFIED, or "unverified" and why it can't be, or FOREIGN.

    Args:
        names: of files in its folder; unset = all that the marker lists.

    Raises DamagedCheckpoint.
    """
    folder, file = source.folder, source.file
    if folder is None or not is_there(folder, MARKER):
        if folder is not None and file is None and is_hf(folder):
            return FOREIGN
        return f"unverified: no {MARKER}"
    if file is not None:
        return f"unverified: {MARKER} doesn't list it" if vouched_step(folder, file) is None else VERIFIED
    verify(folder, names)
    return VERIFIED


def require_without_adapters(source: Source) -> None:
    """Raise Refused for a model in whose folder adapters lie, which change what it computes and aren't loaded."""
    folder = source.folder
    if folder is None or source.file is not None or model_file(folder) is None:
        return
    if adapters := next((name for name in sorted(folder.list("")) if name.startswith("adapter_model.")), None):
        fix = "merge them into their model with peft, or move them away to take the model without them"
        raise Refused(f"{source.place}/{adapters}: adapters aren't loaded; {fix}")


def require_undamaged(source: Source) -> str:
    """`verified`, for who goes on to write of it. Raises Refused for a save that died before its commit, and as
    `require_without_adapters` does."""
    require_without_adapters(source)
    answer, folder = verified(source), source.folder
    is_run_s = source.file is None and CHECKPOINT_NAME.fullmatch(str(folder).rsplit("/", 1)[-1])
    if answer != VERIFIED and is_run_s:
        raise Refused(f"{source.place}: is a save that was never committed (no {MARKER}); choose another one")
    return answer
