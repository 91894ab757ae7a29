"""`--dataset "chat:A@0.7,text:B@0.3"`: the sequences of several sources as one split, each with its share.

The source that has the most sequences for its share is read once in an epoch, and the others as often as their shares
need, from their beginning again. So an epoch holds each sequence of each source, and its order is drawn as that of any
split: from the seed and the epoch alone. Another way to mix, which reads no source to its end, is that of
https://huggingface.co/docs/datasets/stream#interleave.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from fsdp2.data.errors import UnusableText
from fsdp2.data.splits import Dataset, Rows, identity_of
from fsdp2_extra.text import text
from fsdp2_extra.text.forms import fields_of
from fsdp2_extra.text.places import sources
from fsdp2_extra.text.prepared import Encoder
from fsdp2_extra.text.preparing import Say, silent
from fsdp2_extra.text.windows import Conversations, Documents, Item

MOST = 2**31 - 1  # sequences in an epoch, whose order every rank holds


class Mixture(TorchDataset[Item]):
    """Sequences of several splits: `counts[i]` of the i-th, which begins again where it has fewer.

    A list of indices gives a batch as `Documents` does, (N, seq_len) each, in the order of the list.
    """

    def __init__(self, splits: Sequence[Documents | Conversations], counts: Sequence[int]) -> None:
        self.splits, self.begins = splits, numpy.cumsum([0, *counts])
        self.seq_len = self.targets_per_sample = splits[0].seq_len
        what = [(split.content, len(split), count) for split, count in zip(splits, counts, strict=True)]
        self.content = identity_of(repr(what).encode())

    def __len__(self) -> int:
        return int(self.begins[-1])

    def _by_split(self, indices: Rows) -> Iterator[tuple[Documents | Conversations, numpy.ndarray, numpy.ndarray]]:
        """Each split that has some of the rows, where they stand in the list, and which of its own they are."""
        rows = numpy.asarray(indices, dtype=numpy.int64)
        number = self.begins.searchsorted(rows, side="right") - 1
        for one in numpy.unique(number):
            (places,) = numpy.nonzero(number == one)
            split = self.splits[one]
            yield split, places, (rows[places] - self.begins[one]) % len(split)

    def target_count(self, rows: Rows) -> int:
        """How many targets these sequences have that aren't `IGNORED`; no token is read for it."""
        return sum(split.target_count(own) for split, _, own in self._by_split(rows))

    def __getitem__(self, index: int) -> Item:
        ((split, _, own),) = self._by_split([index])
        return split[int(own[0])]

    def __getitems__(self, indices: Rows) -> Item:
        places, batches = [], []
        for split, at, own in self._by_split(indices):
            places.append(at)
            batches.append(split.__getitems__(own))
        order = torch.from_numpy(numpy.concatenate(places).argsort())

        def joined(parts: Sequence[Tensor]) -> Tensor:
            return torch.cat([*parts])[order]

        inputs, targets = zip(*batches, strict=True)
        if isinstance(inputs[0], dict):
            return {name: joined([one[name] for one in inputs]) for name in inputs[0]}, joined(targets)
        return joined(inputs), joined(targets)


def opened(
    name: str, tokenizer: str = "bytes", field: str = "text", bos: str = "auto", fields: str | None = None
) -> list[tuple[str, Encoder]]:
    """The place and the encoder of each source of a `--dataset`. Raises UnusableText.

    Args:
        name: of the sources, with their shares.
        tokenizer: of all, as `open_tokenizer` takes it.
        field, bos: of those that are text.
        fields: `--chat-fields`: of those that are conversations, or of each source between semicolons.
    """
    names = [source for source, _ in sources(name)]
    by_source = zip(names, _by_source(names, fields), strict=True)
    found = [text.opened(source, tokenizer, field, bos, own) for source, own in by_source]
    if bos != "auto" and all(encoder.kind == "chat" for _, encoder in found):
        raise UnusableText(f"--bos {bos}: the chat template begins a conversation; drop it")
    return found


def _by_source(names: Sequence[str], fields: str | None) -> list[dict[str, str]]:
    """Those of each source, by `--chat-fields`. Raises UnusableText."""
    of_text = [name.startswith("text:") for name in names]
    parts = (fields or "").split(";")
    if len(parts) == 1:
        parts = ["" if text else parts[0] for text in of_text]
    if len(parts) != len(names) or any(part and text for part, text in zip(parts, of_text, strict=True)):
        raise UnusableText(
            f"--chat-fields {fields}: is for {len(parts)} sources, of which {len(names)} are given; between semicolons "
            "name those of each, and none for text:"
        )
    return [fields_of(part) for part in parts]


def load(
    name: str,
    seq_len: int,
    vocab_size: int,
    reading: Mapping[str, Any],
    *,
    apart: bool,
    fetch: bool = True,
    say: Say = silent,
) -> Dataset:
    """The data of a `--dataset` of one's own: one source as `text.load` gives it, or several as a mixture.

    Args:
        reading: what `opened` takes beside the name.

    The test split of a mixture has each sequence of each source's once. Raises UnusableText, and NotHere as that does.
    """
    made = [
        text.load(place, seq_len, vocab_size, encoder, apart=apart, fetch=fetch, say=say)
        for place, encoder in opened(name, **reading)
    ]
    if len(made) == 1:
        return made[0]
    names, shares = zip(*sources(name), strict=True)
    trains: list[Any] = [one.train for one in made]
    counts = counts_of([len(one) for one in trains], shares)
    if (whole := sum(counts)) > MOST:
        few = names[min(range(len(made)), key=lambda i: len(trains[i]) / shares[i])]
        raise UnusableText(f"{few}: its share makes an epoch of {whole:,} sequences; give it a smaller one")
    tests: list[Any] = [one.test for one in made]
    about = {"mixed": [(source, one, count) for source, one, count in zip(names, made, counts, strict=True)]}
    return Dataset(Mixture(trains, counts), Mixture(tests, [len(one) for one in tests]), made[0].classes, about)


def counts_of(lengths: Sequence[int], shares: Sequence[float]) -> list[int]:
    """How many sequences of each source make up an epoch, of which one has all of its own once and none has fewer."""
    scale = max(length / share for length, share in zip(lengths, shares, strict=True))
    most = float(2 * MOST)  # which an epoch can't have; the scale may be infinite
    return [max(length, round(min(scale * share, most))) for length, share in zip(lengths, shares, strict=True)]
