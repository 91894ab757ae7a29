"""The forms in which conversations are published: each is read as the messages that it means, or refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fsdp2.config import parse
from fsdp2.data.errors import UnusableText
from fsdp2.options.errors import ConfigError
from fsdp2.run.preflight import check_data
from fsdp2_extra.text import mixture, text
from fsdp2_extra.text.chat import Chat
from fsdp2_extra.text.forms import fields_of
from fsdp2_extra.text.messages import conversation
from fsdp2_extra.text.reading import rows_of
from fsdp2_extra.text.rows import Row
from fsdp2_tools.data import __main__ as command
from tests.harness import Ranks, losses, main_in_ranks, of_kind, refusal_in_ranks
from tests.hostile.common import one_line
from tests.test_chat import PLAIN, make_tokenizer, talk
from tests.test_published import _fresh as _fresh
from tests.test_published import contents, write
from tests.test_text import LLAMA, documents


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[number % 2], "value": one} for number, one in enumerate(contents)]


QUESTION = "prompt=question,completion=answer"
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
    (tmp_path / "a.json").write_text(json.dumps(given * 10, indent=1))
    assert contents(f"chat:{tmp_path / 'a.json'}", tokenizer) == expected
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
        for rows in (
            list(rows_of(text.found(name.removeprefix("chat:"), (".jsonl", ".parquet"))[0], {})) for name in wide
        )
    )
    assert ours == theirs


CALL = {"name": "f", "arguments": {"x": [1]}}
TWO = [CALL, {"name": "g", "arguments": "{}"}]


def test_a_turn_of_calls_is_an_answer_with_calls(tmp_path: Path) -> None:
    """LLaMA-Factory's: its text would be learned as a text, whatever the template has for calls."""
    pytest.importorskip("transformers")
    template = PLAIN.replace(
        "{{ message.content }}<",
        "{{ message.content }}{% if message.tool_calls %}CALLS {{ message.tool_calls | tojson }}{% endif %}<",
    )
    tokenizer = str(make_tokenizer(tmp_path / "tokenizer", template))
    asked, end, more = turns("a", "b", "c")
    first, *others = talk("a", "b", "c")["messages"]
    for calls, said in (([CALL], json.dumps(CALL)), (TWO, json.dumps(TWO))):
        theirs = [{"from": "function_call", "value": said}, {"from": "observation", "value": "r"}]
        answer = {"role": "assistant", "tool_calls": [{"type": "function", "function": one} for one in calls]}
        given = {"conversations": [asked, *theirs, end, more]}
        wanted = {"messages": [first, answer, {"role": "tool", "content": "r"}, *others]}
        ours, same = (
            [one.tolist() for one in pair]
            for line in (given, wanted)
            for pair in Chat(tokenizer).encode([Row(line, "line 1", 1)])
        )
        assert ours == same


@pytest.mark.parametrize("said", ["f(1)", '{"name": "f"}', "[]", "", "[1]"])
def test_a_turn_of_calls_that_holds_none_is_refused(said: str) -> None:
    given = {"conversations": [*turns("a"), {"from": "function_call", "value": said}]}
    with pytest.raises(UnusableText, match=r"line 1: has a turn from function_call that (is no call|can't be read)"):
        conversation(Row(given, "line 1", 1), "conversations", {})
    with pytest.raises(UnusableText, match="from function_call that"):
        conversation(Row(given, "line 1", 1), "conversations", {"assistant": "function_call"})


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


