"""Conversations: the model's own template, loss on answers alone, packed whole and kept apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F

from fsdp2.config import parse
from fsdp2.data.errors import UnusableText
from fsdp2.data.splits import IGNORED
from fsdp2.options.errors import ConfigError
from fsdp2.run.preflight import check_data
from fsdp2_extra.text import text
from fsdp2_extra.text.chat import Chat
from fsdp2_extra.text.rows import Row
from fsdp2_extra.text.tokenizer_file import open_tokenizer
from fsdp2_extra.text.windows import Conversations
from tests.harness import Ranks, losses, main_in_ranks, of_kind

ANSWER = "{{ message.content }}<|end|>\n"
MARKED = "{% generation %}" + ANSWER + "{% endgeneration %}"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n"
    "{% if message.role == 'assistant' %}ANSWER{% else %}{{ message.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PLAIN, GENERATION = TEMPLATE.replace("ANSWER", ANSWER), TEMPLATE.replace("ANSWER", MARKED)


def make_tokenizer(folder: Path, template: str | None, begin: str = "") -> Path:
    """A folder with a byte-level tokenizer, whose offsets leave out spaces as Llama's do, and a template.

    Args:
        begin: what the post-processor puts before a text.
    """
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, processors

    letters = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(map(chr, range(245, 256))))  # bytes of no text
    merges = [("Ġ", "h"), ("b", "c")]
    names = [*letters, *map("".join, merges)]
    made = tokenizers.Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|user|>", "<|assistant|>", "<|end|>", "<|system|>", "<s>"])
    if begin:
        ids = [(begin, made.token_to_id(begin))]
        front = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=ids)
        made.post_processor = processors.Sequence([made.post_processor, front])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "bos_token": "<s>", **({} if template is None else {"chat_template": template})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def talk(*contents: Any) -> dict[str, Any]:
    """A conversation in which a user and an assistant take turns."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": one} for i, one in enumerate(contents)]}


def encoded(chat: Chat, *lines: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    rows = [Row(line, f"file, line {number}", 0) for number, line in enumerate(lines, 1)]
    return [(tokens.tolist(), learn.tolist()) for tokens, learn in chat.encode(rows)]


def learned(chat: Chat, line: dict[str, Any]) -> str:
    """What of a conversation is to be predicted."""
    ((tokens, learn),) = encoded(chat, line)
    return chat.tokenizer.decode([token for token, mark in zip(tokens, learn, strict=True) if mark])


TALKS = [
    talk("hello", "hi"),
    talk("a bc", "an answer\n", "and then?", " then é😀"),
    {"messages": [{"role": "system", "content": "be"}, *talk("kind", "\n\nyes ")["messages"]]},
]


def test_answers_are_learned_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    by_prefixes = Chat(str(make_tokenizer(tmp_path / "plain", PLAIN)))
    by_marks = Chat(str(make_tokenizer(tmp_path / "marked", GENERATION)))
    for chat in (by_prefixes, by_marks):
        assert [learned(chat, one) for one in TALKS] == [
            "hi<|end|>\n",
            "an answer\n<|end|>\n then é😀<|end|>\n",
            "\n\nyes <|end|>\n",
        ]
    assert encoded(by_prefixes, *TALKS) == encoded(by_marks, *TALKS)
    # The tokens are those that transformers gives to whoever asks the model afterwards.
    for (tokens, _), one in zip(encoded(by_marks, *TALKS), TALKS, strict=True):
        assert by_marks._tokenizer().apply_chat_template(one["messages"], return_dict=False) == tokens


def test_the_file_of_the_template_is_the_one_that_transformers_reads(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = make_tokenizer(tmp_path / "of-a-processor", PLAIN)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of a processor"}))
    chat = Chat(str(folder))
    assert chat.about["template"] == str(folder / "tokenizer_config.json")
    assert chat._tokenizer().chat_template == PLAIN
    (folder / "chat_template.jinja").write_text(GENERATION)
    chat = Chat(str(folder))
    assert chat.about["template"] == str(folder / "chat_template.jinja")
    assert chat._tokenizer().chat_template == GENERATION
    (bare := make_tokenizer(tmp_path / "bare", None)).joinpath("chat_template.json").write_text("{}")
    with pytest.raises(UnusableText, match="its tokenizer has no chat template"):
        Chat(str(bare))


def test_what_the_template_prints_begins_a_conversation_once(tmp_path: Path) -> None:
    """Whatever the tokenizer begins a text with: a model is asked by the template's tokens alone."""
    pytest.importorskip("transformers")
    bare = PLAIN.replace("{{ bos_token }}", "")
    for name, template, shown in (("prints", PLAIN, "<s>"), ("bare", bare, "")):
        folder = make_tokenizer(tmp_path / name, template, "<s>")
        assert open_tokenizer(str(folder)).begin
        chat = Chat(str(folder))
        ((tokens, _),) = encoded(chat, TALKS[0])
        assert chat.tokenizer.decode(tokens) == f"{shown}<|user|>\nhello<|end|>\n<|assistant|>\nhi<|end|>\n"
        assert chat._tokenizer().apply_chat_template(TALKS[0]["messages"], return_dict=False) == tokens


def test_a_template_prints_the_tokens_that_the_class_alone_knows(tmp_path: Path) -> None:
    """As GPT-2's folder, of which no file names its token, and Gemma's."""
    transformers = pytest.importorskip("transformers")
    for kind, template in (("plain", PLAIN), ("marked", GENERATION)):
        folder = make_tokenizer(tmp_path / kind, None)
        made = (folder / "tokenizer.json").read_text().replace('"<s>"', '"<|endoftext|>"')
        (folder / "tokenizer.json").write_text(made)
        settings = {"chat_template": template, "tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        ((tokens, _),) = encoded(Chat(str(folder)), TALKS[0])
        auto = transformers.AutoTokenizer.from_pretrained(folder)
        assert tokens == auto.apply_chat_template(TALKS[0]["messages"], return_dict=False)
        assert auto.decode(tokens[:1]) == "<|endoftext|>"
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "GemmaTokenizer"}))
        with pytest.raises(UnusableText, match=r"has <bos> as bos_token, and tokenizer\.json hasn't\); name what the"):
            encoded(Chat(str(folder)), TALKS[0])


