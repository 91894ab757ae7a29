"""The forms in which conversations are published, what each is read as, and other names of their fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fsdp2.data.errors import UnusableText
from fsdp2_extra.text.written import parse


class Form(NamedTuple):
    """Fields that a line has, others that are read of it, and the words for what it is read as."""

    has: set[str]
    more: set[str]
    read_as: str


FORMS = {  # a line that has several is of the first
    "messages": Form({"messages"}, set(), "messages"),
    "pairs": Form({"chosen", "rejected"}, {"prompt", "system"}, "chosen and rejected as answers"),  # for `pairs` alone
    "conversations": Form(
        {"conversations"}, {"system"}, "conversations, with from as the role and value as the content"
    ),
    "instruction": Form(
        {"instruction", "output"}, {"input", "system"}, "instruction and input as question, output as answer"
    ),
    "prompt": Form({"prompt", "completion"}, {"system"}, "prompt as question, completion as answer"),
}
# Keys by which others leave something out of the loss, and of a line, those that they give to the template.
LEARNED = {"weight", "train", "training", "loss"}
OF_A_PROMPT = {"functions", "function_call", "system", "history", "chat_template_kwargs", "documents"}
READ = {"tools", *LEARNED, *OF_A_PROMPT}.union(*(form.has | form.more for form in FORMS.values()))
# Keys of a `Fields`: of a line, of a message, and what a message has as its role; `system` is a line's field.
OF_LINE = {"tools"}.union(*(form.has | form.more for form in FORMS.values())) - {"conversations"}
OF_MESSAGE, OF_ROLE = {"role", "content"}, {"user", "assistant", "tool", "system-role"}
# Names that ShareGPT's descendants have for a role.
CALLS = "function_call"  # LLaMA-Factory's, of an assistant: its text is JSON of calls
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", CALLS: "assistant", "observation": "tool"}
ROLES |= {role: role for role in ("user", "assistant", "system", "developer", "tool")}
OTHERS = "conversations, instruction and output, or prompt and completion"
EACH = "each source's between semicolons, the evaluated one's last"
NAME_THEM = (
    f"name them: --chat-fields messages=dialog, prompt=question,completion=answer, chosen=good,rejected=bad; {EACH}"
)

Fields = Mapping[str, str]
"""Our name of a field or role -> theirs, as `--chat-fields` has them; {} where the names are ours."""


def fields_of(text: str) -> dict[str, str]:
    """The fields of OURS=THEIRS,…, in one order. Raises ValueError for what says nothing, or more than one thing."""
    found: dict[str, str] = {}
    for part in text.split(",") if text else ():
        ours, _, theirs = part.strip().partition("=")
        if ours not in OF_LINE | OF_MESSAGE | OF_ROLE or not theirs:
            known = ", ".join(sorted(OF_LINE | OF_MESSAGE | OF_ROLE))
            raise ValueError(f"must be OURS=THEIRS,…, such as prompt=question,completion=answer; ours are {known}")
        alike = next(names for names in (OF_LINE, OF_MESSAGE, OF_ROLE) if ours in names)
        if ours in found or theirs in (found[one] for one in found.keys() & alike):
            raise ValueError(f"names {ours if ours in found else theirs} twice; drop one of them")
        found[ours] = theirs
    if not any(_goes_with(form, found) for form in FORMS):
        raise ValueError(f"names fields of several forms; name those of one: messages, {OTHERS}")
    return dict(sorted(found.items()))


def spelled(fields: Fields) -> str:
    """The text of which `fields_of` makes them."""
    return ",".join(f"{ours}={theirs}" for ours, theirs in fields.items())


def of_line(fields: Fields) -> dict[str, str]:
    """Those of a line's fields."""
    return {ours: theirs for ours, theirs in fields.items() if ours in OF_LINE}


