"""Documents begin as their tokenizer says, or as `--bos` does: in training, in prepared text and in a prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp2 import infer
from fsdp2.config import parse
from fsdp2.data.errors import UnusableText
from fsdp2.options.errors import ConfigError
from fsdp2.options.parser import to_flags
from fsdp2.run import resuming
from fsdp2.run.dataset import open_data
from fsdp2.run.directory.marker import shapes_of
from fsdp2.run.preflight import check_data
from fsdp2.run.process import runtime
from fsdp2_extra.text.rows import Row
from fsdp2_extra.text.text import Text
from fsdp2_extra.text.tokenizer_file import open_tokenizer
from fsdp2_tools.data import __main__ as command


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "some.jsonl"
    file.write_text('{"text": "a b"}\n' * 40)
    return file


# Of each post-processor, the tokens that begin and end a document by `auto`; its tokenizer is `make_words`.
PROCESSORS: dict[str, tuple[Callable[[Any], Any], list[int], list[int]]] = {
    "none": (lambda kinds: None, [], [3]),
    "of bytes": (lambda kinds: kinds.ByteLevel(), [], [3]),
    "template": (lambda kinds: _template(kinds, "<s> $A"), [2], [3]),
    "end as well": (lambda kinds: _template(kinds, "<s> $A </s>"), [2], [3]),
    "end alone": (lambda kinds: _template(kinds, "$A </s>"), [], [3]),
    "two": (lambda kinds: kinds.Sequence([kinds.ByteLevel(), _template(kinds, "<s> $A")]), [2], [3]),
    "roberta": (lambda kinds: kinds.RobertaProcessing(("</s>", 3), ("[CLS]", 4)), [4], [3]),
    "bert": (lambda kinds: kinds.BertProcessing(("</s>", 3), ("[CLS]", 4)), [4], [3]),
}


def _template(kinds: Any, single: str) -> Any:
    return kinds.TemplateProcessing(single=single, special_tokens=[("<s>", 2), ("</s>", 3)])


def make_words(folder: Path, processor: str, settings: dict[str, Any]) -> str:
    """A folder with a tokenizer of words: a 0, b 1, <s> 2, </s> 3, [CLS] 4."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "</s>", "[CLS]"])
    made.post_processor = PROCESSORS[processor][0](tokenizers.processors)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def tokens_of(encoder: Text, *rows: Row) -> list[list[int]]:
    return [tokens.tolist() for tokens, _ in encoder.encode(rows)]


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_document_begins_as_its_tokenizer_says(tmp_path: Path, name: str) -> None:
    tokenizer = make_words(tmp_path, name, {"eos_token": "</s>", "bos_token": "<s>"})
    _, begin, end = PROCESSORS[name]
    row, empty = Row("a b", "", 0), Row(" ", "", 0)
    first, last = replace(row, ends=False), replace(row, begins=False)
    for bos, wanted in (("auto", begin), ("always", begin or [2]), ("never", [])):
        encoder = Text(open_tokenizer(tokenizer, bos))
        assert tokens_of(encoder, row, empty) == [[*wanted, 0, 1, *end], []]
        # A large document comes in pieces, and the first may hold no token.
        assert tokens_of(encoder, first, last) == [[*wanted, 0, 1], [0, 1, *end]]
        assert tokens_of(encoder, replace(empty, ends=False)) == [wanted]
        # A document that brings its beginning, such as a rendered template, has one.
        shown = {2: "<s>", 4: "[CLS]"}[(wanted or [2])[0]]
        assert tokens_of(encoder, replace(row, content=f"{shown} a")) == [[*(wanted or [2]), 0, *end]]
    # Transformers begins a text alike.
    if find_spec("transformers") is not None:
        from transformers import PreTrainedTokenizerFast

        theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer)("a b")["input_ids"]
        assert theirs[: len(begin) + 2] == [*begin, 0, 1]
    # Nobody has to name the tokens beside the file.
    (tmp_path / "tokenizer_config.json").unlink()
    assert tokens_of(Text(open_tokenizer(tokenizer)), row) == [[*begin, 0, 1]]


