"""A run's view of text and conversations: how much, the learned share, and where documents begin and end.

All numbers were counted while the text was prepared, or follow from where documents end. No token is read for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from fsdp2.data.splits import Dataset
from fsdp2.units import printable, short
from fsdp2_extra.text.ends_of_turns import NONE
from fsdp2_extra.text.forms import FORMS
from fsdp2_extra.text.places import PUBLISHED
from fsdp2_extra.text.prepared import REFUSED, why_left_out
from fsdp2_extra.text.windows import Conversations, Documents, Mixture

AT_A_TIME = 1 << 20  # of documents whose ends are in memory
MOST_CHARACTERS, MOST_WORDS = 40, 400  # of the text of a token, and of reasons
OFTEN = 4  # passes over the same text teach nearly as much as new text (https://arxiv.org/abs/2305.16264)


def lines(dataset: Dataset) -> list[str]:
    """Lines about the data at a run's start; none for a dataset that isn't text or conversations."""
    about = dataset.about
    # What a model learns in another way than token by token, it learns of each source.
    each = None if isinstance(dataset.train, Conversations | Documents | Mixture) else dataset.train.targets_per_sample
    found = _training(dataset, each) if about else []
    if "evaluated" in about:
        source, test = about["evaluated"]
        found.append(f"evaluation: {len(dataset.test):,} sequences of {source}")
        for one in [part for _, part, _ in test.about.get("mixed", [])] or [test]:  # each once, whatever the shares
            found += [f"  {line}" for line in _training(one, each)]
    first = {line.strip(): at for at, line in reversed([*enumerate(found)])}
    # Of several sources with one tokenizer the first has its warning.
    return [one for at, one in enumerate(found) if first[one.strip()] == at or not one.lstrip().startswith("warning: ")]


def _training(dataset: Dataset, each: int | None) -> list[str]:
    """`each`: the targets of a sequence; None where their number differs."""
    about = dataset.about
    if mixed := about.get("mixed"):
        whole = sum(count for _, _, count in mixed)
        found = [f"mixture: {len(dataset.train):,} sequences in an epoch"]
        for (source, one, count), asked in zip(mixed, about["shares"], strict=True):
            got, wanted = f"{count / whole:.1%}", f"{asked / sum(about['shares']):.1%}"
            other = "" if got == wanted else f", where {wanted} is asked for: sequences are whole"
            times = "once" if count == len(one.train) else f"{count / len(one.train):.3g} times"
            found.append(f"  {got} of {source}, each {times}{other}")
            if count > OFTEN * len(one.train):
                found.append(
                    f"    warning: an epoch has each sequence of {source} {times}; beyond {OFTEN}, repeats teach "
                    "little; give it a smaller share, or give no shares, which reads each once"
                )
            found += [f"    {line}" for line in _training(one, each)]
        return found
    parts = [*about["train"], *about["test"]]
    learned, of = _learned(dataset, each)
    share = f"learned: {learned / of:.1%} of {of:,} tokens in {len(dataset.train):,} sequences"
    share += f" for training, {len(dataset.test):,} for evaluation" if about["test"] else ""
    shortest, longest, cut = _sizes(*parts)
    tokens = sum(int(one.ends[-1]) for one in parts if len(one.ends))
    made = sum(about["documents"].values()) + about["left_out"].get(REFUSED, 0)  # which aren't among them
    count = made - sum(about["left_out"].values())
    sizes = f"{count:,} of {span(shortest, longest)} tokens{' each' * (shortest == longest)} ({tokens:,} in all"
    if about["kind"] == "chat":
        if about["left_out"]:
            why = why_left_out(about["left_out"], parts[0].seq_len)
            reasons, more = about["refusal"], "…" * (len(about["refusal"]) > MOST_WORDS)
            why += f" ({printable(reasons[:MOST_WORDS])}{more})" if REFUSED in about["left_out"] else ""
            sizes = f"{sizes}; left out by --bad-samples drop: {why}"
        beside = printable(about["beside"][: 2 * MOST_CHARACTERS])
        counts = f"conversations: {sizes}); truncated: none, dropped: {beside or 'none'}"
        found = [*_read(about), counts, f"{share}; {_turn(dataset)}", _tokenizer(about)]
        return [*found, *warnings(about, dataset.classes)]
    left, one = sum(len(one.tokens) - one.seq_len * len(one) - 1 for one in parts), parts[0]
    counts = f"documents: {sizes}, {about['characters'] / tokens:.1f} characters each)"
    dropped = f"dropped: {about['empty']:,} empty ones, {left:,} tokens at the end"
    split = f"{cut:,} go on in the next sequence of {one.seq_len}" + ("" if one.apart else ", and see each other")
    found = [*_read(about), f"{counts}; {split}; {dropped}", share, _tokenizer(about)]
    return [*found, *warnings(about, dataset.classes)]


def _read(about: dict[str, Any]) -> list[str]:
    """The fields that were read, if they aren't those that a file of text or conversations has by default."""
    field, of_chat = about["field"], about["kind"] == "chat"
    if about["fields"]:
        return [f"read: {FORMS[field].read_as}, as conversations; --chat-fields {printable(about['fields'])}"]
    if field is None or (field == ("messages" if of_chat else "text") and not about["place"].startswith(PUBLISHED)):
        return []
    return [f"read: {FORMS[field].read_as}, as conversations" if of_chat else f"read: {printable(field)}, as documents"]