def renamed(line: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    """A line with our names. What has one of them, and isn't what that stands for, is left out."""
    ours = of_line(fields)
    rest = {name: value for name, value in line.items() if name not in ours.keys() | ours.values()}
    return rest | {name: line[theirs] for name, theirs in ours.items() if theirs in line}


def _more(form: str, fields: Fields) -> set[str]:
    """Fields that are read beside those of a form: a system text that is named, of messages too."""
    return FORMS[form].more | {"system"} & fields.keys()


def _goes_with(form: str, fields: Fields) -> bool:
    return of_line(fields).keys() <= FORMS[form].has | _more(form, fields) | {"tools"}


def read_of(form: str, fields: Fields) -> set[str]:
    """The fields, by their names, that are read of lines of this form."""
    return {fields.get(name, name) for name in {"tools"} | FORMS[form].has | _more(form, fields)}


def form_of(there: Iterable[str], fields: Fields) -> str | None:
    """The form of a line with these fields."""
    have = renamed(dict.fromkeys(there), fields).keys()
    return next((name for name, form in FORMS.items() if form.has <= have and _goes_with(name, fields)), None)


def unread(form: str, fields: Fields) -> set[str]:
    """Keys that would change what is learned of a line of this form, and aren't read."""
    return LEARNED | OF_A_PROMPT - _more(form, fields)


def formless(there: Iterable[str], fields: Fields, line: Mapping[str, Any] = {}) -> str:
    """The reason why a line with these fields has no form, and what to do, by its values if they are known."""
    has = f"it has {', '.join(list(map(str, there))[:8]) or 'none'}"
    for ours, theirs in of_line(fields).items():
        if theirs not in there:
            if theirs in line and any(ours in form.has for form in FORMS.values()):
                return f"its {theirs} is null; leave that line out"
            if ours != theirs:  # pairs alone are asked for by our own names
                return f"has no field {theirs}, which --chat-fields names ({EACH}); {has}"
            talk = form_of(there, {name: own for name, own in fields.items() if name not in FORMS["pairs"].has})
            fix = "python -m fsdp2.train --dataset chat:PATH learns from conversations, or " * (talk is not None)
            return f"has no field {theirs}; {fix}add --chat-fields {ours}=NAME; {has}"
    lists = (name for name in there if isinstance(line.get(name), list) and line[name])
    talk = next((name for name in lists if all(isinstance(one, dict) for one in line[name])), None)
    fix = NAME_THEM if talk is None else f"add --chat-fields messages={talk}"
    return f'has no "messages": [{{"role": …, "content": …}}, …], {OTHERS}; {has}; {fix}'


def one_form(line: Any, before: str | None, fields: Fields, where: str) -> str:
    """The form of a line. Raises UnusableText if it has none, or another than the lines before it."""
    there = [name for name, value in line.items() if value is not None] if isinstance(line, dict) else []
    if (form := form_of(there, fields)) is None:
        raise UnusableText(f"{where}: {formless(there, fields, line if isinstance(line, dict) else {})}")
    if before not in (None, form):
        raise UnusableText(
            f"{where}: has {form}, and the lines before it {before}; make two files of them, and mix those: "
            "--dataset chat:A@1,chat:B@1"
        )
    return form


def messages_of(line: Mapping[str, Any], form: str, fields: Fields, where: str) -> list[Any]:
    """The messages of a line with our names, in this form. Raises UnusableText."""

    def said(role: str, name: str) -> dict[str, Any]:
        if not isinstance(line[name], str):
            raise UnusableText(f"{where}: its {fields.get(name, name)} is no text; leave it out")
        return {"role": role, "content": line[name]}

    def turns(name: str) -> list[Any]:
        what = f"{where}: its {fields.get(name, name)}"
        return [_turn(one, fields, where) for one in _items(line[name], what)]

    if form == "pairs":
        raise UnusableText(f"{where}: has a chosen and a rejected answer; examples/dpo.py learns from such pairs")
    if form in ("messages", "conversations"):
        found = turns(form)
    elif form == "instruction":
        asked = [said("user", name) for name in ("instruction", "input") if line.get(name) not in (None, "")]
        question = {"role": "user", "content": "\n\n".join(one["content"] for one in asked)}
        found = [question, said("assistant", "output")]
    else:
        asked, answer = (
            [said(role, name)] if isinstance(line[name], str) else turns(name)
            for name, role in (("prompt", "user"), ("completion", "assistant"))
        )
        # TRL learns the completion alone.
        found = [{**one, "weight": 0} if isinstance(one, dict) else one for one in asked] + answer
    return [said("system", "system"), *found] if line.get("system") not in (None, "") else found


def from_json(given: Any, what: str) -> Any:
    """The value of a text of JSON, and anything else as it is. Raises UnusableText."""
    try:
        return (parse(given) if given.strip() else None) if isinstance(given, str) else given
    except ValueError as error:
        raise UnusableText(f"{what} that can't be read as JSON ({' '.join(str(error).split())[:120]})") from None


def _items(given: Any, what: str) -> list[Any]:
    """A list, which may be JSON text, and so may each of its items."""
    found = from_json(given, f"{what} are a text")
    if not isinstance(found, list) or not found:
        raise UnusableText(f'{what} must be a list; give [{{"role": …, "content": …}}, …]')
    return [from_json(one, f"{what} have a text") for one in found]


def _turn(turn: Any, fields: Fields, where: str) -> Any:
    """A turn of ShareGPT's, or one with other names, as a message; a message as it is."""
    if not isinstance(turn, dict):
        return turn
    sharegpt = turn.get("role") is None and turn.get("from") is not None
    names = dict(zip(("role", "content"), ("from", "value") if sharegpt else ("role", "content"), strict=True))
    names |= {ours: fields[ours] for ours in OF_MESSAGE & fields.keys()}
    absent = sorted(one for one in OF_MESSAGE & fields.keys() if turn.get(names[one]) is None)
    if absent and (absent != ["content"] or not turn.get("tool_calls")):
        if (null := names[absent[-1]]) in turn:
            raise UnusableText(f"{where}: a message's {null} is null; give it a text, or leave the line out")
        has = ", ".join(list(map(str, turn))[:8]) or "none"
        raise UnusableText(
            f"{where}: a message has no field {names[absent[-1]]}, which --chat-fields names; it has {has}"
        )
    if twice := next((one for one in names if names[one] != one and turn.get(one) is not None), None):
        raise UnusableText(f"{where}: has a turn with {twice} beside {names[twice]}; leave that out")
    message = {name: value for name, value in turn.items() if name not in names.values() and name not in names}
    message |= {ours: turn[theirs] for ours, theirs in names.items() if theirs in turn}
    roles = {fields[ours]: ours.removesuffix("-role") for ours in OF_ROLE & fields.keys()}
    if sharegpt or roles or "role" in fields:
        named = str(message.get("role"))
        if (role := (ROLES | roles).get(named)) is None:
            raise UnusableText(
                f"{where}: has a turn from {named[:40]!r}; name it one of {', '.join(ROLES)}, or say who that is with "
                "--chat-fields user=…,assistant=…,system-role=…"
            )
        message["role"] = role
        if named == CALLS:
            message["tool_calls"] = _calls(message.pop("content", None), f"{where}: has a turn from {CALLS}")
    return message


def _calls(given: Any, what: str) -> list[Any]:
    """Calls as OpenAI has them, of JSON text of one or of several. Raises UnusableText."""
    found = from_json(given, what)
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(one, dict) and one.keys() >= {"name", "arguments"} for one in calls):
        raise UnusableText(f'{what} that is no call; give {{"name": …, "arguments": …}}, or a list of such')
    return [{"type": "function", "function": one} for one in calls]
