"""Preference pairs: each form that people publish is the same two rows of tokens, or one line that names the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2.config import parse
from fsdp2.data.errors import UnusableText
from fsdp2.data.loader import Batches
from fsdp2.data.splits import IGNORED
from fsdp2.options.errors import ConfigError
from fsdp2.run.preflight import check_data
from fsdp2_extra.text import pairs
from fsdp2_extra.text.chat import open_chat
from fsdp2_extra.text.forms import fields_of
from fsdp2_extra.text.places import find
from fsdp2_extra.text.reading import rows_of
from fsdp2_extra.text.tokenizer_file import open_tokenizer, own_tokenizer
from fsdp2_tools.data import __main__ as command
from tests.hostile.common import one_line
from tests.test_chat import GENERATION, PLAIN, make_tokenizer, talk

TEXTS = {"prompt": "What is it?", "chosen": " a bird", "rejected": " a b"}


def load(folder: Path, *rows: Any, **more: Any) -> pairs.Pairs:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return pairs.load(str(file), own_tokenizer(folder), more.pop("length", 64), 300, **more)


def said(folder: Path, split: pairs.Pairs, index: int = 0) -> list[tuple[str, str]]:
    """The text of either row, and what of it is to be written."""
    tokenizer = open_tokenizer(own_tokenizer(folder))
    tokens, targets = split[index]
    for row, target in zip(tokens, targets, strict=True):
        assert torch.equal(row[target != IGNORED], target[target != IGNORED])
    learned = [row[row != IGNORED].tolist() for row in targets]
    ends = [int((row != IGNORED).nonzero().max()) + 1 for row in targets]
    return [
        (tokenizer.decode(row[:end].tolist()), tokenizer.decode(own))
        for row, end, own in zip(tokens, ends, learned, strict=True)
    ]


@pytest.mark.parametrize("implicit", [False, True])
def test_texts_are_a_question_and_two_answers(tmp_path: Path, implicit: bool) -> None:
    pytest.importorskip("transformers")
    make_tokenizer(tmp_path, PLAIN, "<s>")
    row = {"prompt": "What is it?", "chosen": " a bird", "rejected": " cats"}
    if implicit:
        row = {answer: row["prompt"] + row[answer] for answer in pairs.ANSWERS}
    split = load(tmp_path, row, as_="text")
    assert split.about == "1 of 20 tokens each, 1 as raw texts, without a chat template"
    assert said(tmp_path, split) == [
        ("<s>What is it? a bird<|end|>", " a bird<|end|>"),
        ("<s>What is it? cats<|end|>", " cats<|end|>"),
    ]


def test_texts_go_through_the_template_as_in_training(tmp_path: Path) -> None:
    """A prompt and answers are what they are for `--dataset chat:`; two texts without a prompt are raw."""
    pytest.importorskip("transformers")
    make_tokenizer(tmp_path, PLAIN)
    row = {"prompt": "[a] b", "chosen": "[1]", "rejected": "cats", "system": "be"}
    split = load(tmp_path, row, {"chosen": "ab", "rejected": "ac"})
    asked = "<s><|system|>\nbe<|end|>\n<|user|>\n[a] b<|end|>\n<|assistant|>\n"
    assert said(tmp_path, split) == [(f"{asked}{one}<|end|>\n", f"{one}<|end|>\n") for one in ("[1]", "cats")]
    assert said(tmp_path, split, 1)[0] == ("ab<|end|>", "b<|end|>")
    assert split.about.endswith("tokens, 1 through the chat template and 1 as raw texts, without a chat template")
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": "[a] b", "completion": "[1]", "system": "be"}) + "\n")
    chat = open_chat(str(tmp_path), fields_of(""))
    ((tokens, learn),) = chat.encode(list(rows_of(find(str(tmp_path / "one.jsonl"))[0], {})))
    ours, targets = split[0]
    assert ours[0, : len(tokens)].tolist() == tokens.tolist()
    assert (targets[0, : len(tokens)] != IGNORED).tolist() == (learn == 1).tolist()
    make_tokenizer(tmp_path, None)
    with pytest.raises(UnusableText, match="has no chat template"):
        load(tmp_path, TEXTS, as_="chat")
    with pytest.raises(UnusableText, match=r"line 1: the model has no chat template .*--pairs-as text") as caught:
        load(tmp_path, TEXTS)
    one_line(caught.value, str(tmp_path / "pairs.jsonl"))
    assert "1 as raw texts" in load(tmp_path, TEXTS, as_="text").about
    assert "1 as raw texts" in load(tmp_path, {"chosen": "ab", "rejected": "ac"}).about


def test_pairs_that_cannot_be_learned_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{**TEXTS, "prompt": chr(97 + n) * (80 if n in (1, 5) else 3)} for n in range(8)]
    rows[3]["rejected"] = rows[3]["chosen"]
    with pytest.raises(UnusableText, match=r"of 8 pairs 2 with more than 64 .* 1 with one answer .*lines 2, 4, 6\)"):
        load(tmp_path, *rows, as_="text")
    split = load(tmp_path, *rows, drop=True, as_="text")
    assert split.content == load(tmp_path, *(rows[n] for n in (0, 2, 4, 6, 7)), as_="text").content
    few = load(tmp_path, *rows, drop=True, as_="text").about
    assert few.startswith("5 of ")
    why = "2 with more than 64 tokens (none is cut) and 1 with one answer as chosen and rejected"
    assert few.endswith(f"left out by --bad-samples drop: {why}")
    with pytest.raises(UnusableText, match="drop leaves none of its pairs"):
        load(tmp_path, rows[1], drop=True, as_="text")


def test_pairs_that_cannot_be_read_are_counted_too(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    make_tokenizer(tmp_path, PLAIN)
    begins = {"prompt": "a", "chosen": [{"role": "assistant", "content": "b"}] * 2, "rejected": [{"role": "b"}]}
    good = {**TEXTS, "prompt": "ab"}
    rows = [{**TEXTS, "chosen": None}, TEXTS, begins, good, {"chosen": "ab", "rejected": "ac"}]
    with pytest.raises(UnusableText, match=r"of 5 pairs 2 that can't be read \(.*pairs.jsonl, lines 1, 3\)") as caught:
        load(tmp_path, *rows)
    first = "the first that can't be read: "
    one_line(caught.value, first, "line 1: its chosen is null; leave that line out", "--bad-samples drop")
    split = load(tmp_path, *rows, {**TEXTS, "chosen": "a" * 99}, drop=True)
    assert split.content == load(tmp_path, TEXTS, good, rows[4]).content
    ways = "2 through the chat template and 1 as raw texts, without a chat template"
    why = "1 with more than 64 tokens (none is cut) and 2 that can't be read"
    assert split.about.endswith(f"{ways}; left out by --bad-samples drop: {why}")
    most = "2 of 3 pairs can't be read, and so many aren't left out; the first: .*line 2: has no field chosen; add"
    with pytest.raises(UnusableText, match=most):
        load(tmp_path, TEXTS, *[{"good": "a", "bad": "b"}] * 2, drop=True)  # it isn't these lines' fault
    make_tokenizer(tmp_path, None)
    with pytest.raises(UnusableText, match="line 3: the model has no chat template"):
        load(tmp_path, rows[4], rows[4], TEXTS, drop=True)  # nor is it this one's


def test_bytes_are_tokens_where_a_model_has_none(tmp_path: Path) -> None:
    split = load(tmp_path, TEXTS, {**TEXTS, "prompt": "é"}, as_="text")
    assert said(tmp_path, split) == [("What is it? a bird", " a bird"), ("What is it? a b", " a b")]
    assert said(tmp_path, split, 1) == [("é a bird", " a bird"), ("é a b", " a b")]


ASKED, ANSWER, OTHER = talk("a", "b", "c")["messages"], talk("", "de")["messages"][1:], talk("", "df")["messages"][1:]
FORMS: dict[str, tuple[Any, dict[str, str]]] = {
    "a prompt of messages": ({"prompt": ASKED, "chosen": ANSWER, "rejected": OTHER}, {}),
    "none": ({"chosen": ASKED + ANSWER, "rejected": ASKED + OTHER}, {}),
    "UltraFeedback's": ({"prompt": "c", "chosen": ASKED + ANSWER, "rejected": ASKED + OTHER, "score_chosen": 1}, {}),
    "both": ({"prompt": ASKED, "chosen": ASKED + ANSWER, "rejected": ASKED + OTHER}, {}),
    "answers of text": ({"prompt": ASKED, "chosen": "de", "rejected": "df"}, {}),
    "JSON text": ({"chosen": json.dumps(ASKED + ANSWER), "rejected": json.dumps(ASKED + OTHER), "prompt": ASKED}, {}),
    "other names": (
        {"history": ASKED, "good": "de", "bad": "df"},
        {"prompt": "history", "chosen": "good", "rejected": "bad"},
    ),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("template", [PLAIN, GENERATION], ids=["plain", "marked"])
def test_messages_are_what_the_template_prints(tmp_path: Path, name: str, template: str) -> None:
    """Of the answers in them, the last counts, from its beginning: both have the others."""
    pytest.importorskip("transformers")
    make_tokenizer(tmp_path, template)
    row, fields = FORMS[name]
    before = "<s><|user|>\na<|end|>\n<|assistant|>\nb<|end|>\n<|user|>\nc<|end|>\n<|assistant|>\n"
    assert said(tmp_path, load(tmp_path, row, fields=fields)) == [
        (f"{before}de<|end|>\n", "de<|end|>\n"),
        (f"{before}df<|end|>\n", "df<|end|>\n"),
    ]


def test_a_text_beside_messages_may_begin_with_a_bracket(tmp_path: Path) -> None:
    """Only a list of objects is read as the JSON text of messages."""
    pytest.importorskip("transformers")
    make_tokenizer(tmp_path, PLAIN)
    question, answer = talk("[a] b", "[1, 2]")["messages"]
    one, other = load(tmp_path, {"prompt": "[a] b", "chosen": "[1, 2]", "rejected": OTHER}), {"rejected": OTHER}
    assert one.content == load(tmp_path, {"prompt": [question], "chosen": [answer], **other}).content


def test_pairs_of_another_trainer_by_the_names_of_their_fields(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    make_tokenizer(tmp_path, PLAIN)
    ask, good, bad = ({"from": who, "value": text} for who, text in (("human", "q"), ("gpt", "a"), ("gpt", "b")))
    named = fields_of("prompt=conversations,role=from,content=value,user=human,assistant=gpt")
    theirs = load(tmp_path, {"conversations": [ask], "chosen": good, "rejected": bad}, fields=named)
    assert theirs.content == load(tmp_path, {"prompt": "q", "chosen": "a", "rejected": "b"}).content
    file = tmp_path / "theirs.jsonl"
    file.write_text(json.dumps({"conversations": [ask], "chosen": good, "rejected": bad}) + "\n")
    with pytest.raises(ConfigError, match=r"line 1: has a chosen and a rejected answer; examples/dpo\.py learns from"):
        check_data(parse(["--model=llama", f"--dataset=chat:{file}", f"--tokenizer={tmp_path}"]))


def test_tables_hold_the_same_pairs(tmp_path: Path) -> None:
    library = pytest.importorskip("datasets")
    pytest.importorskip("transformers")
    make_tokenizer(tmp_path, PLAIN)
    rows = [{"chosen": talk(f"q{n}", f"a{n}")["messages"], "rejected": talk(f"q{n}", f"b{n}")["messages"], "id": n}
            for n in range(20)]  # fmt: skip
    wanted = load(tmp_path, *rows)
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    library.Dataset.from_list(rows).to_parquet(str(tmp_path / "pairs.parquet"))
    library.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for place in (
        "{}/pairs.parquet",
        "{}/pairs.json",
        "datasets:{}/pairs.parquet",
        "datasets:{}/pairs.json",
        "datasets:{}/saved",
    ):
        assert pairs.load(place.format(tmp_path), own_tokenizer(tmp_path), 64, 300).content == wanted.content


def test_their_order_is_one_on_any_number_of_ranks(tmp_path: Path) -> None:
    split = load(tmp_path, *({**TEXTS, "prompt": chr(97 + n)} for n in range(10)), as_="text")

    def order(world_size: int, position: int = 0) -> list[list[int]]:
        ranks = [
            Batches(
                split,
                global_batch=4,
                accumulation=1,
                seed=1,
                rank=rank,
                world_size=world_size,
                device=torch.device("cpu"),
            )
            for rank in range(world_size)
        ]
        for one in ranks:
            one.position = position
        steps = zip(*([next(step) for step in one] for one in ranks), strict=True)
        return [[int(row[0, 0]) for part in step if part.valid for row in part.inputs] for step in steps]

    whole = order(1)
    assert sorted(place for step in whole for place in step) == [97 + n for n in range(10)]
    assert whole == order(2) == order(3)
    assert order(2, 4) == whole[1:]


SAME = {**TEXTS, "rejected": TEXTS["chosen"]}


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ([TEXTS, {"q": "a", "chosen": "b"}], "line 2: has no field rejected; add --chat-fields rejected=NAME; it has "),
        ([{**TEXTS, "rejected": None}], "line 1: its rejected is null"),
        ([[1]], "line 1: has no field chosen; add --chat-fields chosen=NAME; it has none"),
        ([{"chosen": "a", "rejected": "b"}], "line 1: has no question, in prompt or as what both answers begin with"),
        ([{**TEXTS, "system": "be"}], "line 1: has system or tools, which texts don't show"),
        ([{**TEXTS, "chosen": talk("a", "b")["messages"]}], "line 1: the model has no chat template to print it"),
        ([talk("a", "b")], "line 1: has no field chosen; python -m fsdp2.train .* learns from conv.*, or add "),
        ([TEXTS, SAME, SAME], r"of 3 pairs 2 with one answer as chosen and rejected .*lines 2, 3.; leave them .*drop"),
        ([TEXTS, {**TEXTS, "chosen": ""}], r"of 2 pairs 1 with an answer without a token .*line 2."),
        ([{**TEXTS, "chosen": "a" * 64}], r"of 1 pairs 1 with more than 64 tokens \(none is cut\) .*line 1."),
        ([{**TEXTS, "weight": 0.1}], "line 1 has weight, by which others learn less of it"),
        ([], "holds no pairs; give lines with prompt"),
    ],
)  # fmt: skip
def test_what_is_no_pair_is_one_line(tmp_path: Path, rows: list[Any], part: str) -> None:
    with pytest.raises(UnusableText, match=part) as caught:
        load(tmp_path, *rows, as_="text")
    one_line(caught.value, str(tmp_path / "pairs.jsonl"))


def test_answers_to_different_questions_are_no_pair(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    make_tokenizer(tmp_path, PLAIN)
    one = {"chosen": talk("which", "a")["messages"], "rejected": talk("when", "b")["messages"]}
    with pytest.raises(UnusableText, match=r"of 2 pairs 1 with answers to different questions .*line 2"):
        load(tmp_path, {**TEXTS, "prompt": "a"}, one)
    longer = {"chosen": talk("which", "a", "so", "b")["messages"], "rejected": talk("which", "c")["messages"]}
    split = load(tmp_path, longer, {**longer, "rejected": talk("which", "a")["messages"]}, one, drop=True)
    assert len(split) == 2
    assert said(tmp_path, split)[0][1] == "a<|end|>\nb<|end|>\n"


def test_fields_that_nothing_reads_are_named(tmp_path: Path) -> None:
    split = load(tmp_path, TEXTS, {**TEXTS, "margin": 2, "images": []}, as_="text")
    assert split.about.endswith("; dropped: images, margin")
    assert "dropped" not in load(tmp_path, TEXTS, as_="text").about


def test_other_files_and_models_are_one_line(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    make_tokenizer(tmp_path, PLAIN)
    other = {"prompt": "x", "chosen": ASKED + ANSWER, "rejected": ASKED + OTHER}
    with pytest.raises(UnusableText, match="line 1: has a prompt that isn't in the messages of its answers; drop it"):
        load(tmp_path, other)
    with pytest.raises(UnusableText, match="its tokenizer has 252 tokens, and the model's vocabulary 64"):
        pairs.load(str(tmp_path / "pairs.jsonl"), own_tokenizer(tmp_path), 64, 64)
    with pytest.raises(UnusableText, match="line 1: its prompt must be a list; give"):
        load(tmp_path, {**TEXTS, "prompt": 5})
    load(tmp_path, {**TEXTS, "prompt": "a"})
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(UnusableText, match=r"a\.json: isn't of a type .*; give it alone, or as a source of its own"):
        pairs.load(f"{tmp_path}/a.json,{tmp_path}/pairs.jsonl", own_tokenizer(tmp_path), 64, 300)
    with pytest.raises(UnusableText, match=r"a\.json: its split train is empty"):
        pairs.load(str(tmp_path / "a.json"), own_tokenizer(tmp_path), 64, 300)
    line = ["--model=llama", f"--dataset=chat:{tmp_path}/pairs.jsonl", f"--tokenizer={tmp_path}"]
    with pytest.raises(ConfigError, match=r"line 1: has a chosen and a rejected answer; examples/dpo\.py learns from"):
        check_data(parse(line))


def test_show_prints_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    make_tokenizer(tmp_path, PLAIN)
    rows = [*({**TEXTS, "prompt": chr(97 + n)} for n in range(3)), {**TEXTS, "rejected": TEXTS["chosen"]}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = ["show", "--model=llama", f"--dataset=chat:{tmp_path}/pairs.jsonl", f"--tokenizer={tmp_path}", "--samples=2"]
    assert command.cli(line) == 2
    assert "of 4 pairs 1 with one answer as chosen and rejected" in capsys.readouterr().err
    assert command.cli([*line, "--bad-samples=drop"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("pairs: 3 of ")
    assert "3 through the chat template; left out by --bad-samples drop: 1 with one answer" in printed[0]
    assert printed[1] == "pair 1 of 3"
    assert "  chosen: " in printed[2]
    assert printed[2].endswith("a⟦ a bird⟧") or "⟦ a bird" in printed[2]
    assert "⟦ a b" in printed[3]
