"""`--dataset text:PATH`: documents as tokens, packed into windows that don't mix them.

Text is tokenised once, into a folder that later runs map into memory, so that 10^9 tokens take no time to open:

    train.bin test.bin            the tokens of all documents, one after the other, uint8, uint16 or uint32
    train-ends.npy test-ends.npy  (documents,) int64: where each ends
    meta.json                     written last: counts, dtype, tokenizer and sizes of the files
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from fsdp2.data.splits import IGNORED, Dataset, Rows
from fsdp2.data.tokenizer import Bytes, FromFile, UnusableText, identity_of, open_tokenizer

META = "meta.json"
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
SPLITS = ("train", "test")
KINDS = (numpy.uint8, numpy.uint16, numpy.uint32)  # of tokens in a file
AT_A_TIME = 1000  # documents that are tokenised together
SOON = 4 << 20  # bytes of text that are tokenised in a second or two

EMPTY = numpy.empty(0, dtype=numpy.uint8)

Item = tuple[Any, Tensor]


class Documents(TorchDataset[Item]):
    """A row of tokens cut into windows of `seq_len`, in which documents are kept apart.

    Args:
        tokens: (T,), an integer dtype. Windows don't overlap; what is left over at the end is not used.
        ends: (documents,) int64, where each document ends.
        apart: whether documents in a window see nothing of each other; else a window is one text.

    A list of indices gives a batch, (N, seq_len) each: `input_ids`, `position_ids` that begin at 0 in each document and
    window, and `document_ids`; and the next tokens as targets, `IGNORED` where that is another document's. With
    `apart=False` the inputs are the tokens alone.
    """

    def __init__(self, tokens: numpy.ndarray, ends: numpy.ndarray, seq_len: int, *, apart: bool) -> None:
        self.tokens, self.ends, self.seq_len, self.apart = tokens, ends, seq_len, apart
        self.targets_per_sample = seq_len

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def target_count(self, rows: Rows) -> int:
        """How many targets these windows have that aren't `IGNORED`; no token is read for it."""
        starts = numpy.asarray(rows, dtype=numpy.int64) * self.seq_len
        if not self.apart:
            return len(starts) * self.seq_len
        last, first = (self.ends.searchsorted(at, side="right") for at in (starts + self.seq_len, starts))
        return int(len(starts) * self.seq_len - (last - first).sum())

    def __getitem__(self, index: int) -> Item:
        inputs, targets = self.__getitems__([index])
        if isinstance(inputs, dict):
            return {name: tensor[0] for name, tensor in inputs.items()}, targets[0]
        return inputs[0], targets[0]

    def __getitems__(self, indices: Rows) -> Item:
        starts = numpy.asarray(indices, dtype=numpy.int64)[:, None] * self.seq_len
        places = starts + numpy.arange(self.seq_len + 1)
        tokens = torch.from_numpy(self.tokens[places].astype(numpy.int64))
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if not self.apart:
            return inputs, targets
        documents = self.ends.searchsorted(places, side="right")
        begins = numpy.where(documents > 0, self.ends[documents - 1], 0)
        positions = places - numpy.maximum(begins, starts)
        numbers = torch.from_numpy(documents - documents[:, :1])
        targets = targets.masked_fill(numbers[:, 1:] != numbers[:, :-1], IGNORED)
        named = {"input_ids": inputs, "position_ids": torch.from_numpy(positions)[:, :-1]}
        return {**named, "document_ids": numbers[:, :-1]}, targets


def load(place: str, seq_len: int, vocab_size: int, tokenizer: Bytes | FromFile, field: str, *, apart: bool) -> Dataset:
    """Documents of files, or of a folder that `prepare` has made.

    Args:
        place: a file, a folder or a pattern; several with commas between them.
        field: of a line of .jsonl or a row of .parquet, the one with the text.

    Raises UnusableText, in one line.
    """
    _require_fit(tokenizer, vocab_size)
    folder = Path(place)
    if not (folder / META).is_file():
        folder = cached(place, tokenizer, field)
    meta = read_meta(folder)
    if meta.get("tokenizer") != tokenizer.identity:
        raise UnusableText(f"{folder}: was made with another tokenizer; give that with --tokenizer")
    splits = [_open(folder, name, meta, seq_len, apart=apart) for name in SPLITS]
    for name, split in zip(SPLITS, splits, strict=True):
        if not len(split):
            raise UnusableText(
                f"{place}: its {name} split has {len(split.tokens)} tokens, which fill no sequence of {seq_len}; lower "
                "--seq-len or give more text"
            )
    return Dataset(train=splits[0], test=splits[1], classes=tokenizer.names)