@pytest.mark.parametrize("tag", ["{% generation %}", "{%- generation -%}", "{%generation%}", "{%+ generation +%}"])
def test_a_mark_is_found_however_its_blanks_are_written(tmp_path: Path, tag: str) -> None:
    pytest.importorskip("transformers")
    template = TEMPLATE.replace("ANSWER", tag + "{{ message.content }}{% endgeneration %}<|end|>\n")
    assert learned(Chat(str(make_tokenizer(tmp_path / "marked", template))), TALKS[0]) == "hi"


@pytest.mark.parametrize(
    ("form", "date"), [("%d %b %Y", "26 Jul 2024"), ("%B %-d, %Y", "July 26, 2024"), ("%e/%j%Z", "26/208")]
)
def test_a_template_that_names_the_date_gives_the_same_tokens_tomorrow(tmp_path: Path, form: str, date: str) -> None:
    pytest.importorskip("transformers")
    dated = f"  {{% if true %}}{{% endif %}}{{{{ strftime_now('{form}') }}}}\n{PLAIN}"
    chat = Chat(str(make_tokenizer(tmp_path / "dated", dated)))
    assert chat.about["day"] == "26 Jul 2024"
    ((tokens, _),) = encoded(chat, TALKS[0])
    assert chat.tokenizer.decode(tokens) == f"{date}\n<s><|user|>\nhello<|end|>\n<|assistant|>\nhi<|end|>\n"