def warnings(about: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Warn of tokens that another reader wouldn't make, and of a model that would never stop."""
    return [*other_reader(about), *_endless(about, names)]


def span(least: int, most: int) -> str:
    """A number, or two with what stands between them."""
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def other_reader(about: dict[str, Any]) -> list[str]:
    """One line about text that transformers reads differently, or none."""
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


def longest(dataset: Dataset) -> int:
    """The tokens of the longest document of what is trained and evaluated on: no position is behind it."""
    about = dataset.about
    others = [one for _, one, _ in about.get("mixed", [])] + [
        one for _, one in [about.get("evaluated", ("", None))] if one
    ]
    parts = [*about.get("train", []), *about.get("test", [])]
    return max(_sizes(*parts)[1], *map(longest, others), 0)


def _name(token: str) -> str:
    """The text of a token for a line of a header: a stranger's tokenizer may have any."""
    return printable(token[:MOST_CHARACTERS])


def _learned(dataset: Dataset, each: int | None) -> tuple[int, int]:
    """The numbers of targets and of tokens of the sequences for training. For `each` see `_training`."""
    split: Any = dataset.train
    if each is not None:
        return len(split) * each, len(split) * getattr(split, "windows", split).seq_len
    chat, parts = dataset.about["kind"] == "chat", dataset.about["train"]
    tokens = sum(int(one.ends[-1]) if chat else len(one) * one.seq_len for one in parts)
    return split.target_count(range(len(split))), tokens


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
    other = "" if name == end else f" (eos_token is {end or 'none'}; an export as hf names this one too)"
    left_out = ", those in what is left out among them" if about["left_out"] else ""
    return f"{name} ends a turn{other}, learned in {count:,} of {_answers(about):,} answers{left_out}"


def _tokenizer(about: dict[str, Any]) -> str:
    """The begin and end of documents, and the settings of a tokenizer.json that aren't followed."""
    frame = ", ".join(f"{what} with {_name(about[what]) or 'no token of its own'}" for what in ("begins", "ends"))
    day = f", of which the date is {about['day']}" if about.get("day") else ""
    chat = about["kind"] == "chat"
    text = f"a conversation is as the chat template prints it{day}" if chat else f"a document {frame}"
    off = f"; off: its {' and '.join(about['off'])}" if about["off"] else ""
    return f"tokenizer: {short(about['tokenizer'])}; {text}{off}"
