"""`list`, `verify` and `show`: what checkpoints there are, whether they are whole, and what is in one."""

from __future__ import annotations

import sys
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

from fsdp2.checkpoint.files import Files, LocalFiles, is_there, size_of
from fsdp2.checkpoint.refusal import Refused, refusal
from fsdp2.checkpoint.restore import require_step
from fsdp2.checkpoint.sources.dcp_tensors import DcpTensors
from fsdp2.checkpoint.sources.opening import (
    CHECKPOINT_NAME,
    VERIFIED,
    files_at,
    is_checkpoint,
    is_safetensors,
    opened,
    verified,
)
from fsdp2.checkpoint.sources.source import Source, part_of
from fsdp2.checkpoint.store import MARKER, METADATA, DamagedCheckpoint, Store, read_marker, verify
from fsdp2.units import printable
from fsdp2.units import size as size_in_words
from fsdp2_tools.checkpoint.card import evaluated
from fsdp2_tools.checkpoint.nonfinite import Nonfinite

_STEP = "app.progress.step"


def _print_table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _when(seconds: Any) -> str:
    try:
        return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (TypeError, ValueError, OverflowError, OSError):
        return "?"  # a stranger's marker says what it likes


# --- list ------------------------------------------------------------------------------------------------


def list_checkpoints(run: str, *, quick: bool) -> int:
    """A table of a run's checkpoints, the dead and the superseded ones too. Returns the exit status.

    Raises Refused if there is none.
    """
    place = files_at(run).at("checkpoints")
    names = [name for name in place.list("") if CHECKPOINT_NAME.fullmatch(name)]
    if not names:
        raise Refused(f"{run}: holds no checkpoints; give the folder of a run")
    title = "verified (sizes alone)" if quick else "verified"
    losses = {} if quick else evaluated(files_at(run))
    rows = [["checkpoint", "step", "eval loss", "when", "size", "ranks", "committed", title]]
    for name in sorted(names, key=lambda name: (name.startswith("superseded"), name)):
        files = place.at(name)
        step = int(name.rsplit("-", 1)[-1])
        loss = f"{losses[step]:.5g}" if step in losses and not name.startswith("superseded") else ""
        sizes = [size_of(files, file) or 0 for file in files.list("")]
        when = _when(files.root.lstat().st_mtime if isinstance(files, LocalFiles) else None)  # a URL has no such time
        entries = {"size": size_in_words(sum(sizes)), "ranks": "", "when": when, "verified": ""}
        dead = not is_there(files, MARKER)
        if not dead:
            try:
                marker = read_marker(files)
                entries |= {"when": _when(marker.get("time")), "ranks": str(marker.get("world_size", ""))}
                verify(files, hashes=not quick)
                entries["verified"] = "ok"
            except DamagedCheckpoint as error:
                entries["verified"] = refusal(str(error).removeprefix(f"{files}: "))
        committed = "no, a dead save" if dead else "superseded" if name.startswith("superseded") else "yes"
        rows.append([name, str(step), loss, *(entries[one] for one in ("when", "size", "ranks")), committed])
        rows[-1].append(entries["verified"])
    _print_table(rows, right=(1, 2, 4, 5))
    return 0


# --- verify ----------------------------------------------------------------------------------------------


def verify_checkpoints(place: str) -> int:
    """Check hashes and that all can be read, of one checkpoint or all of a run. Returns the exit status."""
    files = files_at(place)
    if is_checkpoint(files):
        return _verify_one(files)
    store, model = Store(files.at("checkpoints")), files.at("full_model")
    checkpoints = [store.checkpoint(step) for step in store.committed()]
    if is_there(model, MARKER):
        checkpoints.append(model)
    elif model.list(""):
        print(printable(f"unverified: {model}: no {MARKER}"))
    if not checkpoints:
        print(f"{place}: holds no committed checkpoint (no {MARKER})", file=sys.stderr)
        return 1
    return max(_verify_one(checkpoint) for checkpoint in checkpoints)


