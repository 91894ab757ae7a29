"""Conversations as tokens, by the model's own chat template, and which of them the model has to write: its answers.

Which text of a rendered conversation is an answer, the template says by `{% generation %}`. Where it doesn't, the
conversation is rendered up to each answer, as a model is asked for it, and up to its end: what lies between is the
answer. Both have to be the beginning of the whole conversation, in text and in tokens. A template of which that isn't
true would train the model on other prompts than it gets, and is refused.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import cache, partial
from importlib.util import find_spec
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy

from fsdp2.data.errors import UnusableText
from fsdp2.data.splits import identity_of
from fsdp2.units import install, printable
from fsdp2_extra.foreign.code import installed_code_only
from fsdp2_extra.text.auto_tokenizer import opened
from fsdp2_extra.text.forms import Fields, one_form
from fsdp2_extra.text.messages import (
    PLAIN,
    Contents,
    conversation,
    encoded_twice,
    learned_answers,
    left_out,
    with_objects,
)
from fsdp2_extra.text.rows import Row
from fsdp2_extra.text.tokenizer import foreign
from fsdp2_extra.text.tokenizer_file import DECLARING, FromFile

# What of a tokenizer's folder makes a conversation into tokens.
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "*chat_template*", "*chat_templates/*")
# Those of them that hold a tokenizer's template in transformers. The folder has further ones, which have names.
OWN_TEMPLATES = ("chat_template.jinja", "additional_chat_templates")
TOKENS = re.compile(r"\b(?:bos|cls|eos|mask|pad|sep|unk)_token\b")
# Templates that name today's date would make other tokens tomorrow. It is that which Llama's template falls back to.
TODAY = datetime(2024, 7, 26)
# What stands around the text of `{% generation %}` while its place is looked for; no text has such characters.
BEGIN, END = "\U0010f516\U0010fad1", "\U0010fad1\U0010f516"
THOUGHTS_END = re.compile(r"[>\]]\s*")  # as of </think> and [/THINK]
TAGS = {"generation": "call mark_of_an_answer()", "endgeneration": "endcall"}

Span = tuple[int, int]


class Chat:
    """Makes tokens of conversations in one of the `FORMS`, and their `"tools"`, an `Encoder`.

    `folder` is of a tokenizer with a chat template, `fields` how the conversations call theirs. Raises UnusableText.
    """

    kind: str = "chat"
    begin: tuple[int, ...] = ()  # the template says how a conversation begins
    suffixes: tuple[str, ...] = (".jsonl", ".parquet")

    def __init__(self, folder: str, fields: Fields | None = None) -> None:
        self._fields = dict(fields or {})
        self.field: str | Fields = self._fields
        place = _place(folder)
        if not (place / "tokenizer.json").is_file():
            raise UnusableText(f"{folder}: has no tokenizer.json and chat template; give a folder with --tokenizer")
        self._folder, self.tokenizer = place, FromFile(place / "tokenizer.json")
        if not has_template(folder):
            raise UnusableText(
                f"{place}: its tokenizer has no chat template; put one beside it as chat_template.jinja, or give the "
                "folder of a chat model with --tokenizer"
            )
        for module in ("transformers", "jinja2"):
            if find_spec(module) is None:
                raise UnusableText(f"{module} isn't installed; {install('hf')}")
        self.size, self.end = self.tokenizer.size, self.tokenizer.end
        read = b"".join(file.name.encode() + file.read_bytes() for file in _files(place))
        day = TODAY.strftime("%d %b %Y") if b"strftime_now" in read else ""
        self.about = {**self.tokenizer.about, "template": str(_template_file(place)), "day": day}
        self.identity = identity_of(read)
        self._loaded: Any = None
        self._contents = Contents()
        self._form: str | None = None
        self._printed: set[int] = set()  # hashes of lists of tools, each of which is
        self._left_out: set[str] = set()

    def source(self) -> str | None:
        """The form of the conversations that it has encoded."""
        return self._form

    def left_out(self) -> set[str]:
        """The keys of their messages that say no, and that nothing reads."""
        return self._left_out

    def encode(self, rows: Sequence[Row]) -> Iterator[tuple[numpy.ndarray, numpy.ndarray]]:
        """The tokens of each conversation, (n,), and as many 0 or 1: whether an answer's token, for the loss."""
        for row in rows:
            self._form = one_form(row.content, self._form, self._fields, row.where)
            messages, tools = conversation(row, self._form, self._fields)
            text, spans = self._rendered(messages, tools, row.where)
            self._require_shown(messages, tools, text, row.where)
            no = {key for one in messages for key, value in one.items() if key not in PLAIN and value == 0}
            self._left_out |= {f"{key} of messages" for key in no}
            yield self._tokens(text, spans, row.where)

    def _tokens(self, text: str, spans: Sequence[Span], where: str) -> tuple[numpy.ndarray, numpy.ndarray]:
        """The tokens of a text, and 1 for those of the spans."""
        ends = sorted({position for span in spans for position in span})
        parts = [list(part) for part in self.tokenizer.encode([text, *(text[:end] for end in ends)])]
        whole, learn = parts[0], numpy.zeros(len(parts[0]), dtype=numpy.uint8)
        for end, part in zip(ends, parts[1:], strict=True):
            if whole[: len(part)] != part:
                raise UnusableText(
                    f"{where}: one token spans an answer and the text beside it, in "
                    f"{text[max(0, end - 12) : end + 12]!r}; let the chat template begin an answer behind a line end "
                    "or a special token, with its first space in it"
                )
        count = dict(zip(ends, map(len, parts[1:]), strict=True))
        for begin, end in spans:
            learn[count[begin] : count[end]] = 1
        return numpy.array(whole, dtype=numpy.uint32), learn

    def _rendered(self, messages: list[Any], tools: Any, where: str, *, learned: bool = True) -> tuple[str, list[Span]]:
        """A conversation as text, and where its answers stand in it, if they are to be learned.

        OpenAI's tool calls have their arguments as the JSON text of an object. Most templates write an object as JSON
        themselves, and would write such a text as JSON of JSON, or refuse it. They get the object.
        """
        parsed, texts = with_objects(messages, where)
        if not texts:
            return self._shown(messages, tools, where, learned)
        try:
            shown = self._shown(messages, tools, where, learned)
        except UnusableText:
            return self._shown(parsed, tools, where, learned)
        return self._shown(parsed, tools, where, learned) if encoded_twice(texts, shown[0]) else shown

    def _require_shown(self, messages: list[Any], tools: Any, text: str, where: str) -> None:
        """Raise UnusableText if the tools, or a part of messages, change nothing of the text: an empty answer would be
        learned, or one to another prompt."""

        def render(some: list[Any], tools: Any = tools) -> str:
            try:
                return self._rendered(some, tools, where, learned=False)[0]
            except UnusableText:  # so the template looks at them
                return ""

        def unprinted(part: str, places: Sequence[int]) -> bool:
            some = [{**one, part: type(one[part])()} if at in places else one for at, one in enumerate(messages)]
            last = places[-1] + 1  # a template may print thoughts of the last answer alone
            return render(some) == text and render(some[:last]) == render(messages[:last])

        have = {part: [at for at, one in enumerate(messages) if one.get(part)] for one in messages for part in one}
        tried = [(part, places) for part, places in sorted(have.items()) if places and part not in PLAIN]
        found = [(places[0], part) for part, places in tried if unprinted(part, places)]
        for at in have.get("tool_calls", []):  # of several, or of tools, a template may print the first alone
            fewer_calls = [{**messages[at], "tool_calls": fewer} for fewer in _one_less(messages[at]["tool_calls"])]
            if any(render([*messages[:at], fewer, *messages[at + 1 :]]) == text for fewer in fewer_calls):
                found.append((at, "tool_calls"))
        found += [one] if (one := left_out(messages, text, render)) else []
        what = [f"its message {at + 1} ({messages[at]['role']}) has {part}" for at, part in found]
        if not what and tools:
            fewer_tools = [[]] if (these := hash(json.dumps(tools))) in self._printed else _one_less(tools)
            what = ["has tools"] * any(render(messages, fewer or None) == text for fewer in fewer_tools)
        if what:
            developer = bool(found) and messages[found[0][0]]["role"] == "developer"
            fix = "add --chat-fields system-role=developer" if developer else "leave it out"
            raise UnusableText(
                f"{where}: {printable(what[0][:80])}, and the chat template doesn't print it; give a template that "
                f"does, or {fix}"
            )
        if tools:
            self._printed.add(these)

    def _shown(self, messages: list[Any], tools: Any, where: str, learned: bool) -> tuple[str, list[Span]]:
        """`_rendered`, of the messages as they are."""

        def render(some: list[Any], template: str, *, prompt: bool = False) -> str:
            settings = {"tools": tools, "chat_template": template, "add_generation_prompt": prompt}
            before = random.getstate()
            text = str(self._tokenizer().apply_chat_template(some, tokenize=False, **settings))
            if random.getstate() != before:
                raise UnusableText(
                    f"{where}: the chat template draws text at random, other text for each process; take `random` and "
                    "`lipsum` out of it"
                )
            return text

        try:
            template = _with_one_date(self._tokenizer().get_chat_template(tools=tools))
            marking = _marking(template)
            messages = self._contents(messages, template, lambda some: render(some, template))
            text = render(messages, template)
            if not learned:
                return text, []
            some = learned_answers(messages)
            if marking is None:
                answers = _by_prefixes(text, messages, partial(render, template=template), where)
                return text, list(compress(answers, some))
            marked = _by_marks(text, render(messages, marking), where)
            if all(some):
                return text, marked

            def texts_of(first: list[Any]) -> list[str]:
                shown = render(first, template)
                return [shown[begin:end] for begin, end in _by_marks(shown, render(first, marking), where)]

            whose = _whose(messages, texts_of, where)
            return text, [span for span, answer in zip(marked, whose, strict=True) if some[answer]]
        except UnusableText:
            raise
        except Exception as error:  # of the template, which is a program of its own
            reason = " ".join(str(error).split())[:160]
            raise UnusableText(f"{where}: the chat template refuses it ({type(error).__name__}: {reason})") from None

    def _tokenizer(self) -> Any:
        """Transformers' form of it, which has the template. It is loaded where it is first used: that takes seconds."""
        if self._loaded is None:
            from transformers import PreTrainedTokenizerFast

            try:
                # Of this class it is the tokenizer.json as it is, whatever class the folder names.
                with installed_code_only(self._folder):
                    self._loaded = PreTrainedTokenizerFast.from_pretrained(str(self._folder), local_files_only=True)
                named = self._loaded.special_tokens_map
                if unnamed := set(TOKENS.findall(str(self._loaded.chat_template))) - named.keys():
                    auto = opened(self._folder)
                    for name in unnamed & auto.special_tokens_map.keys():  # which its class alone knows, as GPT-2's
                        token = str(auto.special_tokens_map[name])
                        if [len(tokens) for tokens in self.tokenizer.encode([token])] != [1]:
                            raise ValueError(f"{type(auto).__name__} has {token} as {name}, and tokenizer.json hasn't")
                        setattr(self._loaded, name, token)
            except Exception as error:  # its errors are of no class of their own
                reason = " ".join(str(error).split())[:160]
                fix = "name what the chat template prints, such as bos_token, in tokenizer_config.json"
                raise UnusableText(f"{self._folder}: transformers can't open its tokenizer ({reason}); {fix}") from None
        return self._loaded


