"""Preference pairs as `examples/dpo.py` learns from them: counted, and the first ones decoded."""

from __future__ import annotations

from contextlib import suppress

from fsdp2.config import Config
from fsdp2.data.errors import UnusableText
from fsdp2.data.splits import IGNORED
from fsdp2.run.dataset import tokenizer_of
from fsdp2_extra.text import pairs
from fsdp2_extra.text.forms import fields_of, form_of
from fsdp2_extra.text.places import PUBLISHED, sources
from fsdp2_extra.text.prepared import is_prepared
from fsdp2_extra.text.reading import rows_of
from fsdp2_extra.text.text import found
from fsdp2_extra.text.tokenizer_file import open_tokenizer
from fsdp2_tools.data.shown import marked


def shown_pairs(config: Config, count: int) -> list[str] | None:
    """Lines about a `--dataset` of pairs, with the first of them; None for another. Raises UnusableText."""
    kind, _, place = config.dataset.partition(":")
    place = config.dataset if f"{kind}:" == PUBLISHED else place
    if kind == "text" or len(sources(config.dataset)) > 1 or is_prepared(place):
        return None
    fields = fields_of(config.chat_fields or "")
    first = None
    with suppress(UnusableText):  # of what is shown as something else, where it is said
        first = next(rows_of(found(place, (".jsonl", ".parquet"))[0], fields), None)
    if first is None or not isinstance(first.content, dict) or form_of(first.content, fields) != "pairs":
        return None
    tokenizer, words = tokenizer_of(config), config.spec.vocab_size(config.model_size) or 0
    data = pairs.load(place, tokenizer, config.seq_len, words, fields, drop=config.bad_samples == "drop")
    decode, lines = open_tokenizer(tokenizer).decode, [f"pairs: {data.about}"]
    for number in range(min(count, len(data))):
        lines.append(f"pair {number + 1} of {len(data):,}")
        for answer, tokens, targets in zip(pairs.ANSWERS, *data[number], strict=True):
            learned = targets != IGNORED
            end = int(learned.nonzero().max()) + 1
            lines += [f"  {answer}: {one}" for one in marked(tokens[:end], learned[:end], [end], decode)]
    return lines
