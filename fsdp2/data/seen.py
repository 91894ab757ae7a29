"""A run's view of text and conversations: how much, the learned share, and where documents begin and end.

All numbers were counted while the text was prepared, or follow from where documents end. No token is read for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from fsdp2.data.splits import IGNORED, Dataset
from fsdp2.data.turns import NONE
from fsdp2.data.windows import Conversations, Documents
from fsdp2.units import printable, short

AT_A_TIME = 1 << 20  # of documents whose ends are in memory
MOST_CHARACTERS = 40  # of the text of a token
MOST_TOKENS, MOST_DOCUMENTS = 200, 8  # of a document, and of a sequence, that are shown

Decode = Callable[[Sequence[int]], str]


def lines(dataset: Dataset) -> list[str]:
    """Lines about the data at a run's start; none for a dataset that isn't text or conversations."""
    about, train, test = dataset.about, _windows(dataset.train), _windows(dataset.test)
    if not about:
        return []
    tokens = sum(about["tokens"].values())
    learned, of = _learned(dataset)
    share = f"learned: {learned / of:.1%} of {of:,} tokens in {len(train):,} sequences for training, {len(test):,} for "
    share += "evaluation"
    shortest, longest, cut = _sizes(train, test)
    sizes = f"{sum(about['documents'].values()):,} of {shortest:,} to {longest:,} tokens ({tokens:,} in all"
    if about["kind"] == "chat":
        counts = f"conversations: {sizes}); truncated: none, dropped: none"
        return [counts, f"{share}; {_turn(dataset)}", _tokenizer(about), *warnings(about, dataset.classes)]
    left = sum(len(one.tokens) - one.seq_len * len(one) - 1 for one in (train, test))
    counts = f"documents: {sizes}, {about['characters'] / tokens:.1f} characters each)"
    dropped = f"dropped: {about['empty']:,} empty ones, {left:,} tokens at the end"
    split = f"{cut:,} go on in the next sequence of {train.seq_len}" + ("" if train.apart else ", and see each other")
    return [f"{counts}; {split}; {dropped}", share, _tokenizer(about), *warnings(about, dataset.classes)]


def warnings(about: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Warn of tokens that another reader wouldn't make, and of a model that would never stop."""
    return [*_other_reader(about), *_endless(about, names)]


