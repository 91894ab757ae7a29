"""The forms in which data brings contents, tools and calls, and the form that a template takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp2.data.errors import UnusableText
from fsdp2_extra.text.chat import Chat
from tests.test_chat import ANSWER, GENERATION, MARKED, PLAIN, TEMPLATE, encoded, learned, make_tokenizer, talk

TEXT = '{"city": "Zürich", "days": 2}'
CALL = "{% for call in message.tool_calls or [] %}CALL{% endfor %}"
NO_DEVELOPER = (
    "{% set ns = namespace(shown=[]) %}{% for message in messages %}{% if message.role != 'developer' %}"
    "{% set ns.shown = ns.shown + [message] %}{% endif %}{% endfor %}"
)
# How templates write a call's arguments, and how they show those of OpenAI's, which are the JSON text of an object.
CALLS = {
    "{{ call.function.arguments | tojson }}": '{"city": "Zürich", "days": 2}',
    "{{ call.function | tojson }}": '{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}',
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}": "city=Zürich;days=2;",
    "{{ call.function.arguments }}": TEXT,
    "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}no{% endif %}": TEXT,
}


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_arguments_that_are_json_text_are_not_encoded_twice(tmp_path: Path, call: str, marked: bool) -> None:
    pytest.importorskip("transformers")
    template = (GENERATION if marked else PLAIN).replace("{{ message.content }}<", CALL.replace("CALL", call) + "<")
    chat = Chat(str(make_tokenizer(tmp_path / "tools", template)))
    function = {"name": "weather", "arguments": TEXT}
    line = talk("", "")
    line["messages"][1] |= {"tool_calls": [{"type": "function", "function": function}]}
    assert learned(chat, line) == CALLS[call] + "<|end|>\n"
    assert function["arguments"] == TEXT  # what was read stays as it is


@pytest.mark.parametrize("marked", [False, True])
def test_calls_that_a_template_leaves_out_are_refused(tmp_path: Path, marked: bool) -> None:
    """As Llama 3's first template does: the turn would be learned as an empty answer."""
    pytest.importorskip("transformers")
    chat = Chat(str(make_tokenizer(tmp_path / "tools", GENERATION if marked else PLAIN)))
    line = talk("", "")
    line["messages"][1] |= {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": TEXT}}]}
    with pytest.raises(UnusableText, match=r"message 2 \(assistant\) has tool_calls, and the chat template doesn't"):
        encoded(chat, line)


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("said", ["Be brief.", "a", [{"type": "text", "text": "Be brief."}]])
def test_a_message_that_a_template_leaves_out_is_refused(tmp_path: Path, said: Any, marked: bool) -> None:
    """As Qwen 3's does with OpenAI's developer: the answers would be learned to another prompt."""
    pytest.importorskip("transformers")
    template = GENERATION if marked else PLAIN
    chat = Chat(str(make_tokenizer(tmp_path / "roles", NO_DEVELOPER + template.replace("messages", "ns.shown"))))
    line = talk("a question", "an answer")
    expected = learned(chat, line)
    for role, content in (("system", said), ("developer", ""), ("developer", " ")):
        assert learned(chat, {"messages": [{"role": role, "content": content}, *line["messages"]]}) == expected
    with pytest.raises(UnusableText, match=r"message 1 \(developer\) has content, and the chat template doesn't"):
        encoded(chat, {"messages": [{"role": "developer", "content": said}, *line["messages"]]})


def test_arguments_that_are_no_object_stay_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    template = PLAIN.replace("{{ message.content }}<", CALL.replace("CALL", "{{ call.arguments | tojson }}") + "<")
    chat = Chat(str(make_tokenizer(tmp_path / "tools", template)))
    for arguments, shown in (("no json", '"no json"'), ("[1]", '"[1]"'), ({"a": 1}, '{"a": 1}'), ("{}", "{}")):
        line = talk("", "")
        line["messages"][1] |= {"tool_calls": [{"arguments": arguments}]}
        assert learned(chat, line) == f"{shown}<|end|>\n"


PARTS = "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
# How templates write a content, and what they show of "a b" and of the parts "a " and "b".
CONTENTS = {
    "{{ message.content }}": ("a b", "a \nb"),
    "{{ message.content | trim | upper }}": ("A B", "A \nB"),
    "{{ message.content | tojson }}": ('"a b"', '"a \\nb"'),
    "{% if message.content is string %}{{ message.content }}{% endif %}": ("a b", "a \nb"),
    "{% if message.content is string %}{{ message.content }}{% else %}PARTS{% endif %}": ("a b", "a b"),
    # As of models with images, which take nothing else: letters have no type.
    "PARTS": ("a b", "a b"),
}


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("content", CONTENTS)
def test_contents_have_the_form_that_the_template_takes(tmp_path: Path, content: str, marked: bool) -> None:
    pytest.importorskip("transformers")
    template = (GENERATION if marked else PLAIN).replace("{{ message.content }}", content.replace("PARTS", PARTS))
    chat = Chat(str(make_tokenizer(tmp_path / "parts", template)))
    parts: list[dict[str, Any]] = [{"type": "text", "text": "a ", "image": None}, {"type": "text", "text": "b"}]
    for given in (talk("a b", "a b"), talk("a b", parts), talk(parts, parts), talk(parts, "a b")):
        shown = [CONTENTS[content][isinstance(one["content"], list)] for one in given["messages"]]
        ((tokens, _),) = encoded(chat, given)
        assert chat.tokenizer.decode(tokens) == (f"<s><|user|>\n{shown[0]}<|end|>\n<|assistant|>\n{shown[1]}<|end|>\n")
        assert learned(chat, given) == shown[1] + "<|end|>\n"
    assert len(parts[0]) == 3  # what was read stays as it is


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "é"}}]