def check_text(
    place: str, seq_len: int, vocab_size: int, tokenizer: str, field: str, *, apart: bool, read: bool = True
) -> None:
    """Raises UnusableText for what can be told soon, and before any rank waits for another.

    Args:
        read: look at the text too: all of it if it is little, else at the first document of each file of such.
    """
    opened = open_tokenizer(tokenizer)
    _require_fit(opened, vocab_size)
    files = [] if (Path(place) / META).is_file() else find(place)
    if not read:
        return
    if sum(file.stat().st_size for file in files) <= SOON:
        load(place, seq_len, vocab_size, opened, field, apart=apart)  # the run maps what this leaves
        return
    for file in files:
        if file.suffix in (".jsonl", ".parquet"):
            next(documents_of(file, field), None)


def _require_fit(tokenizer: Bytes | FromFile, vocab_size: int) -> None:
    if tokenizer.size > vocab_size:
        raise UnusableText(
            f"its tokenizer has {tokenizer.size} tokens, and the model's vocabulary {vocab_size}; give the model's own"
        )


def _open(folder: Path, name: str, meta: dict[str, Any], seq_len: int, *, apart: bool) -> Documents:
    try:
        dtype = next(kind for kind in KINDS if numpy.dtype(kind).name == meta["dtype"])
        # An empty file can't be mapped.
        tokens = numpy.memmap(folder / f"{name}.bin", mode="r", dtype=dtype) if meta["tokens"][name] else EMPTY
        ends = numpy.load(folder / f"{name}-ends.npy")
        if ends.dtype != numpy.int64 or ends.ndim != 1 or (ends[-1] if len(ends) else 0) != len(tokens):
            raise ValueError(f"its documents don't end where its {name} split does")
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise UnusableText(f"{folder}: is no prepared text ({error!r}); prepare it again") from None
    return Documents(tokens, ends, seq_len, apart=apart)


def read_meta(folder: Path) -> dict[str, Any]:
    """Raises UnusableText if a folder isn't as `prepare` left it."""
    try:
        meta: dict[str, Any] = json.loads((folder / META).read_bytes())
        wrong = [name for name, size in meta["files"].items() if (folder / name).stat().st_size != size]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnusableText(f"{folder}: is no prepared text ({error!r}); prepare it again") from None
    if wrong:
        raise UnusableText(f"{folder}: {', '.join(wrong)} has another size than it was written with; prepare it again")
    return meta


def cached(place: str, tokenizer: Bytes | FromFile, field: str) -> Path:
    """The prepared form of files, made in the cache folder if it isn't there. Raises UnusableText."""
    from fsdp2.data.torchvision_sets import cache_folder

    files = find(place)
    facts = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    folder = cache_folder() / f"text-{identity_of(repr((facts, tokenizer.identity, field)).encode())}"
    if not (folder / META).is_file():
        prepare(files, folder, tokenizer, field)
    return folder


def find(place: str) -> list[Path]:
    """The files of a place, in order. Raises UnusableText if there are none, or of a kind that isn't read."""
    found: list[Path] = []
    for one in place.split(","):
        path = Path(one).expanduser()
        below = path.rglob("*") if path.is_dir() else ()
        inside = sorted(file for file in below if file.suffix in SUFFIXES and file.is_file())
        files = inside or [Path(file) for file in sorted(glob.glob(str(path), recursive=True)) if Path(file).is_file()]
        if not files:
            raise UnusableText(f"{one}: there is no file of text ({', '.join(SUFFIXES)})")
        found += [file.absolute() for file in files]
    if strange := next((file for file in found if file.suffix not in SUFFIXES), None):
        raise UnusableText(f"{strange}: is of no kind that is read: {', '.join(SUFFIXES)}")
    return found


