"""Text of one's own: packed so that documents don't mix, counted so that uneven shares don't shift the loss."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F

from fsdp2 import infer
from fsdp2.config import parse
from fsdp2.data import __main__ as command
from fsdp2.data import text
from fsdp2.data.places import find
from fsdp2.data.preparing import prepare
from fsdp2.data.reading import Row
from fsdp2.data.splits import IGNORED
from fsdp2.data.text import Text
from fsdp2.data.tokenizer import Bytes, FromFile, UnusableText, open_tokenizer
from fsdp2.data.windows import Documents
from fsdp2.options.errors import ConfigError
from fsdp2.options.parser import to_flags
from fsdp2.run import preflight, runtime
from fsdp2.run.preflight import check_data
from fsdp2.run.rundir import shapes_of
from fsdp2.run.start import open_data
from tests.harness import Ranks, losses, main_in_ranks, of_kind


def documents(count: int) -> list[str]:
    return ["".join(chr(97 + (number * 7 + place) % 26) for place in range(3 + number % 11)) for number in range(count)]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "some.jsonl"
    file.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents(300)))
    return file


def test_windows_keep_documents_apart() -> None:
    tokens, ends = numpy.arange(20, dtype=numpy.uint8), numpy.array([3, 4, 12, 20])
    split = Documents(tokens, ends, 6, apart=True)
    inputs, targets = split.__getitems__([0, 1, 2])
    assert inputs["input_ids"].tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert inputs["document_ids"].tolist() == [[0, 0, 0, 1, 2, 2], [0] * 6, [0] * 6]
    assert targets.tolist() == [
        [1, 2, IGNORED, IGNORED, 5, 6],
        [7, 8, 9, 10, 11, IGNORED],
        [13, 14, 15, 16, 17, 18],
    ]
    for rows in ([0], [1], [2], [2, 0, 1]):
        assert split.target_count(rows) == int((split.__getitems__(rows)[1] != IGNORED).sum())
    together = Documents(tokens, ends, 6, apart=False)
    inputs, targets = together.__getitems__([1])
    assert (inputs.tolist(), targets.tolist()) == ([[6, 7, 8, 9, 10, 11]], [[7, 8, 9, 10, 11, 12]])


def test_every_document_is_in_one_split_whole(corpus: Path) -> None:
    dataset = text.load(str(corpus), 8, 256, Text(Bytes()), apart=True)
    found: list[str] = []
    for split in (dataset.train, dataset.test):
        assert isinstance(split, Documents)
        pieces = numpy.split(numpy.asarray(split.tokens), split.ends)
        found += [bytes(piece).decode() for piece in pieces if len(piece)]
    assert sorted(found) == sorted(documents(300))
    assert 10 < len(dataset.test.ends) < 60  # type: ignore[attr-defined]


def test_what_was_tokenised_once_is_mapped_afterwards(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = text.load(str(corpus), 8, 256, Text(Bytes()), apart=True)
    monkeypatch.setattr(text, "prepare", None)  # reading would be an error
    again = text.load(str(corpus), 8, 256, Text(Bytes()), apart=True)
    assert torch.equal(first.train[0][1], again.train[0][1])
    folder = text.cached(str(corpus), Text(Bytes()))
    assert len(text.load(str(folder), 8, 256, Text(Bytes()), apart=True).train) == len(first.train)
    (folder / "train.bin").write_bytes(b"torn")
    with pytest.raises(UnusableText, match=r"train.bin has another size"):
        text.load(str(folder), 8, 256, Text(Bytes()), apart=True)


@pytest.mark.parametrize("suffix", [".txt", ".parquet"])
def test_other_kinds_of_files_are_read(corpus: Path, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"other{suffix}"
    if suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        pyarrow = pytest.importorskip("pyarrow")
        parquet.write_table(pyarrow.table({"body": documents(300)}), file)
        dataset = text.load(str(file), 8, 256, Text(Bytes(), "body"), apart=True)
        assert len(dataset.train.ends) + len(dataset.test.ends) == 300  # type: ignore[attr-defined]
    else:
        file.write_text("a" * 1000)
        dataset = text.load(str(tmp_path / "*.txt"), 8, 256, Text(Bytes()), apart=True)
        assert len(dataset.test.tokens) == 100  # type: ignore[attr-defined]  # the end of the only document


def test_a_tokenizer_of_a_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"a": 0, "b": 1, "<end>": 2, "?": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    opened = open_tokenizer(str(tmp_path))
    assert [one.tolist() for one in opened.encode(["a b", "b c"])] == [[0, 1], [1, 3]]
    assert list(opened.names) == ["a", "b", "<end>", "?"]


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
    row, empty = Row("a b", "", (0, 0), 0.0, 0), Row(" ", "", (0, 0), 0.0, 0)
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
    # Nobody has to name the tokens beside the file.
    (tmp_path / "tokenizer_config.json").unlink()
    assert tokens_of(Text(open_tokenizer(tokenizer)), row) == [[*begin, 0, 1]]


def test_training_and_a_prompt_begin_alike(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus.write_text('{"text": "a b"}\n' * 40)
    tokenizer = make_words(tmp_path, "template", {"eos_token": "</s>", "bos_token": "<s>"})
    for bos, begin in (("auto", [2]), ("always", [2]), ("never", [])):
        line = ["--model=llama", "--seq-len=4", f"--dataset=text:{corpus}", f"--tokenizer={tokenizer}", f"--bos={bos}"]
        config = parse(line)
        split = open_data(config, config.spec).train
        assert split.tokens[: len(begin) + 3].tolist() == [*begin, 0, 1, 3]  # type: ignore[attr-defined]
        asked: list[list[int]] = []

        def generate(forward: Any, spec: Any, tokens: Any, asked: list[list[int]] = asked, **_: Any) -> Iterator[int]:
            asked.append(tokens.tolist())
            return iter([])

        run = SimpleNamespace(config=config, device="cpu", world=runtime.world(), forward=None, weights="")
        monkeypatch.setattr("fsdp2.infer.opened", lambda place, run=run, **_: nullcontext(run))
        monkeypatch.setattr("fsdp2.infer.generate", generate)
        for prompt in ("a b", "<s> a b"):
            infer.go_on("run", prompt, new_tokens=1, temperature=0.0, seed=1)
        assert asked == [[*begin, 0, 1], [2, 0, 1]]


def test_a_folder_prepared_with_another_beginning_is_refused(corpus: Path, tmp_path: Path) -> None:
    corpus.write_text('{"text": "a b"}\n' * 40)
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


def test_a_run_is_resumed_with_the_same_beginning(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    then, now = (parse(["--model=llama", f"--dataset=text:{corpus}", f"--bos={bos}"]) for bos in ("never", "auto"))
    model = now.spec.on_meta(now.model_size)
    marker = {"model": shapes_of(model), "config": to_flags(then)}
    monkeypatch.setattr(preflight, "read_marker", lambda checkpoint: marker)
    preflight.check_checkpoint(then, model, None, partial=False)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--bos auto: the checkpoint to resume from was made with never"):
        preflight.check_checkpoint(now, model, None, partial=False)  # type: ignore[arg-type]


LLAMA = [
    "--model=llama",
    "--seq-len=8",
    "--max-steps=4",
    "--threads=1",
    "--device=cpu",
    "--test-batch-size=64",
    "--seed=3",
]


def _by_hand(corpus: str) -> list[float]:
    """The same training in one process by a plain loop: the mean over all targets of the six samples of a step."""
    from fsdp2.data.sampler import epoch_order
    from fsdp2.models.initial import reset_parameters

    config = parse(LLAMA)
    model = config.spec.build("debug")
    reset_parameters(model, config.spec.initial_values, config.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    split = text.load(corpus, 8, 256, Text(Bytes()), apart=True).train
    order, found = epoch_order(len(split), config.seed, 0), []
    for step in range(4):
        inputs, targets = split.__getitems__(order[6 * step : 6 * step + 6].numpy())
        loss = F.cross_entropy(model(**inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_files_own_truncation_and_padding_change_no_data(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[PAD]": 2}))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "plain.json"))
    made.enable_truncation(3)
    made.enable_padding(length=6, pad_id=2)
    made.save(str(tmp_path / "cuts.json"))
    texts = ["a b " * 5, "b"]
    found = [
        [tokens.tolist() for tokens in FromFile(tmp_path / f"{name}.json").encode(texts)] for name in ("plain", "cuts")
    ]
    assert found[0] == found[1] == [[0, 1] * 5, [1]]


def test_the_loss_is_the_mean_over_all_targets_however_uneven(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    """Ranks whose samples have unequal numbers of targets: a mean of their means would be another number."""
    for count in (2, 3):
        batch = f"{tmp_path}/{count}"
        whole, rest, evaluation = ranks.run(_runs_of, str(corpus), batch, 6 // count, ranks=count)[0]
        assert rest == whole[2:]
        # Sums are rounded in another order than in one process.
        assert whole == pytest.approx(_by_hand(str(corpus)), rel=1e-5)
        assert evaluation["count"] == _targets_of_test(str(corpus))


def _runs_of(corpus: str, folder: str, batch: int) -> tuple[list[float], list[float], dict[str, Any]]:
    flags = [*LLAMA, f"--dataset=text:{corpus}", f"--batch-size={batch}", "--checkpoint-every=2"]
    whole = main_in_ranks([*flags, f"--run-dir={folder}/whole"])
    resumed = [f"--resume={folder}/whole/checkpoints/step-00000002", f"--run-dir={folder}/rest"]
    return losses(whole), losses(main_in_ranks([*flags, *resumed])), of_kind(whole, "eval")[0]


def _targets_of_test(corpus: str) -> int:
    split = text.load(corpus, 8, 256, Text(Bytes()), apart=True).test
    return split.target_count(range(len(split)))  # type: ignore[attr-defined]


def _mixing(corpus: str, folder: str) -> str:
    """A model whose attention knows nothing of documents."""
    flags = [*LLAMA, f"--dataset=text:{corpus}", "--batch-size=3", f"--run-dir={folder}/run"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdp2.models.llama.mask_of", lambda *arguments: None)
        try:
            main_in_ranks(flags)
        except ConfigError as error:
            return str(error)
    return "nothing was noticed"


def test_a_model_that_mixes_documents_is_refused(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    for message in ranks.run(_mixing, str(corpus), str(tmp_path)):
        assert "a document sees those before it" in message


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--dataset=text:{folder}/nothing*", "there is no file of text"),
        ("--dataset=text:{folder}/strange.bin", "isn't of a type that is read here"),
        ("--dataset=text:{corpus} --tokenizer={folder}", "has no tokenizer.json"),
        ("--dataset=text:", "names no file"),
        ("--tokenizer=bytes", "only text:PATH and chat:PATH take one"),
        ("--documents=together", "has no documents"),
        (
            "--bos=never",
            "--bos never with --dataset source-text: only documents of text:PATH begin with a token; drop it",
        ),
        ("--dataset=text:{corpus} --bos=always", "bytes have no token that begins a text; drop --bos"),
        (
            "--dataset=text:{corpus} --tokenizer={words} --bos=always",
            "--bos always: .*words/tokenizer.json has no token",
        ),
        ("--dataset=chat:{corpus} --bos=always", "the chat template begins a conversation; drop it"),
        ("--dataset=text:{corpus} --model=vit", "the model takes image data"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_read(corpus: Path, flags: str, part: str) -> None:
    (corpus.parent / "strange.bin").write_bytes(b"x")
    (corpus.parent / "words").mkdir()
    words = make_words(corpus.parent / "words", "none", {})
    with pytest.raises(ConfigError, match=part):
        check_data(parse(["--model=llama", *flags.format(folder=corpus.parent, corpus=corpus, words=words).split()]))


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("empty.txt", b"", "hold no text"),
        ("bytes.txt", b"\xff\xfe\x00", "can't be read as text"),
        ("torn.jsonl", b'{"text": "a"}\n{"tex', "can't be read as text"),
        ("other.jsonl", b'{"body": "a"}\n', "line 1: has no text in its field text; it has body; see --text-field"),
        ("short.txt", b"abc", "which fill no sequence of 8"),
        ("half.jsonl", b'{"text": "a\\ud800"}\n', "line 1: has half of a character in its field text"),
        ("junk.parquet", b"PAR1junkPAR1", "can't be read as text"),
    ],
)
def test_text_that_cannot_be_used_is_named(corpus: Path, name: str, content: bytes, part: str) -> None:
    file = corpus.parent / name
    file.write_bytes(content)
    with pytest.raises(UnusableText, match=part):
        text.load(str(file), 8, 256, Text(Bytes()), apart=True)
    line = ["--model=llama", f"--dataset=text:{file}", "--seq-len=8"]
    with pytest.raises(ConfigError, match=part):
        check_data(parse(line))  # before any process group
    check_data(parse(line), read=False)


def test_of_much_text_the_first_document_is_looked_at_before(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "SOON", 10)
    file = corpus.parent / "other.jsonl"
    file.write_text('{"body": "a"}\n')
    with pytest.raises(ConfigError, match="has no text in its field text"):
        check_data(parse(["--model=llama", f"--dataset=text:{file}"]))
    check_data(parse(["--model=llama", f"--dataset=text:{file}", "--text-field=body", "--seq-len=512"]))


def test_what_is_no_file_in_a_folder_of_text_hangs_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(UnusableText, match="there is no file of text"):
        find(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ('{"eos_token": {"a": 1}}', "its eos_token is no text"),
        ('{"eos_token": 5}', "its eos_token is no text"),
        ("[]", "can't be used"),
        ("{", "can't be used"),
    ],
)
def test_settings_of_a_tokenizer_that_make_no_sense(tmp_path: Path, content: str, part: str) -> None:
    file = tmp_path / "tokenizer.json"
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(file))
    assert open_tokenizer(str(tmp_path)).size == 2
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UnusableText, match=part):
        open_tokenizer(str(tmp_path))


def test_a_prepared_folder_that_lies_is_refused(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "prepared"
    prepare(find(str(corpus)), folder, Text(Bytes()))
    good = json.loads((folder / "meta.json").read_text())
    text.load(str(folder), 8, 256, Text(Bytes()), apart=True)
    for name, value in (("dtype", "object"), ("dtype", "uint16"), ("files", 5), ("tokens", {}), ("tokens", None)):
        (folder / "meta.json").write_text(json.dumps({**good, name: value}))
        with pytest.raises(UnusableText, match="is not a prepared text"):
            text.load(str(folder), 8, 256, Text(Bytes()), apart=True)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(corpus: Path) -> None:
    with pytest.raises(UnusableText, match="has 256 tokens, and the model's vocabulary 64"):
        text.load(str(corpus), 8, 64, Text(Bytes()), apart=True)
