"""Find out what a path holds: which files belong together, who wrote them, and what is none of it.

Each writer that is known has a function that says by what it is recognised. The names of files and of keys are those
in the writers' own code: accelerate's `utils/fsdp_utils.py`, Lightning's `strategies/fsdp.py`, Composer's
`utils/checkpoint.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.sources.opening import VERIFIED, opened, require_undamaged
from fsdp2.checkpoint.sources.pt_file import NoStateDict, open_pt
from fsdp2.checkpoint.sources.safetensors_files import INDEX
from fsdp2.checkpoint.store import MARKER, METADATA
from migration.checkpoints.rank_files import RANK_FILE, RankFiles, joined
from migration.checkpoints.tree import Tree, is_shard, tree_of

SAVED = (".pt", ".pth", ".bin", ".ckpt", ".tar")  # by torch.save


@dataclass
class Piece:
    """One file, DCP directory, or set of files of all ranks.

    Attributes:
        label: its name, `.` for the place itself.
        checked: whether hashes in a marker vouch for it.
        notes: lines on how it was understood.
        is_file: whether its tensors are mapped from a file of torch.save, where two may be one memory.
    """

    label: str
    tree: Tree
    ranks: RankFiles | None = None
    checked: bool = False
    is_file: bool = False
    notes: list[str] = field(default_factory=list)


@dataclass
class Found:
    """The checkpoint at a place.

    Attributes:
        writer: who wrote it, in words.
        kind: SHARDED_STATE_DICT and so on.
        aside: names of files that were not opened.
    """

    place: Path
    writer: str
    kind: str
    pieces: list[Piece]
    aside: list[str] = field(default_factory=list)


# --- by what a writer is recognised ------------------------------------------------------------------------


def by_accelerate(names: Sequence[str], trees: Sequence[Tree]) -> bool:
    """accelerate, also inside of transformers.Trainer: pytorch_model_fsdp_0/ and optimizer_0/, or .bin of them."""
    return any(re.match(r"pytorch_model_fsdp(_|\.)", name) for name in names)


def by_lightning(names: Sequence[str], trees: Sequence[Tree]) -> bool:
    """Lightning: meta.pt beside a DCP directory's files, or the version that its .ckpt notes."""
    return "meta.pt" in names or any(("pytorch-lightning_version",) in tree for tree in trees)


def by_composer(names: Sequence[str], trees: Sequence[Tree]) -> bool:
    """Composer: everything under `state`, beside the random state."""
    return any(path[:2] == ("state", "model") for tree in trees for path in tree)


WRITERS: dict[str, Callable[[Sequence[str], Sequence[Tree]], bool]] = {
    "accelerate": by_accelerate,
    "Lightning": by_lightning,
    "Composer": by_composer,
}

# What others write that is no checkpoint of FSDP1: a file's name, and what to do.
OTHERS = {
    r"mp_rank_\d+.*model_states\.pt|.*zero_pp_rank_.*|zero_to_fp32\.py": "is DeepSpeed's; its zero_to_fp32.py writes a "
    "state dict, which `python -m fsdp2.checkpoint import` takes",
    r"latest_checkpointed_iteration\.txt|common\.pt": "is Megatron's; convert it with Megatron's own tools first",
}


# --- what is there -------------------------------------------------------------------------------------------


def is_ours(place: Path) -> bool:
    """Return whether it is a checkpoint of training here, or a run with one."""
    return (place / MARKER).exists() or any((place / "checkpoints").glob(f"*/{MARKER}"))


def is_fsdp1s(place: str) -> bool:
    """Return whether a place is there, as a file or folder, and isn't a checkpoint of this project."""
    return Path(place).exists() and not is_ours(Path(place))


