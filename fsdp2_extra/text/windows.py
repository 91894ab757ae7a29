"""A row of tokens as samples: documents cut into windows, whole conversations packed into them, or several mixed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from fsdp2.data.errors import UnusableText
from fsdp2.data.splits import IGNORED, InBatches, Rows, identity_of

Item = tuple[Any, Tensor]


def _read(tokens: numpy.ndarray, places: numpy.ndarray, size: int | None) -> numpy.ndarray:
    """The tokens at some places, int64. A model's embedding has no row for one that is too large."""
    found = tokens[places].astype(numpy.int64)
    if size is not None and found.size and found.max() >= size:
        raise UnusableText(
            f"the prepared text holds the token {found.max()}, and its tokenizer has {size}; prepare it again"
        )
    return found


class _Windows(InBatches):
    """Windows of `seq_len` of a row of tokens; those below say how it is cut or packed.

    Each token is below `size`, None if that isn't known; other tokens have another `content`.
    """

    def __init__(
        self, tokens: numpy.ndarray, seq_len: int, *, apart: bool, content: str = "", size: int | None = None
    ) -> None:
        self.tokens, self.seq_len, self.apart, self.content, self.size = tokens, seq_len, apart, content, size
        self.targets_per_sample = seq_len


class Documents(_Windows):
    """A row of tokens cut into windows of `seq_len`, in which documents are kept apart.

    Args:
        tokens: (T,), an integer dtype. Windows don't overlap; what is left over at the end is not used.
        ends: (documents,) int64, where each document ends.
        apart: whether documents in a window see nothing of each other; else a window is one text.

    A list of indices gives a batch, (N, seq_len) each: `input_ids`, `position_ids` that begin at 0 in each document and
    window, and `document_ids`; and the next tokens as targets, `IGNORED` where that is another document's. With
    `apart=False` the inputs are the tokens alone. Raises UnusableText for a token that isn't below `size`.
    """

    def __init__(self, tokens: numpy.ndarray, ends: numpy.ndarray, seq_len: int, **settings: Any) -> None:
        super().__init__(tokens, seq_len, **settings)
        self.ends = ends

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def target_count(self, rows: Rows) -> int:
        """The number of targets of these windows that aren't `IGNORED`; no token is read for it."""
        starts = numpy.asarray(rows, dtype=numpy.int64) * self.seq_len
        if not self.apart:
            return len(starts) * self.seq_len
        last, first = (self.ends.searchsorted(at, side="right") for at in (starts + self.seq_len, starts))
        return int(len(starts) * self.seq_len - (last - first).sum())

    def __getitems__(self, indices: Rows) -> Item:
        starts = numpy.asarray(indices, dtype=numpy.int64)[:, None] * self.seq_len
        places = starts + numpy.arange(self.seq_len + 1)
        tokens = torch.from_numpy(_read(self.tokens, places, self.size))
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