QUESTIONS = [{"question": one, "answer": one[::-1], "from": 5} for one in documents(60)]
ANSWERS = [talk(one, one[::-1]) for one in documents(60)]
TOOLS = [{"function": {"name": "f"}}]
WHO = ("context", "customer", "agent")
NAMED: dict[str, tuple[str, list[Any], list[Any]]] = {
    "prompt and completion": (QUESTION, QUESTIONS, ANSWERS),
    "before its own name": (
        QUESTION,
        [{**one, "messages": talk("x", "y")["messages"], "prompt": "z"} for one in QUESTIONS],
        ANSWERS,
    ),
    "messages": (
        "messages=dialog,role=who,content=said,user=customer,assistant=agent,system=setting",
        [
            {"dialog": [{"who": "customer", "said": one}, {"who": "agent", "said": one[::-1]}], "setting": "be"}
            for one in documents(60)
        ],
        [{"messages": [SYSTEM, *one["messages"]]} for one in ANSWERS],
    ),
    "a system turn": (
        "messages=dialog,role=who,content=said,user=customer,assistant=agent,system-role=context",
        [
            {"dialog": [{"who": who, "said": said} for who, said in zip(WHO, ("be", one, one[::-1]), strict=True)]}
            for one in documents(60)
        ],
        [{"messages": [SYSTEM, *one["messages"]]} for one in ANSWERS],
    ),
    "ShareGPT's, by their names": (
        "messages=conversations,role=from,content=value",
        [{"conversations": turns(one, one[::-1])} for one in documents(60)],
        ANSWERS,
    ),
    "a role alone": (
        "assistant=gpt",
        [{"messages": [one["messages"][0], {**one["messages"][1], "role": "gpt"}]} for one in ANSWERS],
        ANSWERS,
    ),
    "one of several": (
        "input=context",
        [{"instruction": one, "context": "d", "output": one[::-1]} for one in documents(60)],
        [talk(f"{one}\n\nd", one[::-1]) for one in documents(60)],
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_fields_of_other_names_are_those_that_are_named(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    fields, given, wanted = NAMED[name]
    tokenizer = str(make_tokenizer(tmp_path / "tokenizer", PLAIN))
    reading = {"tokenizer": tokenizer}
    load = partial(mixture.load, seq_len=64, vocab_size=300, apart=True)
    expected = load(f"chat:{write(tmp_path / 'wanted.jsonl', wanted)}", reading=reading)
    for kind in ("chat:{}/a.jsonl", "chat:{}/a.parquet", "datasets:{}/a.parquet"):
        write(tmp_path / kind.rpartition("/")[2], given)
        found = load(kind.format(tmp_path), reading={**reading, "fields": fields})
        assert (found.train.content, found.test.content) == (expected.train.content, expected.test.content)


def test_each_source_of_a_mixture_may_have_fields_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokenizer = str(make_tokenizer(tmp_path / "tokenizer", PLAIN))
    (tmp_path / "b.txt").write_text("".join(documents(300)))
    write(tmp_path / "a.jsonl", QUESTIONS)
    write(tmp_path / "c.jsonl", ANSWERS)
    named = QUESTION
    name = f"chat:{tmp_path}/a.jsonl@1,text:{tmp_path}/b.txt@1"
    common = ["--model=llama", f"--tokenizer={tokenizer}", "--seq-len=64"]
    check_data(parse([*common, f"--dataset={name}", f"--chat-fields={named}"]))
    more = [*common, f"--dataset={name},chat:{tmp_path}/c.jsonl@1"]
    check_data(parse([*more, f"--chat-fields={named};;"]))
    for wrong, part in (
        (
            named,
            r"c.jsonl, line 1: has no field answer, which --chat-fields names \(each source's .*; it has messages$",
        ),
        (f"{named};", "is for 2 sources, of which 3 are given"),
        (f";{named};", "none for text:"),
    ):
        with pytest.raises(ConfigError, match=part):
            check_data(parse([*more, f"--chat-fields={wrong}"]))


def test_a_text_that_is_null_is_not_called_absent(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokenizer = str(make_tokenizer(tmp_path / "tokenizer", PLAIN))
    talk = [{"who": "user", "said": "a"}, {"who": "assistant", "said": None}]
    write(tmp_path / "a.jsonl", [{"dialog": talk}])
    named = "--chat-fields=messages=dialog,role=who,content=said"
    with pytest.raises(ConfigError, match=r"line 1: a message's said is null; give it a text, or leave the line out$"):
        check_data(parse(["--model=llama", f"--tokenizer={tokenizer}", f"--dataset=chat:{tmp_path}/a.jsonl", named]))


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ("prompt", "must be OURS=THEIRS,…, such as"),
        ("prompt=", "must be OURS=THEIRS"),
        ("ask=question", "ours are assistant, chosen, completion, "),
        ("prompt=a,prompt=b", "names prompt twice"),
        ("prompt=a,completion=a", "names a twice"),
        ("prompt=a,output=b", "names fields of several forms"),
        ("", "is empty"),
    ],
)
def test_fields_that_say_nothing_are_refused(fields: str, part: str) -> None:
    with pytest.raises(ConfigError, match=f"--chat-fields .*{part}") as caught:
        parse(["--model=llama", "--dataset=chat:a", f"--chat-fields={fields}"])
    one_line(caught.value, "--chat-fields")


@pytest.mark.parametrize("dataset", ["text:a", "source-text"])
def test_text_has_no_fields_of_conversations(dataset: str) -> None:
    with pytest.raises(ConfigError, match=r"--chat-fields with --dataset .* only chat: and datasets: have them"):
        parse(["--model=llama", f"--dataset={dataset}", "--chat-fields=prompt=a"])


def test_a_run_keeps_the_names_of_fields(ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are in config.json, in what is prepared and shown; a resume by other names is refused."""
    pytest.importorskip("transformers")
    tokenizer, place = make_tokenizer(tmp_path / "tokenizer", PLAIN), write(tmp_path / "a.jsonl", QUESTIONS)
    named = f"--chat-fields={QUESTION}"
    data = [f"--tokenizer={tokenizer}", "--seq-len=64"]
    assert command.cli(["show", "--model=llama", f"--dataset=chat:{place}", named, *data, "--samples=1"]) == 0
    said = "read: prompt as question, completion as answer, as conversations; "
    said += "--chat-fields completion=answer,prompt=question"
    assert said in capsys.readouterr().out.splitlines()
    line = [*LLAMA, *data, "--batch-size=2", "--checkpoint-every=2"]
    run = f"--run-dir={tmp_path}/run"
    whole = ranks.run(main_in_ranks, [*line, f"--dataset=chat:{place}", named, run])[0]
    assert len(losses(whole)) == 4
    flags = json.loads((tmp_path / "run" / "config.json").read_text())["flags"]
    assert flags["chat-fields"] == "completion=answer,prompt=question"
    rest = [*line, f"--resume={tmp_path}/run/checkpoints/step-00000002", f"--run-dir={tmp_path}/rest"]
    for found in ranks.run(
        refusal_in_ranks, [*rest, f"--dataset=chat:{place}", "--chat-fields=prompt=answer,completion=question"], ranks=1
    ):
        assert found.startswith(
            "--chat-fields completion=question,prompt=answer: the checkpoint to resume from was made with"
        )
    again = ranks.run(
        main_in_ranks, [*rest, f"--dataset=chat:{place}", "--chat-fields=completion=answer,prompt=question"]
    )[0]
    assert losses(again) == losses(whole)[2:]
    folder = tmp_path / "prepared"
    assert command.cli(["prepare", str(place), "--chat", named, f"--tokenizer={tokenizer}", f"--out={folder}"]) == 0
    assert (
        f"--dataset chat:{folder} --tokenizer {tokenizer} --chat-fields completion=answer,prompt=question"
        in capsys.readouterr().out
    )
    check_data(parse(["--model=llama", f"--dataset=chat:{folder}", *data, named]))
    with pytest.raises(
        ConfigError, match="--chat-fields off: was made with completion=answer,prompt=question; give that"
    ):
        check_data(parse(["--model=llama", f"--dataset=chat:{folder}", *data]))
    with pytest.raises(ConfigError, match="--chat-fields: only conversations have them; add --chat"):
        command.main(["prepare", str(place), named, f"--tokenizer={tokenizer}", f"--out={folder}2"])


@pytest.mark.parametrize(
    ("fields", "row", "part"),
    [
        (QUESTION, {"question": "a", "reply": "b"}, "line 1: has no field answer, .* it has question, reply"),
        (QUESTION, {"question": "a", "answer": None}, "line 1: its answer is null; leave that line out"),
        ("system=sytem", {"prompt": "a", "completion": "b"}, "no line has the field sytem, which --chat-fields names"),
        ("role=who", talk("a", "b"), "line 1: a message has no field who, which --chat-.* names; it has role, content"),
        ("content=said", talk("a", "b"), "line 1: a message has no field said"),
        ("user=guest", {"messages": [{"role": "client", "content": "a"}]}, "has a turn from 'client'; name it one of"),
        ("completion=answer", {"prompt": "a", "answer": 5}, "line 1: its answer must be a list"),
        ("output=answer", {"instruction": "a", "answer": 5}, "line 1: its answer is no text"),
    ],
)
def test_a_field_that_is_not_there_is_one_line(tmp_path: Path, fields: str, row: Any, part: str) -> None:
    pytest.importorskip("transformers")
    tokenizer, file = make_tokenizer(tmp_path / "tokenizer", PLAIN), tmp_path / "a.jsonl"
    file.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    line = ["--model=llama", f"--tokenizer={tokenizer}", f"--chat-fields={fields}"]
    with pytest.raises(ConfigError, match=part) as caught:
        check_data(parse([*line, f"--dataset=chat:{file}"]))
    one_line(caught.value, str(file))
    write(tmp_path / "a.parquet", [row, row])
    with pytest.raises(ConfigError) as caught:
        check_data(parse([*line, f"--dataset=datasets:{tmp_path}/a.parquet"]))
    one_line(caught.value, str(tmp_path))


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        (
            [talk("a", "b"), {"prompt": "a", "completion": "b"}],
            "line 2: has prompt, and the lines before it messages; make two files of them, and mix those: --dataset",
        ),
        (
            [{"question": "a"}],
            r'line 1: has no "messages": .*, conversations, .*; it has question; name them: --chat-',
        ),
        ([{"messages": None, "prompt": "a"}], r'line 1: has no "messages": .*; it has prompt; name them'),
        (
            [{"id": ["a"], "dialog": talk("a", "b")["messages"]}],
            r'line 1: has no "messages": .*; it has id, dialog; add --chat-fields messages=dialog$',
        ),
        (
            [{"messages": [{"role": "user"}]}],
            r"its message 1 \(user\) has no content; it has role; leave it out, or name",
        ),
        ([{"messages": [{"from": "human", "text": "a"}]}], r"its message 1 \(user\) has no content; it has text"),
        (
            [{"conversations": [{"from": "bard2", "value": "a"}]}],
            "line 1: has a turn from 'bard2'; name it one",
        ),
        (
            [{"conversations": [*turns("a"), {"from": "gpt", "value": "b", "weight": 0.5}]}],
            "its message 2 has weight, by which others learn less",
        ),
        ([{"instruction": "a", "output": 5}], "line 1: its output is no text"),
        ([{"instruction": "a", "output": "b", "history": [["c", "d"]]}], "line 1 has history, by which others"),
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


def test_the_fields_of_turns_are_named_in_a_refusal(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    chat = Chat(str(make_tokenizer(tmp_path / "tokenizer", PLAIN)), fields_of("messages=dialog"))
    turns = [{"who": "user", "said": "what is it"}, {"who": "assistant", "said": "a b"}]
    with pytest.raises(UnusableText, match=r"no role; it has who, said; add --chat-fields role=who,content=said$"):
        list(chat.encode([Row({"dialog": turns}, "a, line 1", 0)]))
    with pytest.raises(UnusableText, match="it has who, said, at; name them --chat-fields role="):
        list(chat.encode([Row({"dialog": [{**turns[0], "at": "x"}]}, "a, line 1", 0)]))
