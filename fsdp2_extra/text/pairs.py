"""Preference pairs: of each a question, the answer that people chose and the one that they rejected, as rows of tokens.

A pair is a line of .jsonl or a row of a table, in a form of https://huggingface.co/docs/trl/dataset_formats#preference:
texts, or messages for the chat template, with the question as `prompt` or as what both answers begin with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import numpy
import torch
from torch import Tensor

from fsdp2.data.errors import UnusableText
from fsdp2.data.splits import IGNORED, InBatches, Rows, identity_of
from fsdp2.units import printable
from fsdp2_extra.text.chat import has_template, open_chat
from fsdp2_extra.text.forms import Fields, messages_of, one_form, read_of, renamed, unread
from fsdp2_extra.text.header_lines import other_reader, span
from fsdp2_extra.text.messages import learned_answers, require_usual
from fsdp2_extra.text.places import PUBLISHED, published
from fsdp2_extra.text.prepared import NAMED, UNREAD, Encoder, places, require_most_read
from fsdp2_extra.text.reading import rows_of
from fsdp2_extra.text.rows import Row
from fsdp2_extra.text.text import found, require_fit
from fsdp2_extra.text.tokenizer import LOOKED_AT, document
from fsdp2_extra.text.tokenizer_file import open_tokenizer

ANSWERS = ("chosen", "rejected")
MOST_UNREAD = 80  # characters of the names of fields that nothing reads

Encoded = tuple[numpy.ndarray, numpy.ndarray]
"""Tokens, (n,), and as many booleans: whether a model is to write this one."""


class Pairs(InBatches):
    """Pairs as a `Split`: `fsdp2.data.loader.Batches` gives them one order on any number of ranks, and goes on in it.

    A list of indices gives tokens and targets, (N, 2, longest) each, int64: of each pair the chosen answer first. A
    target is the token itself, and `IGNORED` where no answer stands; behind a row are tokens 0.
    """

    targets_per_sample = 1

    def __init__(self, pairs: Sequence[Sequence[Encoded]], about: str = "") -> None:
        """`about`: a line about them."""
        self.about = about
        self._pairs, self._longest = pairs, max(len(tokens) for pair in pairs for tokens, _ in pair)
        self.content = identity_of(b"".join(part.tobytes() for pair in pairs for one in pair for part in one))

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitems__(self, indices: Rows) -> tuple[Tensor, Tensor]:
        inputs = numpy.zeros((len(indices), 2, self._longest), dtype=numpy.int64)
        targets = numpy.full_like(inputs, IGNORED)
        for at, index in enumerate(indices):
            for answer, (tokens, learn) in enumerate(self._pairs[int(index)]):
                inputs[at, answer, : len(tokens)] = tokens
                targets[at, answer, : len(tokens)][learn] = tokens[learn]
        return torch.from_numpy(inputs), torch.from_numpy(targets)


def load(
    place: str,
    tokenizer: str,
    length: int,
    vocab_size: int,
    fields: Fields | None = None,
    *,
    as_: str | None = None,
    drop: bool = False,
) -> Pairs:
    """The pairs of a place, all of them, in its order.

    Args:
        place: as `--dataset chat:` takes it, or `datasets:` and what that reads.
        tokenizer: what `open_tokenizer` takes, with the chat template beside it.
        length: the most tokens that a question with an answer may have; none is cut.
        vocab_size: the model's.
        fields: how the file calls its fields, as `--chat-fields` has them; `chosen` and `rejected` too.
        as_: `chat`, texts go through the chat template; `text`, they don't; None, those with a prompt do.
        drop: leave out pairs that can't be learned.

    Raises UnusableText, in one line that names the row.
    """
    encode = _Encode(tokenizer, {**dict(zip(ANSWERS, ANSWERS, strict=True)), **(fields or {})}, as_)
    require_fit(encode.texts, vocab_size)
    if place.startswith(PUBLISHED):
        place = PUBLISHED + published(place.removeprefix(PUBLISHED))
    files = found(place, (".jsonl", ".parquet"))
    rows = [(row.where, encode.or_why_not(row)) for file in files for row in rows_of(file, encode.fields)]
    if not rows:
        raise UnusableText(f"{place}: holds no pairs; give lines with prompt, chosen and rejected")
    unread = [one for _, one in rows if isinstance(one, str)]
    require_most_read(len(unread), len(rows) - len(unread), f"{len(rows):,} pairs", "".join(unread[:1]))
    reasons: dict[str, Callable[[list[Encoded]], bool]] = {
        f"with more than {length} tokens (none is cut)": lambda pair: max(len(tokens) for tokens, _ in pair) > length,
        "with an answer without a token": lambda pair: not all(learn[1:].any() for _, learn in pair),
        "with one answer as chosen and rejected": lambda pair: numpy.array_equal(pair[0][0], pair[1][0]),
        "with answers to different questions": lambda pair: (
            not any(_differ(pair) == len(learn) or learn[_differ(pair)] for _, learn in pair)
        ),
    }
    judged: list[list[Encoded] | str] = []  # a pair, or why it isn't learned
    for _, pair in rows:
        if isinstance(pair, str):
            judged.append(UNREAD)
        else:
            judged.append(next((why for why, wrong in reasons.items() if wrong(pair)), pair))
    bad = " and ".join(f"{count:,} {why}" for why in (*reasons, UNREAD) if (count := judged.count(why)))
    if bad and not drop:
        some = places([where for (where, _), why in zip(rows, judged, strict=True) if isinstance(why, str)][:NAMED])
        first = f"; the first that can't be read: {unread[0]}" if unread else ""
        fix = "leave them out of the file, or add --bad-samples drop, which counts them"
        raise UnusableText(f"{place}: of {len(rows):,} pairs {bad} ({some}){first}; {fix}")
    kept = [pair for pair in judged if not isinstance(pair, str)]
    if not kept:
        raise UnusableText(f"{place}: --bad-samples drop leaves none of its pairs; {bad}")
    sizes = [max(len(tokens) for tokens, _ in pair) for pair in kept]
    raw = sum(where in encode.raw for (where, _), one in zip(rows, judged, strict=True) if not isinstance(one, str))
    ways = {"through the chat template": len(kept) - raw, "as raw texts, without a chat template": raw}
    how = " and ".join(f"{count:,} {way}" for way, count in ways.items() if count)
    about = f"{len(kept):,} of {span(min(sizes), max(sizes))} tokens{' each' * (min(sizes) == max(sizes))}, {how}"
    about += f"; left out by --bad-samples drop: {bad}" if bad else ""
    dropped = printable(", ".join(sorted(encode.left_out()))[:MOST_UNREAD])
    about += f"; dropped: {dropped}" if dropped else ""
    other = encode.texts.unlike([tokens[:LOOKED_AT] for pair in kept[:LOOKED_AT] for tokens, _ in pair])
    return Pairs(kept, "; ".join([about, *other_reader({**encode.texts.about, "unlike": other})]))


class _Unusable(UnusableText):
    """It isn't a pair's fault."""


class _Encode:
    """Makes tokens of pairs, whose fields have these names; for `as_` see `load`."""

    def __init__(self, tokenizer: str, fields: Fields, as_: str | None) -> None:
        self._tokenizer, self.fields, self._as = tokenizer, fields, as_
        self.raw: set[str] = set()  # where pairs are that no template prints
        self.texts = open_tokenizer(tokenizer)
        self._chat: Encoder | None = None
        self.found: set[str] = set()  # the fields of all lines

    def __call__(self, row: Row) -> list[Encoded]:
        """The rows of both answers. Raises UnusableText."""
        one_form(row.content, None, self.fields, row.where)
        self.found |= row.content.keys()
        line = {name: value for name, value in renamed(row.content, self.fields).items() if value is not None}
        require_usual(line, unread("pairs", self.fields), row.where)
        texts = all(isinstance(line.get(name, ""), str) for name in ("prompt", *ANSWERS))
        if texts and (self._as or ("chat" if line.get("prompt") else "text")) == "text":
            self.raw.add(row.where)
            return self._of_texts(line, row.where)
        if not (self._chat or (self._tokenizer != "bytes" and has_template(self._tokenizer))):
            own = "its folder" if self._tokenizer == "bytes" else self._tokenizer
            fix = f"put tokenizer.json and one into {own}, or give texts and --pairs-as text of examples/dpo.py"
            raise _Unusable(f"{row.where}: the model has no chat template to print it with; {fix}")
        try:
            self._chat = self._chat or open_chat(self._tokenizer)
        except UnusableText as error:
            raise _Unusable(str(error)) from None
        both = self._messages(line, row.where, texts=texts)
        talks = [{"messages": one, "tools": line.get("tools")} for one in both]
        where = [f"{row.where}, {answer}" for answer in ANSWERS]
        encoded = [*self._chat.encode([Row(talk, at, row.size) for talk, at in zip(talks, where, strict=True)])]
        if not all(map(all, map(learned_answers, both))):
            raise UnusableText(f"{row.where}: has an answer of weight 0, and of pairs those that differ count; drop it")
        return _apart([(tokens, numpy.asarray(learn, dtype=bool)) for tokens, learn in encoded])

    def or_why_not(self, row: Row) -> list[Encoded] | str:
        try:
            return self(row)
        except _Unusable:
            raise
        except UnusableText as error:
            return str(error)

    def left_out(self) -> set[str]:
        """The fields of all lines that nothing reads, and such keys of messages."""
        return (self.found - read_of("pairs", self.fields)) | (self._chat.left_out() if self._chat else set())

    def _of_texts(self, line: dict[str, Any], where: str) -> list[Encoded]:
        if line.get("system") or line.get("tools"):
            raise UnusableText(f"{where}: has system or tools, which texts don't show; give its answers as messages")
        chosen, rejected = (str(line[answer]) for answer in ANSWERS)
        question = line.get("prompt")
        if question is None:  # up to a word's space, as TRL has it
            alike = "".join(a for a, _ in takewhile(lambda two: two[0] == two[1], zip(chosen, rejected, strict=False)))
            question = alike.removesuffix(" ")
            chosen, rejected = chosen[len(question) :], rejected[len(question) :]
        if not question:
            raise UnusableText(f"{where}: has no question, in prompt or as what both answers begin with; give one")
        asked, *answers = self.texts.encode([question, chosen, rejected])
        asked = document(asked, self.texts.begin, None)
        rows = [numpy.concatenate([asked, document(answer, (), self.texts.end)]) for answer in answers]
        return [(tokens, numpy.arange(len(tokens)) >= len(asked)) for tokens in rows]

    def _messages(self, line: dict[str, Any], where: str, *, texts: bool) -> list[list[Any]]:
        """The whole conversation with either answer. Raises UnusableText."""

        def read(name: str, role: str) -> list[Any]:
            if texts or (isinstance(line[name], str) and "".join(line[name].split())[:2] not in ("[{", '["', "[]")):
                return [{"role": role, "content": line[name]}]
            names = {**self.fields, "messages": self.fields.get(name, name)}
            several = [line[name]] if isinstance(line[name], dict) else line[name]
            return messages_of({"messages": several}, "messages", names, where)

        asked = read("prompt", "user") if "prompt" in line else []
        answers = [read(answer, "assistant") for answer in ANSWERS]
        if not all(isinstance(one[0], dict) and one[0].get("role") == "assistant" for one in answers):
            if any(one not in answer for one in asked for answer in answers):
                raise UnusableText(f"{where}: has a prompt that isn't in the messages of its answers; drop it")
            asked = []  # its answers have it
        system = [{"role": "system", "content": line["system"]}] if line.get("system") else []
        return [system + asked + answer for answer in answers]


def _apart(pair: list[Encoded]) -> list[Encoded]:
    """Two conversations, of which the answers before the last that differs are the question's."""
    at = _differ(pair)
    while at and any(learn[at - 1] for _, learn in pair):
        at -= 1  # both answers begin with the same words
    return [(tokens, learn & (numpy.arange(len(learn)) >= at)) for tokens, learn in pair]


def _differ(pair: list[Encoded]) -> int:
    """The place of the first token in which two rows differ: the length of the shorter one, if it begins the other."""
    length = min(len(tokens) for tokens, _ in pair)
    (differ,) = numpy.nonzero(pair[0][0][:length] != pair[1][0][:length])
    return int(differ[0]) if len(differ) else length
