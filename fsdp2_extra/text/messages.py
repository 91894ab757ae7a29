"""Conversations as they are published, and the forms of them that a chat template takes.

What says the same is published in several forms: a content as text or as a list of parts, a call's arguments, all its
calls and the tools as objects or as JSON text. A template takes some of them, and prints others as Python or JSON
shows them. What a template does with a form is tried, as what it loops over doesn't tell it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from typing import Any

from fsdp2.data.errors import UnusableText
from fsdp2_extra.text.forms import LEARNED, OF_ROLE, ROLES, Fields, from_json, messages_of, renamed, unread
from fsdp2_extra.text.rows import Row
from fsdp2_extra.text.written import UnusableJson, parse

NAME_CONTENT = "leave it out, or name its field, as --chat-fields role=from,content=value"
USUAL: tuple[Any, ...] = (None, 1, "", [], {})
# Who speaks, as other forms of data have it: a template prints any name, and a model then learns a turn of that name.
CALLED = {**ROLES, **dict.fromkeys(("model", "bot", "ai"), "assistant")}
SPEAKERS = ("system", "user", "assistant", "tool")
# Keys of messages that hold nothing to learn, or are looked at one by one. A template has to print any other.
PLAIN = {"role", "content", "tool_calls", "name", "tool_call_id", *LEARNED}
PLAIN |= {"id", "uuid", "index", "type", "model", "source", "date", "timestamp", "created_at", "language", "metadata"}
# What ends a piece of a content: a line, and a tag, as <think> or [THINK]. So many are left out of a content singly.
PIECES, MOST_PIECES = re.compile(r"\n|<[^<>\n]*>|\[[^\[\]\n]*\]"), 16
MARKS = ("part", "more")  # with a message's place, what stands for its content
# As Python and JSON show a part of a content.
SHOWN_PART = re.compile(r"""['"]text['"]\s*:\s*['"]part\d+of""")


def conversation(row: Row, form: str, fields: Fields) -> tuple[list[Any], list[Any] | None]:
    """The messages of a line of this form, and its tools if it has some. Raises UnusableText.

    Contents are text or parts of text, and calls and tools are objects.
    """
    line, found = renamed(row.content, fields), []
    require_usual(line, unread(form, fields), row.where)
    for number, message in enumerate(messages_of(line, form, fields, row.where), 1):
        where = f"{row.where}: its message {number}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UnusableText(f"{where} has no role{_named(message)}")
        role = message["role"]
        ours = role
        if role not in SPEAKERS:
            low = role.strip().lower()
            near = get_close_matches(low, SPEAKERS, 1, 0.8) if low.isalpha() else []  # user2 is somebody
            ours = CALLED.get(low) or next(iter(near), role)
        flag = "system-role" if ours == "system" else ours
        if ours != role and flag in OF_ROLE:
            raise UnusableText(f"{where} has the role {role}, which is {ours} here; add --chat-fields {flag}={role}")
        if role != "assistant" and (key := next((key for key in LEARNED if message.get(key)), None)):
            raise UnusableText(f"{where} ({role}) has {key}, and answers alone are learned; drop it")
        require_usual(message, LEARNED, where, off=(0,))
        # Tables have each column in each row. Transformers leaves these out too.
        message = {key: value for key, value in message.items() if value is not None}
        if not {"content", "tool_calls"} & message.keys() and (role != "assistant" or message.keys() <= PLAIN):
            raise UnusableText(f"{where} ({role}) has no content; it has {', '.join(message)}; {NAME_CONTENT}")
        if isinstance(content := message.get("content", ""), list):
            message["content"] = _parts(content, where)
        elif not isinstance(content, str):
            raise UnusableText(f"{where} has a content that is neither text nor a list of parts; write it as text")
        if calls := message.get("tool_calls"):
            message["tool_calls"] = _objects(calls, f"{where} has tool_calls")
            message = {key: value for key, value in message.items() if key != "tool_calls" or value}
        found.append(message)
    return found, _objects(line.get("tools"), f"{row.where}: has tools") or None


def _named(message: Any) -> str:
    """The fields of a message without a role, and which of them may be what is looked for: the shorter text a role."""
    if not isinstance(message, dict) or not message:
        return ""
    texts = sorted((name for name in message if isinstance(message[name], str)), key=lambda name: len(message[name]))
    role, content = (texts + ["NAME"] * 2)[:2]
    fix = "name them" if len(texts) != 2 else "add"
    return f"; it has {', '.join(list(map(str, message))[:8])}; {fix} --chat-fields role={role},content={content}"


def require_usual(table: dict[str, Any], keys: Collection[str], where: str, off: tuple[Any, ...] = ()) -> None:
    """Raise UnusableText for a key by which others learn something else, unless its value means nothing or is `off`."""
    if table.get("label") is False:  # KTO's
        raise UnusableText(f"{where} has label false, an answer that isn't wanted, which isn't learned here; drop it")
    for key in sorted(keys):
        if table.get(key, 1) not in (*USUAL, *off):
            raise UnusableText(
                f"{where} has {key}, by which others learn less of it, or to another prompt; here answers are learned "
                f"whole{' or not at all (0)' if off else ''}, to messages and tools alone; drop it"
            )


def learned_answers(messages: list[Any]) -> list[bool]:
    """Of each answer whether it is learned: those with a `weight` of 0, as OpenAI has it, or `train` false aren't."""
    return [not any(one.get(key) == 0 for key in LEARNED) for one in messages if one["role"] == "assistant"]