def _verify_one(files: Files) -> int:
    try:
        if not is_there(files, MARKER):
            raise DamagedCheckpoint(f"{files}: was never committed (no {MARKER})")
        marker = read_marker(files)
        listed = marker["files"]
        verify(files)
        weights = Nonfinite()
        tensors, values = _read_all(files, marker, weights)
    except (DamagedCheckpoint, Refused, FileNotFoundError) as error:
        print(f"bad: {refusal(str(error))}", file=sys.stderr)
        return 1
    size = size_in_words(sum(file["size"] for file in listed.values()))
    line = f"ok: {files}: {len(listed)} files, {size}; {tensors} tensors and {values} plain values can be read"
    print(printable(line + "".join(f"; {one}" for one in weights.note())))
    return 0


def _read_all(files: Files, marker: Mapping[str, Any], weights: Nonfinite) -> tuple[int, int]:
    """The number of tensors and plain values. Raises DamagedCheckpoint that names what can't be read."""
    listed: Container[str] = marker["files"]
    full = [f"{files}/{name}" for name in files.list("") if name.endswith(".pt") and name in listed]
    if is_safetensors(files):
        full.append(str(files))
    if full and METADATA not in listed:  # the full model at a run's end has a marker too
        with ExitStack() as stack:
            sources = [stack.enter_context(opened(place)) for place in full]
            for source in sources:
                if not _parts(source):  # else it is the optimizer's
                    for name in source.tensors:
                        weights.look(name, source.read(name))
            return sum(len(one.tensors) for one in sources), sum(len(one.values) for one in sources)
    checkpoint = DcpTensors(files, listed)
    with closing(checkpoint):
        prefix = "app.model."
        if _STEP in checkpoint.values:
            require_step(files, checkpoint.read(_STEP), marker)
        wrong = checkpoint.problems(lambda name, part: weights.look(name, part) if name.startswith(prefix) else None)
    if wrong:
        more = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise DamagedCheckpoint(f"{files}: {'; '.join(wrong[:10])}{more}")
    return len(checkpoint.tensors), len(checkpoint.values)


# --- show ------------------------------------------------------------------------------------------------


def show(place: str) -> int:
    """Tensors with shape, dtype and size, then plain values and totals. No tensor is read. Returns the exit status."""
    with opened(place) as source:
        print(refusal(source.place + _marker_line(source)))
        rows = [["tensor", "shape", "dtype", "bytes"]]
        rows += [
            [name, str(list(tensor.shape)), str(tensor.dtype).removeprefix("torch."), f"{tensor.nbytes:,}"]
            for name, tensor in source.tensors.items()
        ]
        if source.tensors:
            _print_table(rows, right=(3,))
        for name in source.values:
            print(printable(f"{name} = {short_repr(source.read(name))}"))
        elements = sum(tensor.numel() for tensor in source.tensors.values())
        size = sum(tensor.nbytes for tensor in source.tensors.values())
        values = len(source.values)
        print(f"{len(source.tensors)} tensors, {elements:,} elements, {size_in_words(size)}; {values} plain values")
        for part, (count, part_size) in _parts(source).items():
            print(printable(f"  {part}: {count} tensors, {size_in_words(part_size)}"))
    return 0


def _marker_line(source: Source) -> str:
    """Of its marker, and whether what is read for this was verified. Raises DamagedCheckpoint."""
    answer = verified(source, [METADATA, *source.value_files])
    if answer != VERIFIED or source.folder is None or source.file is not None:
        return f": {answer}"
    marker = read_marker(source.folder)
    origin = f", imported from {marker.get('source')}" if marker.get("imported") else ""
    when = _when(marker.get("time"))
    ranks = marker.get("world_size")
    return f": step {marker['step']}, by {ranks} rank{'s' * (ranks != 1)}, {when}{origin}; {answer}"


def _parts(source: Source) -> dict[str, tuple[int, int]]:
    """Part of a nested state dict, such as app.model -> tensors and bytes in it; {} of a flat one."""
    parts: dict[str, tuple[int, int]] = {}
    for name, tensor in source.tensors.items():
        path = source.paths[name]
        if len(path) > 1:
            part = part_of(path)
            count, size = parts.get(part, (0, 0))
            parts[part] = count + 1, size + tensor.nbytes
    return parts


def short_repr(value: Any) -> str:
    """`repr`, cut to 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