def _other_reader(about: dict[str, Any]) -> list[str]:
    if not about["unlike"]:
        return []
    return [
        f"warning: transformers reads {short(about['tokenizer'])} differently: {printable(about['unlike'])}; the run "
        "follows tokenizer.json; to make both one, write it with transformers: "
        "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    ]


def _endless(about: dict[str, Any], names: Sequence[str]) -> list[str]:
    """One line about conversations that would train a model that never stops, or none."""
    wrong = {int(token): counts[1] for token, counts in about["turns"].items() if counts[1]}
    if not wrong:
        return []
    # Where none stands behind the last answer, one behind another begins the next turn.
    marks = [] if NONE in wrong else [_name(names[token]) for token in wrong]
    why, fix = "prints no special token there", "let it print one after an answer"
    if marks:
        why, fix = f"leaves {' and '.join(marks[:3])} out of what is learned", "put that inside {% generation %}"
    return [
        f"warning: the end of {sum(wrong.values()):,} of {_answers(about):,} answers isn't learned, so the model won't "
        f"stop there: the chat template in {short(about['template'])} {why}; {fix}"
    ]


def samples(dataset: Dataset, decode: Decode, count: int) -> Iterator[str]:
    """Lines with the first sequences for training, decoded; what is learned of them stands between ⟦ and ⟧."""
    split: Any = dataset.train
    for number in range(min(count, len(split))):
        inputs, targets = split[number]
        learned = targets != IGNORED
        yield f"sequence {number + 1} of {len(split):,}"
        if isinstance(split, Documents | Conversations):
            tokens = inputs["input_ids"] if isinstance(inputs, dict) else inputs
            # A target is the next token, and the last one is of no input.
            tokens = torch.cat([tokens, targets[-1:][learned[-1:]]])
            learned = torch.cat([torch.tensor([False]), learned])[: len(tokens)]
            yield from (f"  {one}" for one in _documents(tokens, learned, _ends(split, number), decode))
            continue
        for name, one in (inputs if isinstance(inputs, dict) else {"input_ids": inputs}).items():
            yield f"  {name}: {_text(one, decode)}"
        yield f"  ⟦{_text(targets[learned], decode)}⟧"


def _ends(split: Documents | Conversations, number: int) -> list[int]:
    """Where documents end in a sequence; of conversations, the last one where its empty rest begins."""
    if isinstance(split, Conversations):
        first, *ends = split.ends[split.first[number] : split.first[number + 1] + 1].tolist()
        return [end - first for end in ends]
    begin = number * split.seq_len
    low, high = (split.ends.searchsorted(one, side="right") for one in (begin, begin + split.seq_len))
    return [int(end) - begin for end in (*split.ends[low:high], begin + split.seq_len + 1)]


def _documents(tokens: Tensor, learned: Tensor, ends: list[int], decode: Decode) -> Iterator[str]:
    """The text of each document of a sequence, with marks around each run of learned tokens."""
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


def _sizes(*splits: Documents | Conversations) -> tuple[int, int, int]:
    """Tokens of the shortest and the longest document, and how many documents the end of a sequence cuts."""
    shortest, longest, cut = 2**63, 0, 0
    for split in splits:
        before = 0
        for at in range(0, len(split.ends), AT_A_TIME):
            ends = split.ends[at : at + AT_A_TIME]
            begins = numpy.append([before], ends[:-1])
            before = int(ends[-1])
            begins, ends = begins[ends > begins], ends[ends > begins]
            if len(ends):
                shortest = min(shortest, int((ends - begins).min()))
                longest = max(longest, int((ends - begins).max()))
                cut += int((begins // split.seq_len != (ends - 1) // split.seq_len).sum())
    return shortest, longest, cut


def _name(token: str) -> str:
    """The text of a token for a line of a header: a stranger's tokenizer may have any."""
    return printable(token[:MOST_CHARACTERS])


def _windows(split: Any) -> Any:
    """Of what a model learns in another way than token by token, the windows that it is made of."""
    return getattr(split, "windows", split)


def _learned(dataset: Dataset) -> tuple[int, int]:
    """How many targets the sequences for training have, and how many tokens."""
    split: Any = dataset.train
    if isinstance(split, Conversations):
        return int(split.targets[-1]), int(split.ends[-1])
    tokens = len(split) * _windows(split).seq_len
    if isinstance(split, Documents) and split.apart:  # the first token of a document is no target
        return tokens - int(split.ends.searchsorted(tokens, side="right")), tokens
    return len(split) * split.targets_per_sample, tokens


def _answers(about: dict[str, Any]) -> int:
    return sum(map(sum, about["turns"].values()))


def _turn(dataset: Dataset) -> str:
    """With which token answers end, and in how many that is learned."""
    about = dataset.about
    turns = about["turns"]
    token = max(turns, key=lambda one: (turns[one][0], int(one) == NONE, turns[one][1]), default=str(NONE))
    if int(token) == NONE:
        return "no token ends a turn"
    name, count, end = _name(dataset.classes[int(token)]), turns[token][0], _name(about["ends"])
    other = "" if name == end else f" (eos_token is {end or 'none'})"
    return f"{name} ends a turn{other}, learned in {count:,} of {_answers(about):,} answers"


def _tokenizer(about: dict[str, Any]) -> str:
    """How documents begin and end, and which settings of a tokenizer.json aren't followed."""
    frame = ", ".join(f"{what} with {_name(about[what]) or 'no token of its own'}" for what in ("begins", "ends"))
    text = "a conversation is as the chat template prints it" if about["kind"] == "chat" else f"a document {frame}"
    off = f"; off: its {' and '.join(about['off'])}" if about["off"] else ""
    return f"tokenizer: {short(about['tokenizer'])}; {text}{off}"