def _parts(content: list[Any], where: str) -> list[Any]:
    """The parts of a content, without what else they have: a template may look for the key of an image."""
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = str(part.get("type") if isinstance(part, dict) else part)[:40]
            raise UnusableText(
                f"{where} has a part that is no text ({kind!r}), and models learn text alone here; leave the "
                "conversation out of the file"
            )
    return [{"type": "text", "text": part["text"]} for part in content]


def _objects(given: Any, what: str) -> list[Any]:
    """A list of objects; it, and each of them, may be JSON text."""
    found = from_json(given, what)
    objects = [from_json(one, what) for one in found] if isinstance(found, list) else [found] * bool(found)
    if (found and not isinstance(found, list)) or not all(isinstance(one, dict) for one in objects):
        raise UnusableText(f"{what} that are no list of objects; give [{{…}}, …], or the JSON text of that")
    return objects


def _object(function: Any, where: str) -> Any:
    """The object whose JSON text a function is called with; None if it isn't called with such a text."""
    text = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(text, str):
        return None
    try:
        value = parse(text)
    except UnusableJson as error:
        raise UnusableText(f"{where}: arguments of a call: {error}") from None
    except ValueError:  # it is no JSON, and stays the text that it is
        return None
    return value if isinstance(value, dict) else None


def with_objects(messages: list[Any], where: str) -> tuple[list[Any], list[str]]:
    """A copy of messages whose calls have objects in the place of their JSON text, and those texts.

    Raises UnusableText.
    """
    texts: list[str] = []

    def called(call: Any) -> Any:
        function: Any = call.get("function", call) if isinstance(call, dict) else None
        if (value := _object(function, where)) is None:
            return call
        texts.append(function["arguments"])
        function = {**function, "arguments": value}
        return {**call, "function": function} if "function" in call else function

    parsed = []
    for message in messages:
        calls = message.get("tool_calls")
        parsed.append({**message, "tool_calls": list(map(called, calls))} if isinstance(calls, list) else message)
    return parsed, texts


def encoded_twice(texts: list[str], shown: str) -> bool:
    """Return whether a template has written one of the texts as a string of JSON."""
    return any(json.dumps(text, ensure_ascii=ascii) in shown for text in texts for ascii in (False, True))