class Conversations(_Windows):
    """Conversations packed into windows of `seq_len`, each whole, in their order; the rest of a window is empty.

    Args:
        tokens: (T,), an integer dtype.
        learn: (T,), not 0 where a token is to be predicted.
        ends: (conversations,) int64, where each ends.
        targets: (conversations,) int64, how many tokens up to there are to be predicted; the first of a conversation
            never is.
        which: the numbers of those that count, in order; None = all. None of them is longer than `seq_len`.
        apart: whether conversations in a window see nothing of each other.

    A list of indices gives a batch as `Documents` does, with the targets `IGNORED` where `learn` is 0. The empty rest
    of a window has tokens 0 and a document of its own.
    """

    def __init__(
        self,
        tokens: numpy.ndarray,
        learn: numpy.ndarray,
        ends: numpy.ndarray,
        targets: numpy.ndarray,
        seq_len: int,
        which: numpy.ndarray | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(tokens, seq_len, **settings)
        self.learn = learn
        which = numpy.arange(len(ends)) if which is None else which
        sizes = [numpy.diff(one, prepend=0)[which] for one in (ends, targets)]
        # As if those that don't count weren't there, and how far behind that each conversation's tokens are.
        self.ends, self.targets = (numpy.concatenate([[0], numpy.cumsum(one)]) for one in sizes)
        self._behind = numpy.append(ends[which], 0) - numpy.append(self.ends[1:], 0)
        first, count = [0], len(which)
        while first[-1] < count:
            after = int(self.ends.searchsorted(self.ends[first[-1]] + seq_len, side="right")) - 1
            assert after > first[-1], "a conversation is longer than the window"
            first.append(after)
        self.first = numpy.array(first)  # conversation of each window, and how many there are

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def filled(self) -> float:
        """The share of the windows that holds tokens."""
        return float(self.ends[-1] / (len(self) * self.seq_len))

    def target_count(self, rows: Rows) -> int:
        """The number of targets of these windows that aren't `IGNORED`; no token is read for it."""
        numbers = numpy.asarray(rows, dtype=numpy.int64)
        return int((self.targets[self.first[numbers + 1]] - self.targets[self.first[numbers]]).sum())

    def __getitems__(self, indices: Rows) -> Item:
        rows = numpy.asarray(indices, dtype=numpy.int64)
        first, after = self.first[rows], self.first[rows + 1]
        places = self.ends[first][:, None] + numpy.arange(self.seq_len + 1)
        filled = places < self.ends[after][:, None]
        documents = numpy.where(filled, self.ends.searchsorted(places, side="right") - 1, after[:, None])
        safe = numpy.where(filled, places + self._behind[documents], 0)
        tokens = torch.from_numpy(numpy.where(filled, _read(self.tokens, safe, self.size), 0))
        numbers = torch.from_numpy(documents - first[:, None])
        learned = torch.from_numpy(filled & (self.learn[safe] != 0))
        learned[:, 1:] &= numbers[:, 1:] == numbers[:, :-1]
        inputs, targets = tokens[:, :-1], tokens[:, 1:].masked_fill(~learned[:, 1:], IGNORED)
        if not self.apart:
            return inputs, targets
        positions = torch.from_numpy(places - self.ends[documents])[:, :-1]
        return {"input_ids": inputs, "position_ids": positions, "document_ids": numbers[:, :-1]}, targets


class Mixture(InBatches):
    """Sequences of several splits: `counts[i]` of the i-th, which begins again where it has fewer; unset = all, once.

    A list of indices gives a batch as `Documents` does, (N, seq_len) each, in the order of the list.
    """

    def __init__(self, splits: Sequence[Any], counts: Sequence[int] | None = None) -> None:
        counts = [len(one) for one in splits] if counts is None else counts
        self.splits, self.begins = splits, numpy.cumsum([0, *counts])
        self.seq_len = self.targets_per_sample = splits[0].seq_len
        what = [(split.content, len(split), count) for split, count in zip(splits, counts, strict=True)]
        self.content = identity_of(repr(what).encode())

    def __len__(self) -> int:
        return int(self.begins[-1])

    def _by_split(self, indices: Rows) -> Iterator[tuple[Any, numpy.ndarray, numpy.ndarray]]:
        """Each split that has some of the rows, where they stand in the list, and which of its own they are."""
        rows = numpy.asarray(indices, dtype=numpy.int64)
        number = self.begins.searchsorted(rows, side="right") - 1
        for one in numpy.unique(number):
            (places,) = numpy.nonzero(number == one)
            split = self.splits[one]
            yield split, places, (rows[places] - self.begins[one]) % len(split)

    @property
    def filled(self) -> float:
        """The share of the sequences that holds tokens."""
        shares = [getattr(one, "filled", 1.0) for one in self.splits]
        return float(numpy.average(shares, weights=numpy.diff(self.begins)))

    def target_count(self, rows: Rows) -> int:
        """The number of targets of these sequences that aren't `IGNORED`; no token is read for it."""
        return sum(split.target_count(own) for split, _, own in self._by_split(rows))

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