def _one_less(given: list[Any] | None) -> Iterator[list[Any]]:
    """The lists that lack one of the given."""
    given = given or []
    return ([*given[:at], *given[at + 1 :]] for at in range(len(given)))


def open_chat(folder: str, fields: Fields | None = None) -> Chat:
    """The tokenizer and chat template of a folder, which work within bounds. Raises UnusableText."""
    from fsdp2_extra.foreign.bounds import in_bounds

    place = _place(folder)
    files = [*_files(place), *(place / name for name in DECLARING)]
    return in_bounds(lambda: Chat(folder, fields), foreign(folder, files))


def _place(folder: str) -> Path:
    return Path(folder).parent if Path(folder).name == "tokenizer.json" else Path(folder)


def _files(place: Path) -> list[Path]:
    return sorted({file for pattern in FILES for file in place.glob(pattern) if not file.is_dir()})


def _by_prefixes(text: str, messages: list[Any], render: Callable[..., str], where: str) -> list[Span]:
    """The places of the answers in the text of messages. An earlier one may lack thoughts that it has as the last."""
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if number == 0:
            raise UnusableText(f"{where}: begins with an answer; only a template with {{% generation %}} takes that")
        before, after = render(messages[:number], prompt=True), render(messages[: number + 1])
        turn, begin = after.removeprefix(before), len(before)
        ends = (at for one in THOUGHTS_END.finditer(turn) for at in range(one.start() + 1, one.end() + 1))
        turn = next(
            (turn[at:] for at in chain([0], ends) if text.startswith(turn[at:], begin) and turn[at:].strip()), ""
        )
        if not (turn and after.startswith(before) and text.startswith(before)):
            empty = not (message.get("content") or message.get("tool_calls"))
            leave = "" if not empty else "it has no content: leave the conversation out, or "
            raise UnusableText(
                f"{where}: the chat template shows message {number + 1}, or those before it, differently when "
                f"more follows, so an answer's prompt can't be found; {leave}mark answers in the template by "
                "{% generation %} … {% endgeneration %}"
            )
        spans.append((begin, begin + len(turn)))
    return spans