@pytest.mark.parametrize(
    ("tokens", "part"), [([300], "a token that it doesn't have"), ([2] * 17, "17 tokens before a text")]
)
def test_a_beginning_that_no_tokenizer_has_is_refused(tmp_path: Path, tokens: list[int], part: str) -> None:
    make_words(tmp_path, "template", {})
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["post_processor"]["single"][:1] = [{"SpecialToken": {"id": "<s>", "type_id": 0}}]
    content["post_processor"]["special_tokens"]["<s>"] = {"id": "<s>", "ids": tokens, "tokens": ["<s>"] * len(tokens)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UnusableText, match=f"tokenizer.json: its post-processor puts {part}"):
        open_tokenizer(str(tmp_path))


def test_training_and_a_prompt_begin_alike(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_words(tmp_path, "template", {"eos_token": "</s>", "bos_token": "<s>"})
    for bos, begin in (("auto", [2]), ("always", [2]), ("never", [])):
        line = ["--model=llama", "--seq-len=4", f"--dataset=text:{corpus}", f"--tokenizer={tokenizer}", f"--bos={bos}"]
        config = parse(line)
        split = open_data(config).train
        assert split.tokens[: len(begin) + 3].tolist() == [*begin, 0, 1, 3]  # type: ignore[attr-defined]
        asked: list[list[int]] = []

        def generate(forward: Any, spec: Any, tokens: Any, asked: list[list[int]] = asked, **_: Any) -> Iterator[int]:
            asked.append(tokens.tolist())
            return iter([])

        run = SimpleNamespace(config=config, device="cpu", world=runtime.world(), forward=None, weights="")
        monkeypatch.setattr("fsdp2.infer.open_run", lambda place, run=run, **_: nullcontext(run))
        monkeypatch.setattr("fsdp2.infer.generate", generate)
        for prompt in ("a b", "<s> a b"):
            infer.go_on("run", prompt, new_tokens=1, temperature=0.0, seed=1)
        assert asked == [[*begin, 0, 1], [2, 0, 1]]


def test_the_space_before_the_first_word_that_is_written_stays(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As SentencePiece writes them: a word begins with its space, and a text's first word loses it."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), ("▁once", -1.0), ("▁upon", -1.0)], 0))
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    config = parse(["--model=llama", f"--dataset=text:{corpus}", f"--tokenizer={tmp_path}", "--bos=never"])
    run = SimpleNamespace(config=config, device="cpu", world=runtime.world(), forward=None, weights="")
    monkeypatch.setattr("fsdp2.infer.open_run", lambda place, **_: nullcontext(run))
    monkeypatch.setattr("fsdp2.infer.generate", lambda *_, **__: iter([2, 1]))
    assert infer.go_on("run", "once", new_tokens=2, temperature=0.0, seed=1)["text"] == " upon once"
    assert capsys.readouterr().out == "once upon once\n"


def test_a_folder_prepared_with_another_beginning_is_refused(corpus: Path, tmp_path: Path) -> None:
    tokenizer = make_words(tmp_path, "template", {"bos_token": "<s>"})
    for bos, other, part in (
        ("auto", "never", "with a token .*; give --bos always"),
        ("never", "auto", "with no token .* --bos never"),
    ):
        out = tmp_path / bos
        assert command.cli(["prepare", str(corpus), f"--tokenizer={tokenizer}", f"--out={out}", f"--bos={bos}"]) == 0
        line = ["--model=llama", "--seq-len=4", f"--dataset=text:{out}", f"--tokenizer={tokenizer}"]
        check_data(parse([*line, f"--bos={bos}"]))
        with pytest.raises(ConfigError, match=part):
            check_data(parse([*line, f"--bos={other}"]))


@pytest.mark.parametrize(("flag", "before", "after"), [("bos", "never", "auto"), ("documents", "apart", "together")])
def test_a_run_is_resumed_with_the_same_documents(corpus: Path, flag: str, before: str, after: str) -> None:
    line = ["--model=llama", f"--dataset=text:{corpus}"]
    then, now = (parse([*line, f"--{flag}={value}"]) for value in (before, after))
    model = now.spec.on_meta(now.model_size)
    marker = {"model": shapes_of(model), "config": to_flags(then)}
    checkpoint: Any = "a checkpoint"
    resuming.check_checkpoint(then, model, checkpoint, marker)
    with pytest.raises(ConfigError, match=f"--{flag} {after}: the checkpoint to resume from was made with {before}"):
        resuming.check_checkpoint(now, model, checkpoint, marker)


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"special_tokens_map": {"eos_token": "</s>", "bos_token": {"content": "<s>"}}}, (2, 3)),
        ({"special_tokens_map": {"eos_token": "</s>"}, "tokenizer_config": {"eos_token": "[CLS]"}}, (None, 3)),
        ({"special_tokens_map": {"eos_token": None}, "tokenizer_config": {"eos_token": "</s>"}}, (None, None)),
        # Since transformers 4.34 tokenizer_config.json has all of them.
        ({"special_tokens_map": {"eos_token": "</s>"}, "tokenizer_config": {"added_tokens_decoder": {}}}, (None, None)),
        ({"special_tokens_map": {"eos_token": "<|turn|>"}}, "special_tokens_map"),
        ({"special_tokens_map": {"additional_special_tokens": ["<|turn|>"]}}, "special_tokens_map"),
        ({"tokenizer_config": {"eos_token": "<|turn|>"}}, "tokenizer_config"),
        ({"tokenizer_config": {"bos_token": "<|turn|>"}}, "tokenizer_config"),
        ({"added_tokens": {"<|turn|>": 5}}, "added_tokens"),
    ],
)
def test_the_files_beside_a_tokenizer_count_as_for_transformers(
    tmp_path: Path, files: dict[str, Any], wanted: tuple[int | None, int | None] | str
) -> None:
    folder = make_words(tmp_path, "none", {})
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    theirs = None
    if find_spec("transformers") is not None:
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(folder)
    if isinstance(wanted, str):
        with pytest.raises(UnusableText, match=rf"{wanted}.json: declares a token '<\|turn\|>', which"):
            open_tokenizer(folder)
        assert theirs is None or theirs("a<|turn|>b")["input_ids"] == [0, 5, 1]
        return
    assert open_tokenizer(folder).end == wanted[1]
    if wanted[0] is not None:
        assert open_tokenizer(folder, "always").begin == (wanted[0],)
    assert theirs is None or (theirs.bos_token_id, theirs.eos_token_id) == wanted


