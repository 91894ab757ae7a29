"""Documents by their lengths, and the first sequences as a model learns them: decoded, with what is learned marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from fsdp2.data.splits import IGNORED, Dataset
from fsdp2.units import printable
from fsdp2_extra.text.header_lines import span
from fsdp2_extra.text.windows import Conversations, Documents, Mixture

MOST_TOKENS, MOST_DOCUMENTS = 200, 8  # of a document, and of a sequence, that are shown
WIDEST = 40  # characters of a bar

Decode = Callable[[Sequence[int]], str]


def lengths(dataset: Dataset) -> Iterator[str]:
    """A bar for each power of two: how many documents, or conversations, of both splits have so many tokens.

    A document that lies in both splits counts as two.
    """
    counts = numpy.zeros(64, dtype=numpy.int64)
    for windows in (*dataset.about["train"], *dataset.about["test"]):
        tokens = numpy.diff(windows.ends, prepend=0)
        counts += numpy.bincount(numpy.frexp(tokens[tokens > 0])[1], minlength=64)
    yield "tokens in a document:"
    for power in range(int(counts.nonzero()[0][0]), int(counts.nonzero()[0][-1]) + 1):
        size, share = span(2 ** (power - 1), 2**power - 1), counts[power] / counts.sum()
        bar = "█" * round(WIDEST * counts[power] / counts.max())
        yield f"  {size:>24}  {bar:{WIDEST}} {counts[power]:,} ({share:.1%})"


def samples(dataset: Dataset, decode: Decode, count: int) -> Iterator[str]:
    """Lines with the first sequences for training, decoded; what is learned of them stands between ⟦ and ⟧."""
    split: Any = dataset.train
    whole = len(split)
    if isinstance(split, Mixture):  # of all of a source, the larger part
        split = max(split.splits, key=len)
    for number in range(min(count, len(split))):
        inputs, targets = split[number]
        learned = targets != IGNORED
        yield f"sequence {number + 1} of {whole:,}"
        if isinstance(split, Documents | Conversations):
            tokens = inputs["input_ids"] if isinstance(inputs, dict) else inputs
            # A target is the next token, and the last one is of no input.
            tokens = torch.cat([tokens, targets[-1:][learned[-1:]]])
            learned = torch.cat([torch.tensor([False]), learned])[: len(tokens)]
            yield from (f"  {one}" for one in marked(tokens, learned, _ends(split, number), decode))
            continue
        for name, one in (inputs if isinstance(inputs, dict) else {"input_ids": inputs}).items():
            yield f"  {name}: {_text(one, decode)}"
        yield f"  ⟦{_text(targets[learned], decode)}⟧"


def _ends(split: Documents | Conversations, number: int) -> list[int]:
    """The places where documents end in a sequence; the last conversation ends where the empty rest begins."""
    if isinstance(split, Conversations):
        first, *ends = split.ends[split.first[number] : split.first[number + 1] + 1].tolist()
        return [end - first for end in ends]
    begin = number * split.seq_len
    low, high = (split.ends.searchsorted(one, side="right") for one in (begin, begin + split.seq_len))
    return [int(end) - begin for end in (*split.ends[low:high], begin + split.seq_len + 1)]


def marked(tokens: Tensor, learned: Tensor, ends: list[int], decode: Decode) -> Iterator[str]:
    """The text of each document of a sequence, (n,), with marks around each run of `learned` tokens, (n,) bool."""
    ends = sorted({min(end, len(tokens)) for end in ends})
    for begin, end in list(zip([0, *ends], ends, strict=False))[:MOST_DOCUMENTS]:
        runs = torch.unique_consecutive(learned[begin:end], return_counts=True)[1].tolist()
        parts = zip(tokens[begin:end].split(runs), learned[begin:end].split(runs), strict=True)
        yield "".join(f"⟦{_text(part, decode)}⟧" if marks[0] else _text(part, decode) for part, marks in parts)
    if len(ends) > MOST_DOCUMENTS:
        yield f"… {len(ends) - MOST_DOCUMENTS} documents more"


def _text(tokens: Tensor, decode: Decode) -> str:
    """The text of tokens, on one line and without what a terminal would act on."""
    text = printable(decode(tokens[:MOST_TOKENS].tolist()))
    return text + (f" … {len(tokens) - MOST_TOKENS:,} tokens more" if len(tokens) > MOST_TOKENS else "")