def _whose(messages: list[Any], texts_of: Callable[[list[Any]], list[str]], where: str) -> list[int]:
    """The number of the answer that each marked text is of: a template may mark several texts of one, or none.

    Args:
        texts_of: gives the marked texts of the first messages.
    """
    texts, whose = texts_of(messages), list[int]()
    for answer, at in enumerate(at for at, message in enumerate(messages) if message["role"] == "assistant"):
        before, now = texts_of(messages[:at]) if at else [], texts_of(messages[: at + 1])
        # An earlier answer may lack thoughts that it has as the last. In another order, or with other marks when more
        # follows, nothing says whose a text is.
        as_now = all(mine.endswith(one) for mine, one in zip(now, texts, strict=False))
        if len(before) != len(whose) or not len(before) <= len(now) <= len(texts) or not as_now:
            break
        whose += [answer] * (len(now) - len(before))
    else:
        if len(whose) == len(texts):
            return whose
    raise UnusableText(
        f"{where}: has answers that aren't to be learned, and the chat template marks other texts when more follows; "
        "drop their weight"
    )


def _by_marks(text: str, marked: str, where: str) -> list[Span]:
    """The places in a text that a template marks as an answer, by the same text with marks.

    Transformers gives places, too, which are wrong for a mark in a macro, a filter or a block of `set`.
    """
    if marked.replace(BEGIN, "").replace(END, "") != text or marked.count(BEGIN) != marked.count(END):
        raise UnusableText(
            f"{where}: the chat template changes what it has marked by {{% generation %}}, so an answer's place isn't "
            "known; mark the answer where it is printed"
        )
    begins, spans, length = list[int](), list[Span](), 0
    for part in re.split(f"({BEGIN}|{END})", marked):
        if part == BEGIN:
            begins.append(length)
        elif part == END:
            spans.append((begins.pop(), length))
        else:
            length += len(part)
    return [(begin, end) for begin, end in spans if begin < end]


