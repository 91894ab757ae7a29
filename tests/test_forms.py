"""The forms in which conversations are published: each is read as the messages that it means, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.run.preflight import check_data
from fsdp2_extra.text import text
from fsdp2_extra.text.chat import Chat
from fsdp2_extra.text.reading import rows_of
from fsdp2_tools.data import __main__ as command
from tests.harness import Ranks, losses, main_in_ranks, of_kind
from tests.hostile.common import one_line
from tests.test_chat import PLAIN, make_tokenizer, talk
from tests.test_published import _fresh as _fresh
from tests.test_published import contents, write
from tests.test_text import LLAMA, documents


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[number % 2], "value": one} for number, one in enumerate(contents)]


SYSTEM = {"role": "system", "content": "be"}
FORMS: dict[str, tuple[list[Any], list[Any]]] = {
    "messages": ([talk("a", "b"), talk("c", "d", "e", "f")],) * 2,
    "conversations": (
        [
            {"id": "1", "conversations": turns("a", "b")},
            {"id": "2", "conversations": [{"from": "system", "value": "be"}, *turns("c", "d", "e", "f")]},
        ],
        [talk("a", "b"), {"messages": [SYSTEM, *talk("c", "d", "e", "f")["messages"]]}],
    ),
    "instruction": (
        [
            {"instruction": "a", "input": "", "output": "b", "text": "a b"},
            {"instruction": "c", "input": "d", "output": "e", "text": "c d e"},
        ],
        [talk("a", "b"), talk("c\n\nd", "e")],
    ),
    "prompt": (
        [{"prompt": "a", "completion": "b", "system": "be"}, {"prompt": "c", "completion": "d", "system": None}],
        [{"messages": [SYSTEM, *talk("a", "b")["messages"]]}, talk("c", "d")],
    ),
    "prompt, of messages": (
        [{"prompt": talk("a")["messages"], "completion": [{"role": "assistant", "content": "b"}]}] * 2,
        [talk("a", "b")] * 2,
    ),
    "messages as text": ([{"messages": json.dumps(talk("a", "b")["messages"])}] * 2, [talk("a", "b")] * 2),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_of_conversations_is_that_of_messages(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    given, wanted = FORMS[name]
    tokenizer = str(make_tokenizer(tmp_path / "tokenizer", PLAIN))
    expected = contents(f"chat:{write(tmp_path / 'wanted.jsonl', wanted * 10)}", tokenizer)
    for file in ("a.jsonl", "a.parquet"):
        place = write(tmp_path / file, given * 10)
        assert contents(f"chat:{place}", tokenizer) == expected
    assert contents(f"datasets:{place}", tokenizer) == expected


def test_calls_of_many_forms_come_through_the_library(tmp_path: Path) -> None:
    """A table has one type for a column; the library makes JSON text of what has several."""
    pytest.importorskip("transformers")
    template = PLAIN.replace("{{ message.content }}<", "{{ message.content }}{{ message.tool_calls | tojson }}<")
    tokenizer = str(make_tokenizer(tmp_path / "tokenizer", template))
    given = [talk("a", "b") for _ in range(20)]
    for number, line in enumerate(given):
        arguments: Any = {"x": number} if number % 2 else {"y": {"z": ["a"]}}
        for message in line["messages"]:
            message["tool_calls"] = [{"function": {"name": "f", "arguments": arguments}}]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in given))
    wide = [name.replace(":", f":{file}") for name in ("chat:", "datasets:")]
    ours, theirs = (
        [(found.tolist(), learn.tolist()) for found, learn in Chat(tokenizer).encode(rows)]
        for rows in (list(rows_of(text.found(name.removeprefix("chat:"), Chat(tokenizer))[0], None)) for name in wide)
    )
    assert ours == theirs


def test_a_run_on_conversations_says_what_it_reads(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    tokenizer = make_tokenizer(tmp_path / "tokenizer", PLAIN)
    place = write(tmp_path / "a.parquet", [{"conversations": turns(one, one[::-1])} for one in documents(60)])
    said = "read: conversations, with from as the role and value as the content, as conversations"
    line = ["--model=llama", f"--dataset=datasets:{place}", f"--tokenizer={tokenizer}", "--seq-len=64"]
    assert command.cli(["show", *line, "--samples=1"]) == 0
    assert said in capsys.readouterr().out.splitlines()
    with pytest.raises(ConfigError, match=r"--bos never: the chat template begins a conversation"):
        check_data(parse([*line, "--bos=never"]))
    line = [*LLAMA, *line[1:], "--batch-size=2", f"--run-dir={tmp_path}/run"]
    events = ranks.run(main_in_ranks, line)[0]
    assert len(losses(events)) == 4
    assert said in of_kind(events, "start")[0]["header"]


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ([talk("a", "b"), {"prompt": "a", "completion": "b"}], "line 2: has prompt, and the lines before it messages"),
        ([{"question": "a"}], r'line 1: has no "messages": .*, conversations, .*; it has question'),
        (
            [{"conversations": [{"from": "bard2", "value": "a"}]}],
            "line 1: has a turn from 'bard2'; name it one",
        ),
        (
            [{"conversations": [*turns("a"), {"from": "gpt", "value": "b", "weight": 0}]}],
            "its message 2 has weight, by which others learn less",
        ),
        ([{"instruction": "a", "output": 5}], "line 1: its output is no text"),
        ([{"instruction": "a", "output": "b", "history": [["c", "d"]]}], "line 1 has history, by which others"),
        ([{"prompt": talk("a", "b")["messages"], "completion": "c"}], "line 1: its prompt has an answer"),
        ([{"messages": "[{"}], "line 1: its messages are a text that can't be read as JSON"),
    ],
)
def test_a_conversation_of_no_form_is_one_line(tmp_path: Path, rows: list[Any], part: str) -> None:
    pytest.importorskip("transformers")
    tokenizer = make_tokenizer(tmp_path / "tokenizer", PLAIN)
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=part) as caught:
        check_data(parse(["--model=llama", f"--dataset=chat:{file}", f"--tokenizer={tokenizer}"]))
    one_line(caught.value, str(file))