@pytest.mark.parametrize(
    "given", [TOOLS, json.dumps(TOOLS), [json.dumps(TOOLS[0])], json.dumps([json.dumps(TOOLS[0])])]
)
def test_tools_and_calls_that_are_json_text_are_objects_to_a_template(tmp_path: Path, given: Any) -> None:
    pytest.importorskip("transformers")
    call = CALL.replace("CALL", "{{ call.function.name }}({{ call.function.arguments | tojson }})")
    template = "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}" + PLAIN
    chat = Chat(str(make_tokenizer(tmp_path / "tools", template.replace("{{ message.content }}<", call + "<"))))
    calls = [{"type": "function", "function": {"name": "f", "arguments": TEXT}}]
    for said in (calls, json.dumps(calls)):
        line = {**talk("", ""), "tools": given}
        line["messages"][1] |= {"tool_calls": said}
        ((tokens, _),) = encoded(chat, line)
        assert chat.tokenizer.decode(tokens).startswith("weather;<s>")
        assert learned(chat, line) == f"f({TEXT})<|end|>\n"
    nothing: list[Any] = [None, "", " ", "[]", "null", []]
    for none in nothing:
        line = {**talk("", ""), "tools": none}
        line["messages"][1] |= {"tool_calls": none, "weight": None}  # as a table has each column in each row
        ((tokens, _),) = encoded(chat, line)
        assert chat.tokenizer.decode(tokens).startswith("<s><|user|>")


# What a conversation, and its second message, have beside the form that is read -> what the refusal says of it.
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "an older call": (
        {},
        {"function_call": {"name": "f"}},
        "its message 2 (assistant) has function_call, and the chat template",
    ),
    "a refusal": (
        {},
        {"refusal": "no"},
        "its message 2 (assistant) has refusal, and the chat template doesn't print it",
    ),
    "thoughts": (
        {},
        {"reasoning_content": "so"},
        "its message 2 (assistant) has reasoning_content, and the chat template",
    ),
    "anything": ({}, {"prefix\x1b": True}, "its message 2 (assistant) has prefix"),
    "no word for it": ({}, {"train": "false"}, "its message 2 has train, by which others learn less of it"),
    "half a loss": ({}, {"loss": 0.5}, "its message 2 has loss, by which"),
    "an object": ({}, {"content": {"text": "a"}}, "its message 2 has a content that is neither text nor a list"),
    "a capital": ({}, {"role": "Assistant"}, "its message 2 has the role Assistant, which is assistant here"),
    "another name": ({}, {"role": "gpt"}, "its message 2 has the role gpt, which is assistant here"),
    "who asks": (
        {},
        {"role": "human"},
        "its message 2 has the role human, which is user here; add --chat-fields user=",
    ),
    "a misspelt name": ({}, {"role": "asistant"}, "has the role asistant, which is assistant here; add --chat-fields"),
    "what is said first": ({}, {"role": "System"}, "which is system here; add --chat-fields system-role=System"),
    "older tools": ({"functions": [{"name": "f"}]}, {}, "line 1 has functions, by which others learn"),
    "a system": ({"system": "be brief"}, {}, "line 1 has system, by which others learn"),
    "settings": ({"chat_template_kwargs": {"thinking": True}}, {}, "line 1 has chat_template_kwargs, by which"),
    "a weight": ({"weight": 0}, {}, "line 1 has weight, by which"),
    "tools": ({"tools": TOOLS}, {}, "has tools, and the chat template doesn't print it"),
}


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("kind", BESIDE)
def test_what_would_be_left_out_is_refused(tmp_path: Path, kind: str, marked: bool) -> None:
    pytest.importorskip("transformers")
    of_line, of_message, reason = BESIDE[kind]
    chat = Chat(str(make_tokenizer(tmp_path / "a", GENERATION if marked else PLAIN)))
    line = {**talk("a", "an answer", "b", "c"), **of_line}
    line["messages"][1] |= of_message
    with pytest.raises(UnusableText) as refused:
        encoded(chat, line)
    assert reason in str(refused.value)
    assert str(refused.value).isprintable()


