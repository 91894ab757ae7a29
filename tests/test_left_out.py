"""What of conversations isn't learned: answers of no weight, and what a template would leave out in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp2.data.errors import UnusableText
from fsdp2_extra.text.chat import Chat
from fsdp2_extra.text.rows import Row
from tests.test_chat import GENERATION, PLAIN, TEMPLATE, encoded, learned, make_tokenizer, talk


@pytest.mark.parametrize("marked", [False, True])
def test_an_answer_of_no_weight_is_read_and_not_learned(tmp_path: Path, marked: bool) -> None:
    pytest.importorskip("transformers")
    chat = Chat(str(make_tokenizer(tmp_path / "a", GENERATION if marked else PLAIN)))
    line = talk("a", "one", "b", "two", "c", "three")
    ((whole, _),) = chat.encode([Row(line, "line 1", 0)])
    for key, none in [("weight", 0), ("train", False), ("weight", 0.0)]:
        some = talk("a", "one", "b", "two", "c", "three")
        some["messages"][3] |= {key: none}
        some["messages"][4] |= {key: none}  # a question's says nothing
        ((tokens, learn),) = chat.encode([Row(some, "line 1", 0)])
        assert (tokens == whole).all()
        assert chat.tokenizer.decode(tokens[learn != 0]) == "one<|end|>\nthree<|end|>\n"
    messages = line["messages"]
    two = Chat(str(tmp_path / "a"))
    ((tokens, learn),) = two.encode([Row({"prompt": messages[:5], "completion": messages[5:]}, "line 1", 0)])
    assert (tokens == whole).all()
    assert chat.tokenizer.decode(tokens[learn != 0]) == "three<|end|>\n"


PIECES = (  # as templates mark a content and each call by themselves
    "{% if message.content %}{% generation %}{{ message.content }}{% endgeneration %}{% endif %}"
    "{% for call in message.tool_calls or [] %}{% generation %}<{{ call.name }}>{% endgeneration %}{% endfor %}<|end|>"
)


@pytest.mark.parametrize("weight", [0, 1])
def test_of_an_answer_that_is_marked_in_pieces_all_or_none_is_learned(tmp_path: Path, weight: int) -> None:
    """One answer has two marks and another none: their number says nothing."""
    pytest.importorskip("transformers")
    chat = Chat(str(make_tokenizer(tmp_path / "a", TEMPLATE.replace("ANSWER", PIECES))))
    line = talk("a", "wrong", "b", "", "c", "right")
    line["messages"][1] |= {"weight": weight, "tool_calls": [{"name": "bad"}]}
    assert learned(chat, line) == ("right" if weight == 0 else "wrong<bad>right")


def test_marks_of_what_is_no_answer_have_no_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    begun = "{% generation %}{{ bos_token }}{% endgeneration %}"
    chat = Chat(str(make_tokenizer(tmp_path / "a", GENERATION.replace("{{ bos_token }}", begun))))
    line = talk("a", "one", "b", "two")
    line["messages"][1] |= {"weight": 0}
    with pytest.raises(UnusableText, match="has answers that aren't to be learned, and the chat template marks other"):
        encoded(chat, line)


def test_answers_in_another_order_have_no_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    chat = Chat(str(make_tokenizer(tmp_path / "a", GENERATION.replace("in messages", "in messages | reverse"))))
    line = talk("a", "one", "b", "two")
    line["messages"][1] |= {"weight": 0}
    with pytest.raises(UnusableText, match="has answers that aren't to be learned, and the chat template marks other"):
        encoded(chat, line)


def test_weights_go_with_templates_that_show_history_otherwise(tmp_path: Path) -> None:
    """Marks say where answers stand, also of a greeting."""
    pytest.importorskip("transformers")
    last = "{% if loop.last %}!{% endif %}{{ message.content }}<|end|>\n{% endif %}"
    template = GENERATION.replace("{{ message.content }}<|end|>\n{% endif %}", last)
    chat = Chat(str(make_tokenizer(tmp_path / "a", template)))
    line = talk("a", "one", "b", "two")
    line["messages"].insert(0, {"role": "assistant", "content": "hello", "weight": 0})
    assert learned(chat, line) == "one<|end|>\ntwo<|end|>\n"
    line["messages"][2] |= {"weight": 0}
    assert learned(chat, line) == "two<|end|>\n"


CUTS = [
    "[:5]",
    "[1:]",
    ".rstrip('t')",
    "[:-1]",
    " | truncate(12)",
    ".split('. ')[0]",
    ".split()[0:2] | join(' ')",
    "[4:]",
    ".split('. ')[-1]",
]


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_a_content_that_is_cut_is_refused(tmp_path: Path, cut: str, marked: bool) -> None:
    pytest.importorskip("transformers")
    template = (GENERATION if marked else PLAIN).replace("content }}<|end|>", f"content{cut} }}}}<|end|>", 1)
    chat = Chat(str(make_tokenizer(tmp_path / "a", template)))
    with pytest.raises(UnusableText, match=r"its message 2 .assistant. has .*, and the chat template doesn't print it"):
        encoded(chat, talk("what", "It is two. The cat sat on the mat"))


def test_a_text_without_spaces_that_is_cut_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    template = GENERATION.replace("content }}<|end|>", "content[:5] }}<|end|>", 1)
    with pytest.raises(UnusableText, match="and the chat template doesn't print it"):
        encoded(Chat(str(make_tokenizer(tmp_path / "a", template))), talk("what", "今天天气很好我们去"))


@pytest.mark.parametrize("change", ["| upper", "| replace('  ', ' ')", "| e", "| trim | tojson"])
def test_a_content_that_is_written_otherwise_is_taken(tmp_path: Path, change: str) -> None:
    pytest.importorskip("transformers")
    template = GENERATION.replace("{{ message.content }}<|end|>\n", f"{{{{ message.content {change} }}}}<|end|>\n", 1)
    chat = Chat(str(make_tokenizer(tmp_path / "a", template)))
    assert learned(chat, talk("what", "It is  two & more. The cat sat"))


def test_keys_of_messages_that_say_no_are_named_or_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    chat = Chat(str(make_tokenizer(tmp_path / "a", GENERATION)))
    line = talk("a", "b")
    line["messages"][1] |= {"loss_mask": 0, "trainable": False, "none": None, "empty": ""}
    encoded(chat, line)
    assert chat.left_out() == {"loss_mask of messages", "trainable of messages"}
    line["messages"][0] |= {"train": True}
    with pytest.raises(UnusableText, match=r"its message 1 .user. has train, and answers alone are learned; drop it"):
        encoded(chat, line)


def test_an_answer_that_is_not_wanted_is_refused(tmp_path: Path) -> None:
    """KTO's lines have one answer each, and whether it is a good one."""
    pytest.importorskip("transformers")
    chat = Chat(str(make_tokenizer(tmp_path, PLAIN)))
    line = {"prompt": "a", "completion": "b"}
    for label in (True, 0, 3):  # a good one, or a class
        assert list(chat.encode([Row({**line, "label": label}, "line 1", 0)]))
    with pytest.raises(UnusableText, match="line 1 has label false, an answer that isn't wanted"):
        list(chat.encode([Row({**line, "label": False}, "line 1", 0)]))