FORGETS = (
    "{% for message in messages %}<|{{ message.role }}|>\n"
    "{{ message.content if loop.last else message.content | upper }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
NO_BORDER = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("template", "line", "part"),
    [
        (FORGETS, talk("a", "b"), "message 2, or those before it, differently"),
        (
            NO_BORDER,
            talk("a", "hello"),
            r"one token spans an answer and the text beside it.*ssistant: hello",
        ),
        (PLAIN, {"messages": [{"role": "assistant", "content": "a"}]}, "begins with an answer"),
        (PLAIN, {"text": "a"}, 'line 1: has no "messages".*it has text'),
        (PLAIN, {"messages": []}, "its messages must be a list; give"),
        (PLAIN, {"messages": [{"content": "a"}]}, "its message 1 has no role"),
        (
            PLAIN,
            {"messages": [*talk("a", "b")["messages"][:1], {"role": "assistant", "content": "b", "weight": 2}]},
            "its message 2 has weight, by which others learn less of it",
        ),
        (
            PLAIN,
            talk("a", [{"type": "text", "text": "b"}, {"type": "image_url", "image_url": {}}]),
            "line 1: its message 2 has a part that is no text .'image_url'.",
        ),
        (PLAIN, talk(["a"], "b"), "line 1: its message 1 has a part that is no text .'a'."),
        (PLAIN, talk([{"type": "text", "text": None}], "b"), "line 1: its message 1 has a part that is no text"),
        (PLAIN, {**talk("a", "b"), "tools": "[{"}, "line 1: has tools that can't be read as JSON .Expecting"),
        (PLAIN, {**talk("a", "b"), "tools": ["weather"]}, "line 1: has tools that can't be read as JSON .Expecting"),
        (PLAIN, {**talk("a", "b"), "tools": '{"name": "f"}'}, "line 1: has tools that are no list of objects"),
        (PLAIN, {**talk("a", "b"), "tools": [5]}, "line 1: has tools that are no list of objects"),
        (
            PLAIN,
            {**talk("a", "b"), "tools": "[" * 100_000},
            "line 1: has tools that can't be read as JSON .its lists are more",
        ),
        (
            PLAIN,
            {"messages": [*talk("a")["messages"], {"role": "assistant", "tool_calls": "f()"}]},
            "line 1: its message 2 has tool_calls that can't be read as JSON",
        ),
        ("{{ raise_exception('no such role') }}", talk("a", "b"), r"refuses it \(TemplateError: no such role"),
        ("{% for", talk("a", "b"), r"refuses it \(TemplateSyntaxError"),
        ("{{ ['', 'a'] | random }}" + GENERATION, talk("a", "b"), "line 1: the chat template draws text at random"),
        ("{{ lipsum(1) }}" + PLAIN, talk("a", "b"), "line 1: the chat template draws text at random"),
        (
            TEMPLATE.replace("ANSWER", "{% set a %}" + MARKED + "{% endset %}{{ a[:4] }}<|end|>"),
            talk("a", "b"),
            "line 1: the chat template changes what it has marked",
        ),
    ],
)
def test_what_cannot_be_learned_soundly_is_refused(
    tmp_path: Path, template: str, line: dict[str, Any], part: str
) -> None:
    pytest.importorskip("transformers")
    chat = Chat(str(make_tokenizer(tmp_path / "tokenizer", template)))
    with pytest.raises(UnusableText, match=part) as refused:
        encoded(chat, line)
    assert "\n" not in str(refused.value)


def test_windows_hold_whole_conversations() -> None:
    tokens = numpy.arange(10, 21, dtype=numpy.uint8)
    learn = numpy.array([1, 0, 1, 0, 1, 1, 0, 0, 1, 0, 1], dtype=numpy.uint8)
    ends, targets = numpy.array([3, 6, 9, 11]), numpy.array([1, 3, 4, 5])
    split = Conversations(tokens, learn, ends, targets, 4, apart=True)
    inputs, found = split.__getitems__([0, 1, 2, 3])
    assert inputs["input_ids"].tolist() == [[10, 11, 12, 0], [13, 14, 15, 0], [16, 17, 18, 0], [19, 20, 0, 0]]
    assert inputs["document_ids"].tolist() == [[0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 1, 1]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 0], [0, 1, 2, 0], [0, 1, 0, 1]]
    no = IGNORED
    assert found.tolist() == [[no, 12, no, no], [14, 15, no, no], [no, 18, no, no], [20, no, no, no]]
    two = Conversations(tokens, learn, ends, targets, 6, apart=True)
    inputs, found = two.__getitems__([1, 0])
    assert inputs["input_ids"].tolist() == [[16, 17, 18, 19, 20, 0], [10, 11, 12, 13, 14, 15]]
    assert inputs["document_ids"].tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 0, 1, 1, 1]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 0, 1, 2]]
    assert found.tolist() == [[no, 18, no, 20, no, no], [no, 12, no, 14, 15, no]]
    for one in (split, two):
        for rows in ([0], [1], [1, 0]):
            assert one.target_count(rows) == int((one.__getitems__(rows)[1] != no).sum())
    together, other = Conversations(tokens, learn, ends, targets, 6, apart=False).__getitems__([1, 0])
    assert torch.equal(together, inputs["input_ids"])
    assert torch.equal(other, found)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Conversations of unequal lengths, and a tokenizer beside them."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_tokenizer(tmp_path / "tokenizer", PLAIN)
    file = tmp_path / "some.jsonl"
    words = ["ab", "what is it", "go", "yes", "no, never", "it is so"]
    talks = [talk(*(words[(i * j + j) % 6] * (1 + i % 2) for j in range(1, 3 + 2 * (i % 2)))) for i in range(90)]
    file.write_text("".join(json.dumps(one) + "\n" for one in talks))
    return file


LLAMA = [
    *("--model=llama", "--seq-len=96", "--max-steps=4", "--threads=1", "--device=cpu"),
    *("--test-batch-size=64", "--seed=3"),
]


def _runs_of(corpus: str, folder: str, batch: int) -> tuple[list[float], list[float], dict[str, Any], list[str]]:
    flags = [*LLAMA, f"--dataset=chat:{corpus}", f"--tokenizer={Path(corpus).parent}/tokenizer"]
    flags += [f"--batch-size={batch}", "--checkpoint-every=2"]
    whole = main_in_ranks([*flags, f"--run-dir={folder}/whole"])
    resumed = [f"--resume={folder}/whole/checkpoints/step-00000002", f"--run-dir={folder}/rest"]
    rest = losses(main_in_ranks([*flags, *resumed]))
    return losses(whole), rest, of_kind(whole, "eval")[0], of_kind(whole, "start")[0]["header"]