def test_speakers_with_names_of_their_own_are_taken(tmp_path: Path) -> None:
    """Of which `usr` would be a misspelt one."""
    pytest.importorskip("transformers")
    chat = Chat(str(make_tokenizer(tmp_path, PLAIN)))
    for who in ("user1", "critic"):
        line = {"messages": [{"role": who, "content": "a"}, {"role": "assistant", "content": "b"}]}
        ((tokens, _),) = encoded(chat, line)
        assert f"<|{who}|>\na" in chat.tokenizer.decode(tokens)


def test_what_means_nothing_or_is_printed_is_taken(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    thinks = PLAIN.replace("{{ message.content }}<", "{{ message.reasoning_content }}{{ message.content }}<")
    chat = Chat(str(make_tokenizer(tmp_path / "thinks", thinks.replace("{{ bos", "{{ tools }}{{ bos"))))
    line = talk("a", "an answer")
    expected = learned(chat, line)
    line |= {"id": 7, "weight": 1, "train": True, "system": "", "functions": [], "source": "somewhere"}
    line["messages"][1] |= {"id": "x", "weight": 1.0, "refusal": None, "annotations": [], "prefix": False}
    assert learned(chat, line) == expected
    line["messages"][1] |= {"reasoning_content": "so "}
    assert learned(chat, {**line, "tools": TOOLS}) == "so an answer<|end|>\n"


WITHIN = "{% generation %}{{ message.content }}<|end|>{% endgeneration %}\n"


@pytest.mark.parametrize(
    ("before", "around"),
    [
        ("{% macro turn(message) %}<|me|>AND{% endmacro %}", "{{ turn(message) }}"),
        ("{% macro turn() %}<|me|>{{ caller() }}{% endmacro %}", "{% call turn() %}AND{% endcall %}"),
        ("", "{% set turn %}<|me|>AND{% endset %}{{ turn }}"),
        ("", "{% filter replace('me', 'you') %}<|me|>AND{% endfilter %}"),
        ("", "<|me|>{% generation %}" + WITHIN + "{% endgeneration %}"),
        ("{# {% generation %} #}", "<|me|>AND"),
        ("{% raw %}{% generation %}{% endraw %}", "<|me|>AND"),
        ("{{ '{% generation %}' }}", "<|me|>AND"),
        ("    {% if true %}{% endif %}", "<|me|>AND"),
    ],
)
def test_a_mark_counts_where_its_text_is_printed(tmp_path: Path, before: str, around: str) -> None:
    """Transformers' own mask of these is at other places, but for the last ones."""
    pytest.importorskip("transformers")
    template = (before + TEMPLATE).replace("ANSWER", around).replace("AND", WITHIN)
    chat = Chat(str(make_tokenizer(tmp_path / "marked", template)))
    line = talk("a", " b c", "d", "e")
    ((tokens, _),) = encoded(chat, line)
    assert learned(chat, line).replace("\n", "") == " b c<|end|>e<|end|>"
    assert chat._tokenizer().apply_chat_template(line["messages"], return_dict=False) == tokens
    # A comment alone marks nothing, so answers are found without marks.
    plain = f"{{# {{% generation %}} #}}{PLAIN}"
    assert learned(Chat(str(make_tokenizer(tmp_path / "plain", plain))), talk("hello", "hi")) == "hi<|end|>\n"


SPLIT = "{{ message.content.split('</think>')[-1] }}"
THOUGHTS = ("<think>\nI add 0 to 0.\n</think>\n\nIt is 0.", "<think>I add 0 to 0.</think>It is 0.")


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("content", THOUGHTS)
def test_a_piece_of_a_content_that_a_template_cuts_off_is_refused(tmp_path: Path, content: str, marked: bool) -> None:
    """As the first template of R1's distilled models does with thoughts: a model would learn not to have any."""
    pytest.importorskip("transformers")
    cuts = (GENERATION if marked else PLAIN).replace("{{ message.content }}", SPLIT)
    chat = Chat(str(make_tokenizer(tmp_path / "cuts", cuts)))
    assert learned(chat, talk("What is 0 + 0?", "It is 0.")) == "It is 0.<|end|>\n"
    for line in (talk("What is 0 + 0?", content), talk("What?", content, "So?", "Yes.")):
        with pytest.raises(
            UnusableText, match=r"its message 2 \(assistant\) has 'I add 0 to 0.', and the chat template"
        ):
            encoded(chat, line)


@pytest.mark.parametrize("content", THOUGHTS)
def test_thoughts_of_earlier_answers_may_be_left_out(tmp_path: Path, content: str) -> None:
    """As Qwen 3's template does: a model that goes on doesn't see them either."""
    pytest.importorskip("transformers")
    last = "{{ message.content if loop.last else message.content.split('</think>')[-1] }}"
    chat = Chat(str(make_tokenizer(tmp_path / "last", GENERATION.replace("{{ message.content }}<", f"{last}<"))))
    expected = content.split("</think>")[-1] + "<|end|>" + content + "<|end|>"
    assert learned(chat, talk("a", content, "b", content)).replace("<|end|>\n", "<|end|>") == expected


def test_thoughts_in_a_field_of_their_own_may_be_those_of_an_earlier_answer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    last = "{{ message.reasoning_content if loop.last }}{{ message.content }}<"
    chat = Chat(str(make_tokenizer(tmp_path / "last", GENERATION.replace("{{ message.content }}<", last))))
    line = talk("a", "b", "c", "d")
    line["messages"][1]["reasoning_content"] = "so "
    assert learned(chat, line) == "b<|end|>\nd<|end|>\n"


def test_what_is_left_out_everywhere_is_refused_beside_thoughts_that_may_be(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    shown = (
        "{% set said = message.content.replace('SECRET', '') %}{{ said if loop.last else said.split('</think>')[-1] }}"
    )
    chat = Chat(str(make_tokenizer(tmp_path / "a", GENERATION.replace("{{ message.content }}<", f"{shown}<"))))
    with pytest.raises(UnusableText, match=r"its message 2 \(assistant\) has 'SECRET', and the chat template doesn't"):
        encoded(chat, talk("a", "<think>x y</think>\nb\nSECRET", "c", "d"))


FIRST = "{{ message.content if message.content is string else message.content[0].text }}"


@pytest.mark.parametrize("marked", [False, True])
def test_all_parts_of_a_content_are_printed_or_it_is_refused(tmp_path: Path, marked: bool) -> None:
    """Gemma 3's template prints the first part of a system's alone."""
    pytest.importorskip("transformers")
    parts = [{"type": "text", "text": text} for text in ("row 0", "and more")]
    template = GENERATION if marked else PLAIN
    chat = Chat(str(make_tokenizer(tmp_path / "text", template.replace("{{ message.content }}", FIRST))))
    for one in (parts[:1], parts):  # which of them comes first doesn't decide
        assert learned(chat, talk("a", one)) == "\n".join(part["text"] for part in one) + "<|end|>\n"
    first = template.replace("{{ message.content }}", "{{ message.content[0].text }}")
    chat = Chat(str(make_tokenizer(tmp_path / "first", first)))
    assert learned(chat, talk(parts[:1], parts[:1])) == "row 0<|end|>\n"
    with pytest.raises(
        UnusableText, match=r"its message 2 \(assistant\) has 'and more', and the chat template doesn't"
    ):
        encoded(chat, talk(parts[:1], parts))


@pytest.mark.parametrize("marked", [False, True])
def test_each_call_and_each_tool_is_printed_or_refused(tmp_path: Path, marked: bool) -> None:
    pytest.importorskip("transformers")
    one = "{% for tool in (tools or [])[:1] %}{{ tool.function.name }};{% endfor %}" + (GENERATION if marked else PLAIN)
    call = "{% for call in (message.tool_calls or [])[:1] %}{{ call.function.name }}{% endfor %}<"
    chat = Chat(str(make_tokenizer(tmp_path / "one", one.replace("{{ message.content }}<", call))))
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in ("weather", "time")]
    line = talk("", "")
    line["messages"][1] |= {"tool_calls": calls[:1]}
    assert learned(chat, {**line, "tools": TOOLS}) == "weather<|end|>\n"
    more = [*TOOLS, {"type": "function", "function": {"name": "we"}}]  # which the text holds as a part of weather
    for _ in range(2):  # each conversation that has them
        with pytest.raises(UnusableText, match="has tools, and the chat template doesn't print it"):
            encoded(chat, {**line, "tools": more})
    with pytest.raises(UnusableText, match="its message 2 has tool_calls that are no list of objects"):
        encoded(chat, {"messages": [*line["messages"][:1], {**line["messages"][1], "tool_calls": calls[0]}]})
    line["messages"][1] |= {"tool_calls": calls}
    with pytest.raises(UnusableText, match=r"message 2 \(assistant\) has tool_calls, and the chat template doesn't"):
        encoded(chat, line)


def test_an_answer_that_has_thoughts_as_the_last_alone_is_found_without_marks(tmp_path: Path) -> None:
    """As Qwen 3's template writes them: an empty thought before the last answer, and none before earlier ones."""
    pytest.importorskip("transformers")
    shown = "{{ '<think>\\n\\n</think>\\n\\n' if loop.last }}{{ message.content.split('</think>')[-1] }}<"
    line = talk("a", "<think>x y</think>\nb\n<x>", "c", "d > e")
    found = []
    for name, answer in (("plain", ANSWER), ("marked", MARKED)):
        template = TEMPLATE.replace("ANSWER", answer.replace("{{ message.content }}<", shown))
        chat = Chat(str(make_tokenizer(tmp_path / name, template)))
        with pytest.raises(UnusableText, match=r"its message 2 \(assistant\) has 'x y', and the chat template doesn't"):
            encoded(chat, line)  # this one prints them nowhere
        found.append(learned(chat, talk("a", "b\n<x>", "c", "d > e")))
    assert found == ["b\n<x><|end|>\n<think>\n\n</think>\n\nd > e<|end|>\n"] * 2


def test_a_line_end_behind_an_answer_is_not_taken_for_one(tmp_path: Path) -> None:
    """An earlier answer begins with a line end, and the last one with thoughts and without blanks."""
    pytest.importorskip("transformers")
    shown = "{{ '<think></think>' + message.content | trim if loop.last else '\\n' + message.content }}<"
    template = TEMPLATE.replace("ANSWER", ANSWER.replace("{{ message.content }}<", shown))
    chat = Chat(str(make_tokenizer(tmp_path / "a", template)))
    with pytest.raises(UnusableText, match="shows message 2, or those before it, differently when more follows"):
        encoded(chat, talk("a", "b ", "c", "d"))


def test_an_empty_answer_is_named_where_the_template_shows_it_in_another_way(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    template = PLAIN.replace("<|{{ message.role }}|>\n", "<|{{ message.role }}|>{{ '\n' if message.content }}")
    chat = Chat(str(make_tokenizer(tmp_path / "a", template)))
    empty = "found; it has no content: leave the conversation out, or mark answers in the template"
    with pytest.raises(UnusableText, match=f"shows message 2, .*{empty}"):
        encoded(chat, talk("a", ""))


def test_the_flag_for_developers_is_named_where_the_template_leaves_them_out(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    template = PLAIN.replace("in messages %}", "in messages if message.role != 'developer' %}")
    folder = str(make_tokenizer(tmp_path / "a", template))
    line = {"messages": [{"role": "developer", "content": "be"}, *talk("a", "b")["messages"]]}
    with pytest.raises(UnusableText, match=r"doesn't print it; give .* or add --chat-fields system-role=developer$"):
        encoded(Chat(folder), line)
    as_system = {"messages": [{"role": "system", "content": "be"}, *line["messages"][1:]]}
    assert encoded(Chat(folder, {"system-role": "developer"}), line) == encoded(Chat(folder), as_system)
