"""`--dataset "chat:A@0.7,text:B@0.3"`: the sequences of several sources as one split, each with its share.

Without shares an epoch has each sequence once.
The source that has the most sequences for its share is read once in an epoch, and the others as often as their shares
need, from their beginning again. So an epoch holds each sequence of each source, and its order is drawn as that of any
split: from the seed and the epoch alone. Another way to mix, which reads no source to its end, is that of
https://huggingface.co/docs/datasets/stream#interleave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsdp2.data.errors import UnusableText
from fsdp2.data.splits import Dataset
from fsdp2_extra.text import text
from fsdp2_extra.text.forms import EACH, fields_of
from fsdp2_extra.text.places import sources
from fsdp2_extra.text.prepared import Encoder
from fsdp2_extra.text.preparing import Say, silent
from fsdp2_extra.text.windows import Mixture

MOST = 2**31 - 1  # sequences in an epoch, whose order every rank holds


def opened(
    name: str,
    tokenizer: str = "bytes",
    field: str = "text",
    bos: str = "auto",
    fields: str | None = None,
    evaluated: str | None = None,
) -> list[tuple[str, Encoder]]:
    """The place and the encoder of each source of a `--dataset`, and behind them those of `evaluated`.

    Args:
        name: of the sources, with their shares.
        tokenizer: of all, as `open_tokenizer` takes it.
        field, bos: of those that are text.
        fields: `--chat-fields`: of those that are conversations, or of each source between semicolons.
        evaluated: the `--eval-dataset`.

    Raises UnusableText.
    """
    names = [source for one in (name, evaluated) if one for source, _ in sources(one)]
    mixed = len(names) > 1
    found = [text.opened(source, tokenizer, field, bos, own, mixed) for source, own in by_source(names, fields)]
    if bos != "auto" and all(encoder.kind == "chat" for _, encoder in found):
        raise UnusableText(f"--bos {bos}: the chat template begins a conversation; drop it")
    return found


def by_source(names: Sequence[str], fields: str | None) -> list[tuple[str, dict[str, str]]]:
    """Each source with the names of its fields, by `--chat-fields`. Raises UnusableText."""
    parts = (fields or "").split(";")
    if len(parts) == 1:
        parts = [parts[0] * (not name.startswith("text:")) for name in names]
    if len(parts) != len(names) or any(
        part and name.startswith("text:") for part, name in zip(parts, names, strict=True)
    ):
        raise UnusableText(
            f"--chat-fields {fields}: is for {len(parts)} sources, of which {len(names)} are given; give {EACH}, and "
            "none for text:"
        )
    return list(zip(names, map(fields_of, parts), strict=True))


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

    With an `--eval-dataset` all of it is for training, and the test split is all of that. `reading` is what `opened`
    takes beside the name, and `drop` as `text.load` does.

    The test split of a mixture has each sequence of each source's once. Raises UnusableText, and NotHere as that does.
    """
    how = {name: value for name, value in reading.items() if name != "drop"}
    settings: dict[str, Any] = {"apart": apart, "fetch": fetch, "say": say, "drop": reading.get("drop", False)}
    evaluated = reading.get("evaluated")
    made = [
        text.load(place, seq_len, vocab_size, encoder, **settings, whole=evaluated is not None)
        for place, encoder in opened(name, **how)
    ]
    count = len(sources(name))
    found = _mixed(name, made[:count])
    left_out = {one.about["place"]: one.about["left_out"] for one in made if one.about["left_out"]}
    facts = {"bad_samples": left_out} if left_out else {}
    if evaluated is None:
        return replace(found, facts=facts)
    test = _mixed(evaluated, made[count:])
    return replace(found, test=test.test, about={**found.about, "evaluated": (evaluated, test)}, facts=facts)


def _mixed(name: str, made: Sequence[Dataset]) -> Dataset:
    if len(made) == 1:
        return made[0]
    names, shares = zip(*sources(name), strict=True)
    trains: list[Any] = [one.train for one in made]
    lengths = [len(one) for one in trains]
    shares = shares if all(shares) else tuple(lengths)
    # Of one source an epoch has all sequences once, and of none fewer.
    scale = max(length / share for length, share in zip(lengths, shares, strict=True))
    most = float(2 * MOST)  # which an epoch can't have; the scale may be infinite
    counts = [max(length, round(min(scale * share, most))) for length, share in zip(lengths, shares, strict=True)]
    if (whole := sum(counts)) > MOST:
        few = names[min(range(len(made)), key=lambda i: len(trains[i]) / shares[i])]
        raise UnusableText(f"{few}: its share makes an epoch of {whole:,} sequences; give it a smaller one")
    about = {"mixed": list(zip(names, made, counts, strict=True)), "shares": shares}
    return Dataset(Mixture(trains, counts), Mixture([one.test for one in made]), made[0].classes, about)