def look(place: Path, stack: ExitStack) -> Found:
    """Open what is at a path. Raises Refused for what isn't a checkpoint, OSError or DamagedCheckpoint."""
    if not place.exists():
        raise Refused(f"{place}: there is nothing; give a checkpoint's file or folder")
    if not place.is_dir():
        match = RANK_FILE.fullmatch(place.name)
        if match and len(same := _rank_files(place.parent, match[1], match[3])) > 1:
            return _found(place, [place.name], [_of_ranks(place.parent, same)], [])
        piece = _safetensors(place, stack) if place.suffix == ".safetensors" else _file(place)
        if any(map(is_shard, piece.tree.values())):
            raise Refused(f"{place}: is one rank's, and the files of the others aren't beside it; put them there")
        return _found(place, [place.name], [piece], [])
    names = sorted(path.name for path in place.iterdir())
    if is_ours(place):
        raise Refused(
            f"{place}: is a checkpoint of fsdp2.train already, which every strategy resumes: give it to --resume; "
            "--to fsdp1-full makes FSDP1's of it"
        )
    if METADATA in names:
        beside = [_file(place / "meta.pt")] if "meta.pt" in names else []
        return _found(place, names, [_directory(place, ".", stack), *beside], [])
    pieces, aside = [], []
    grouped: dict[tuple[str, str], list[Path]] = {}
    for name in names:
        path, match = place / name, RANK_FILE.fullmatch(name)
        if path.is_dir():
            if (path / METADATA).is_file():
                pieces.append(_directory(path, name, stack))
            else:
                aside.append(name)
        elif match and name.endswith(SAVED):
            grouped.setdefault((match[1], match[3]), []).append(path)
        elif name.endswith(".safetensors"):
            if INDEX not in names:
                pieces.append(_safetensors(path, stack))
        elif name.endswith(SAVED):
            try:
                pieces.append(_file(path))
            except NoStateDict:
                aside.append(name)  # such as a trainer's arguments
        elif name == INDEX:
            pieces.append(_safetensors(place, stack))  # which says what is in the others
        else:
            aside.append(name)
    pieces += [_of_ranks(place, files) for files in grouped.values()]
    if not pieces:
        for pattern, what in OTHERS.items():
            if any(re.fullmatch(pattern, name) for name in names):
                raise Refused(f"{place}: {what}")
        steps = [name for name in aside if (place / name).is_dir() and any((place / name).iterdir())]
        hint = f"; give one of the folders in it, such as {steps[-1]}" if steps else ""
        raise Refused(f"{place}: holds no checkpoint that is known: no {METADATA}, and no {' '.join(SAVED)}{hint}")
    return _found(place, names, pieces, aside)


def _found(place: Path, names: Sequence[str], pieces: list[Piece], aside: list[str]) -> Found:
    trees = [piece.tree for piece in pieces]
    writer = next((name for name, recognised in WRITERS.items() if recognised(names, trees)), "plain torch")
    if any(piece.ranks is not None for piece in pieces):
        local = any("_flat_param" in path[-1] for tree in trees for path in tree if isinstance(path[-1], str))
        kind = "LOCAL_STATE_DICT" if local else "files of all ranks"
    else:
        is_dcp = METADATA in names or any((place / piece.label / METADATA).is_file() for piece in pieces)
        kind = "SHARDED_STATE_DICT" if is_dcp else "FULL_STATE_DICT"
    return Found(place, writer, kind, pieces, aside)


def _file(path: Path) -> Piece:
    return Piece(path.name, tree_of(open_pt(str(path), path, objects=True)), is_file=True)


def _safetensors(path: Path, stack: ExitStack) -> Piece:
    return Piece(path.name, tree_of(stack.enter_context(opened(str(path), "safetensors"))))


def _directory(path: Path, label: str, stack: ExitStack) -> Piece:
    source = stack.enter_context(opened(str(path), "dcp"))
    checked = require_undamaged(source)
    return Piece(label, tree_of(replace(source, place=str(path))), checked=checked == VERIFIED)


def _rank_files(folder: Path, before: str, after: str) -> list[Path]:
    matches = ((path, RANK_FILE.fullmatch(path.name)) for path in sorted(folder.iterdir()))
    return [path for path, match in matches if match and (match[1], match[3]) == (before, after)]


def _of_ranks(folder: Path, files: Sequence[Path]) -> Piece:
    if len(files) == 1 and not any(map(is_shard, (whole := _file(files[0])).tree.values())):
        return whole  # trainers put `rank0` into the names of whole files too
    ranks = joined(folder, files)
    return Piece(ranks.label, ranks.tree, ranks)