def left_out(messages: list[Any], text: str, render: Callable[[list[Any]], str]) -> tuple[int, str] | None:
    """Find a message whose content, or a piece of it, the template leaves out of its text: its place, and what.

    A piece is a line, or what stands in it beside a tag, as of thoughts. What changes nothing when it is removed isn't
    printed. A template may leave out pieces of earlier answers, thoughts, that it prints of the last one.

    Args:
        render: gives the text of other messages.
    """
    contents = [str(_joined(one.get("content", ""), at)).strip() for at, one in enumerate(messages)]
    for at, (message, whole) in enumerate(zip(messages, contents, strict=True)):
        if text.count(whole) == sum(one.count(whole) for one in contents) or not whole:
            continue
        pieces = [piece for part in PIECES.split(whole) if (piece := part.strip())] or [whole]
        missing = [] if _there(whole, text) else [piece for piece in pieces if not _there(piece, text)]
        tried = [dict.fromkeys(pieces, "")] if len(missing) in (0, len(pieces)) else []
        if missing:
            last = render(messages[: at + 1])
            missing = [piece for piece in missing if not _there(piece, last)][:MOST_PIECES]
            tried += [dict.fromkeys(missing, "")] if missing and not tried else []
            tried += [{piece: other} for piece in missing for other in ("", *_with_other_ends(piece))]
        for some in tried:
            changed = {**message, "content": _replaced(message["content"], some)}
            if render([*messages[:at], changed, *messages[at + 1 :]]) == text:
                return at, "content" if len(some) == len(pieces) and not any(some.values()) else repr(next(iter(some)))
    return None


def _there(piece: str, text: str) -> bool:
    """Return whether a text holds a piece, as it is or as a JSON string."""
    return piece in text or any(json.dumps(piece, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True))


def _with_other_ends(piece: str) -> tuple[str, ...]:
    """A piece with another first or last character, or without it: a template that cuts shows one of them as before."""
    other = "x" if "x" not in piece else "\xd7"
    return other + piece[1:], piece[:-1] + other, piece[1:], piece[:-1]


def _replaced(content: Any, pieces: Mapping[str, str]) -> Any:
    if isinstance(content, list):
        return [{**part, "text": _replaced(part["text"], pieces)} for part in content]
    any_of = "|".join(map(re.escape, sorted(pieces, key=len, reverse=True)))
    return re.sub(any_of, lambda found: pieces[found[0]], content)


class Contents:
    """Finds the form of contents that a template takes: as they are, as text, or in parts."""

    def __init__(self) -> None:
        self._known: dict[Any, Form] = {}

    def __call__(self, messages: list[Any], template: str, render: Callable[[list[Any]], str]) -> list[Any]:
        """Messages in the first of the forms in which the template prints most of the contents.

        Args:
            render: gives the template's text of messages. It is called once for each set of roles and their forms.
        """
        key = template, frozenset((message["role"], isinstance(message.get("content"), list)) for message in messages)
        if key not in self._known:
            tried = _marked(messages)
            printed = [_printed(form(tried), render) for form in WRITTEN]
            most = max(printed)
            if most < 0:  # perhaps another reason keeps the template from printing them, which it gives then
                return messages
            self._known[key] = WRITTEN[printed.index(most)]
        return self._known[key](messages)


def _marked(messages: list[Any]) -> list[Any]:
    """Messages whose contents are marks, in the form that each has: two parts, of which some print the first alone."""

    def marked(content: Any, at: int) -> Any:
        two = [{"type": "text", "text": f"{part}{at}of"} for part in MARKS]
        return two if isinstance(content, list) else f"part{at}of"

    return _changed(messages, marked)


def _changed(messages: list[Any], change: Callable[[Any, int], Any]) -> list[Any]:
    """Messages with contents that are made of theirs and of their place."""
    numbered = enumerate(messages)
    return [{**one, "content": change(one["content"], at)} if "content" in one else one for at, one in numbered]


def _printed(messages: list[Any], render: Callable[[list[Any]], str]) -> int:
    """The number of marks that a template prints; -1 if it refuses them, or prints parts as objects."""
    with suppress(Exception):  # of the template, which is a program of its own
        text = render(messages).lower()
        if not SHOWN_PART.search(text):
            return sum(f"{part}{at}of" in text for at in range(len(messages)) for part in MARKS)
    return -1


def _joined(content: Any, _: int) -> Any:
    """A content's text: its parts are lines, as vLLM joins them where a template takes text."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content


def _in_parts(content: Any, _: int) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Form = Callable[[list[Any]], list[Any]]
WRITTEN: tuple[Form, ...] = (list, partial(_changed, change=_joined), partial(_changed, change=_in_parts))