def documents_of(file: Path, field: str) -> Iterator[str]:
    """The documents of a file: a line of .jsonl, a row of .parquet, or all of it. Raises UnusableText."""
    try:
        if file.suffix == ".jsonl":
            with open(file, encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _text_in(json.loads(line), field, f"{file}, line {number}")
        elif file.suffix == ".parquet":
            yield from _rows(file, field)
        else:
            yield file.read_text(encoding="utf-8")
    except UnusableText:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UnusableText(f"{file}: can't be read as text ({' '.join(str(error).split())[:120]})") from None


def _rows(file: Path, field: str) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UnusableText("pyarrow isn't installed; pip install 'fsdp2-reference[parquet]'") from None
    try:
        rows = parquet.ParquetFile(file)
        if field not in rows.schema_arrow.names:
            raise UnusableText(f"{file}: has no column {field}; it has {', '.join(rows.schema_arrow.names[:5])}")
        for group in rows.iter_batches(columns=[field]):
            for text in group.column(0).to_pylist():
                yield _text_in({field: text}, field, str(file))
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from None


def _text_in(row: Any, field: str, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        has = f"; it has {', '.join(list(map(str, row))[:5])}" if isinstance(row, dict) else ""
        raise UnusableText(f"{where}: has no text in its field {field}{has}; see --text-field")
    text: str = row[field]
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnusableText(f"{where}: has half of a character in its field {field}, which no text has") from None
    return text


def is_test(document: numpy.ndarray) -> bool:
    """One document in ten, by a hash of its tokens: the same one twice is in one split."""
    return int(identity_of(document.tobytes())[:2], 16) < 26


def prepare(files: Sequence[Path], folder: Path, tokenizer: Bytes | FromFile, field: str) -> dict[str, Any]:
    """Tokenise files into a folder, which is there as a whole or not at all; its meta.json.

    Text of so few documents that none is for the test gives the last tenth of its tokens to it. Raises UnusableText.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        meta = _write(files, aside, tokenizer, field)
        try:
            os.rename(aside, folder)
        except OSError:
            if not (folder / META).is_file():  # else another process was faster, with the same
                raise
        return meta
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write(files: Sequence[Path], folder: Path, tokenizer: Bytes | FromFile, field: str) -> dict[str, Any]:
    dtype = next(kind for kind in KINDS if tokenizer.size <= numpy.iinfo(kind).max + 1)
    ends: dict[str, list[int]] = {name: [] for name in SPLITS}
    count = dict.fromkeys(SPLITS, 0)
    texts = (text for file in files for text in documents_of(file, field))
    with ExitStack() as stack:
        written = {name: stack.enter_context(open(folder / f"{name}.bin", "wb")) for name in SPLITS}
        while some := list(islice(texts, AT_A_TIME)):
            for document in tokenizer.encode(some):
                if not len(document):
                    continue
                name = "test" if is_test(document) else "train"
                written[name].write(document.astype(dtype).tobytes())
                count[name] += len(document)
                ends[name].append(count[name])
    if not sum(count.values()):
        raise UnusableText(f"{files[0]}: {len(files)} files hold no text")
    if not all(count.values()):
        _divide(folder, ends, count, dtype)
    for name in SPLITS:
        numpy.save(folder / f"{name}-ends.npy", numpy.array(ends[name], dtype=numpy.int64))
    meta = {
        "tokenizer": tokenizer.identity,
        "dtype": numpy.dtype(dtype).name,
        "documents": {name: len(ends[name]) for name in SPLITS},
        "tokens": count,
        "files": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
    }
    (folder / META).write_text(json.dumps(meta, indent=1) + "\n")
    return meta


def _divide(folder: Path, ends: dict[str, list[int]], count: dict[str, int], dtype: Any) -> None:
    """Give the last tenth of all tokens to the test split."""
    name = max(SPLITS, key=lambda one: count[one])
    tokens, all_ends = numpy.memmap(folder / f"{name}.bin", mode="r", dtype=dtype), ends[name]
    cut = len(tokens) - len(tokens) // 10
    for split, low, high in (("train", 0, cut), ("test", cut, len(tokens))):
        tokens[low:high].tofile(folder / f"{split}.part")
        count[split] = high - low
        ends[split] = [end - low for end in all_ends if low < end < high] + [high - low]
    del tokens
    for split in SPLITS:
        os.replace(folder / f"{split}.part", folder / f"{split}.bin")
