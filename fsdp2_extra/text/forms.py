"""The forms in which conversations are published, and the messages that each is read as."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from fsdp2.data.errors import UnusableText

# By name: what a line has, what else is read of it, and what it is read as. A line that has several is of the first.
FORMS: dict[str, tuple[set[str], set[str], str]] = {
    "messages": ({"messages"}, set(), "messages"),
    "conversations": ({"conversations"}, {"system"}, "conversations, with from as the role and value as the content"),
    "instruction": (
        {"instruction", "output"},
        {"input", "system"},
        "instruction and input as question, output as answer",
    ),
    "prompt": ({"prompt", "completion"}, {"system"}, "prompt as question, completion as answer"),
}
# Keys by which others leave something out of the loss, and of a line, those that they give to the template.
LEARNED = {"weight", "train", "training", "loss"}
OF_A_PROMPT = {"functions", "function_call", "system", "history", "chat_template_kwargs", "documents"}
READ = {"tools", *LEARNED, *OF_A_PROMPT}.union(*(has | more for has, more, _ in FORMS.values()))
# Names that ShareGPT's descendants have for a role.
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}
ROLES |= {role: role for role in ("user", "assistant", "system", "developer", "tool")}
OTHERS = "conversations, instruction and output, or prompt and completion"


def form_of(fields: Iterable[str]) -> str | None:
    """The form of a line with these fields."""
    there = set(fields)
    return next((form for form, (has, _, _) in FORMS.items() if has <= there), None)


def unread(form: str) -> set[str]:
    """Keys that would change what is learned of a line of this form, and aren't read."""
    return LEARNED | OF_A_PROMPT - FORMS[form][1]


def one_form(line: Any, before: str | None, where: str) -> str:
    """The form of a line. Raises UnusableText if it has none, or another than the lines before it."""
    form = form_of(name for name, value in line.items() if value is not None) if isinstance(line, dict) else None
    if form is None:
        has = f"; it has {', '.join(list(map(str, line))[:5])}" if isinstance(line, dict) else ""
        raise UnusableText(f'{where}: has no "messages": [{{"role": …, "content": …}}, …], {OTHERS}{has}')
    if before not in (None, form):
        raise UnusableText(f"{where}: has {form}, and the lines before it {before}; make two of them")
    return form


def messages_of(line: Mapping[str, Any], form: str, where: str) -> list[Any]:
    """The messages of a line in this form. Raises UnusableText."""
    if form == "messages":
        return _items(line["messages"], f"{where}: its messages")
    if form == "conversations":
        found = [_turn(turn, where) for turn in _items(line["conversations"], f"{where}: its conversations")]
    elif form == "instruction":
        texts = [_text(line, name, where) for name in ("instruction", "input") if line.get(name)]
        found = [_said("user", "\n\n".join(texts)), _said("assistant", _text(line, "output", where))]
    else:
        asked, answer = (
            [_said(role, line[name])] if isinstance(line[name], str) else _items(line[name], f"{where}: its {name}")
            for name, role in (("prompt", "user"), ("completion", "assistant"))
        )
        if any(isinstance(one, dict) and one.get("role") == "assistant" for one in asked):
            raise UnusableText(
                f"{where}: its prompt has an answer, and all answers are learned alike here; give it as messages"
            )
        found = asked + answer
    system = _text(line, "system", where) if line.get("system") else ""
    return [_said("system", system), *found] if system else found


def from_json(given: Any, what: str) -> Any:
    """The value of a text of JSON, and anything else as it is. Raises UnusableText."""
    try:
        return (json.loads(given) if given.strip() else None) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise UnusableText(f"{what} that can't be read as JSON ({' '.join(str(error).split())[:120]})") from None


def _items(given: Any, what: str) -> list[Any]:
    """A list, which may be JSON text, and so may each of its items."""
    found = from_json(given, f"{what} are a text")
    if not isinstance(found, list) or not found:
        raise UnusableText(f'{what} are no list; give [{{"role": …, "content": …}}, …]')
    return [from_json(one, f"{what} have a text") for one in found]


def _turn(turn: Any, where: str) -> Any:
    """A turn of ShareGPT's as a message; a message as it is."""
    if not isinstance(turn, dict) or turn.get("from") is None:
        return turn
    if (role := ROLES.get(str(turn["from"]))) is None:
        raise UnusableText(f"{where}: has a turn from {str(turn['from'])[:40]!r}; name it one of {', '.join(ROLES)}")
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return {**others, **_said(role, turn.get("value"))}


def _said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _text(line: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(line[name], str):
        raise UnusableText(f"{where}: its {name} is no text; leave it out")
    return str(line[name])