@pytest.mark.parametrize(
    ("settings", "end"),
    [({}, 3), ({"eos_token": "[CLS]"}, 4), ({"eos_token": None}, None), ({"model_max_length": 9}, 3)],
)
def test_a_token_that_only_its_class_has_is_that_of_the_model(
    tmp_path: Path, settings: dict[str, Any], end: int | None
) -> None:
    # GPT-2's folder names none: <|endoftext|> is its class's, and its config.json has the number.
    folder = make_words(tmp_path, "none", settings)
    for given, found in ((3, end), ([3, 4], end), (99, None if end == 3 else end), ("x", None if end == 3 else end)):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": given}))
        assert open_tokenizer(folder).end == found


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"additional_special_tokens": ["<s>", "[CLS]"]}, False),
        ({"added_tokens_decoder": {"2": {"content": "<s>", "special": True}}}, False),
        ({"additional_special_tokens": ["<|turn|>"]}, True),
        ({"model_specific_special_tokens": {"image_token": "<|turn|>"}}, True),
        ({"extra_special_tokens": {"turn": "<|turn|>"}}, True),
        ({"added_tokens_decoder": {"5": {"content": "<|turn|>", "special": True}}}, True),
    ],
)
def test_a_token_that_only_the_settings_declare_is_refused(
    tmp_path: Path, settings: dict[str, Any], refused: bool
) -> None:
    # transformers adds it when it loads; tokenizer.json alone would split it, and train on the pieces.
    folder = make_words(tmp_path, "none", settings)
    with pytest.raises(UnusableText, match=r"declares a token '<\|turn\|>', which") if refused else nullcontext():
        open_tokenizer(folder)