def _by_hand(corpus: str) -> list[float]:
    """The same training in one process by a plain loop, a conversation at a time: none sees another."""
    from fsdp2.data.sampler import epoch_order
    from fsdp2.models.initial import reset_parameters

    config = parse(LLAMA)
    model = config.spec.build("debug")
    reset_parameters(model, config.spec.initial_values, config.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    split = _splits(corpus, 96)[0]
    order, found = epoch_order(len(split), config.seed, 0), []
    for step in range(4):
        total, count = torch.zeros(()), 0
        for window in order[6 * step : 6 * step + 6].tolist():
            for number in range(split.first[window], split.first[window + 1]):
                place = slice(split.ends[number], split.ends[number + 1])
                tokens = torch.from_numpy(split.tokens[place].astype(numpy.int64))
                learn = torch.from_numpy(split.learn[place] != 0)[1:]
                logits = model(tokens[None, :-1])[0]
                total = total + F.cross_entropy(logits[learn], tokens[1:][learn], reduction="sum")
                count += int(learn.sum())
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((total / count).item())
    return found


def _splits(corpus: str, seq_len: int) -> list[Any]:
    chat = Chat(str(Path(corpus).parent / "tokenizer"))
    dataset = text.load(corpus, seq_len, 256, chat, apart=True)
    return [dataset.train, dataset.test]


def test_the_loss_is_the_mean_over_the_tokens_of_answers(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    train, test = _splits(str(corpus), 96)
    assert len({train.target_count([row]) for row in range(len(train))}) > 3  # ranks with unequal numbers of targets
    wanted = _by_hand(str(corpus))
    whole, rest, evaluation, header = ranks.run(_runs_of, str(corpus), str(tmp_path), 3)[0]
    assert rest == whole[2:]
    # Sums are rounded in another order than in one process, and without empty places.
    assert whole == pytest.approx(wanted, rel=1e-5)
    assert evaluation["count"] == test.target_count(range(len(test)))
    share = train.target_count(range(len(train))) / len(train.tokens)
    assert any(line.startswith(f"learned: {share:.1%} of {len(train.tokens):,} tokens") for line in header)


def test_a_conversation_is_never_cut(corpus: Path) -> None:
    with pytest.raises(UnusableText, match=r"of 90 conversations \d+ longer than --seq-len 40 \(none is cut\).* to 61"):
        _splits(str(corpus), 40)
    train, test = _splits(str(corpus), 61)
    assert len(train.ends) + len(test.ends) == 92  # with the beginnings
    corpus.write_text(json.dumps(talk("a", "b")) + "\n")
    with pytest.raises(UnusableText, match=r"jsonl: holds one conversation; give at least two"):
        _splits(str(corpus), 61)
    corpus.write_text((json.dumps(talk("a", "b")) + "\n") * 5)  # all of one split
    assert [len(split.ends) - 1 for split in _splits(str(corpus), 61)] == [4, 1]
    assert [int(split.targets[-1]) for split in _splits(str(corpus), 61)] == [12, 3]


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--dataset=chat:{folder}/nothing* --tokenizer={folder}/tokenizer", "there is no file of text"),
        (
            "--dataset=chat:{folder}/other.txt --tokenizer={folder}/tokenizer",
            r"isn't of a type that is read here: \.jsonl",
        ),
        ("--dataset=chat:{corpus}", "bytes: has no tokenizer.json and chat template"),
        ("--dataset=chat:{folder}/br[1].JSONL --tokenizer={folder}/tokenizer", r"br\[1\]\.JSONL, line 1: has no"),
        ("--dataset=chat:{corpus} --tokenizer={folder}/bare", "its tokenizer has no chat template"),
        (
            "--dataset=chat:{corpus} --tokenizer={folder}/tokenizer --text-field=body",
            "only text and tables have fields; drop it",
        ),
        ("--dataset=chat:", "names no file; give chat:PATH"),
        ("--dataset=chat:{corpus} --model=vit", "the model takes image data"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_read(corpus: Path, flags: str, part: str) -> None:
    (corpus.parent / "other.txt").write_text("a")
    (corpus.parent / "br[1].JSONL").write_text("\ufeff{}\n")
    make_tokenizer(corpus.parent / "bare", None)
    with pytest.raises(ConfigError, match=part):
        check_data(parse(["--model=llama", *flags.format(folder=corpus.parent, corpus=corpus).split()]))