@cache
def _marking(template: str) -> str | None:
    """A template that prints a text with marks; None if it has no `{% generation %}`."""
    from jinja2 import Environment

    found, before = list[str](), ""
    # Read as transformers does. In a comment, or in a text, that tag is none.
    for _, kind, value in Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True).lex(template):
        found.append(TAGS.get(value, value) if (kind, before) == ("name", "block_begin") else value)
        before = before if kind == "whitespace" else kind
    macro = f"{{%- macro mark_of_an_answer() -%}}{BEGIN}{{{{ caller() }}}}{END}{{%- endmacro %}}\n"
    return macro + "".join(found) if TAGS["generation"] in found else None


def _with_one_date(template: str) -> str:
    if "strftime_now" not in template:
        return template
    codes = [flag + code for flag in ("", "-") for code in "aAbBcdDeFgGhHIjklmMprRSTuUVwWxXyYzZ"]
    shown = "".join(f' | replace("%{code}", "{TODAY.strftime(f"%{code}")}")' for code in codes)
    # The template begins with a line of its own, as without the macro.
    return f"{{%- macro strftime_now(format) -%}}{{{{ format{shown} }}}}{{%- endmacro %}}\n{template}"


def _template_file(folder: Path) -> Path:
    """The place of a tokenizer's chat template: in a file of its own, which counts first, or among the settings.

    chat_template.json isn't it: in that one transformers looks for the template of a processor.
    """
    found = (folder / name for name in OWN_TEMPLATES if (folder / name).exists())
    return next(found, folder / "tokenizer_config.json")


def has_template(folder: str) -> bool:
    """Return whether a tokenizer's folder has a chat template."""
    place = _place(folder)
    if any((place / name).exists() for name in OWN_TEMPLATES):
        return True
    try:
        return bool(json.loads((place / "tokenizer_config.json").read_bytes()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False
