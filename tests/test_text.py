"""Text of one's own: packed so that documents don't mix, counted so that uneven shares don't shift the loss."""

from __future__ import annotations

import json
import os
import shutil
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
from fsdp2_extra.text.places import find
from fsdp2_extra.text.prepared import read_meta
from fsdp2_extra.text.reading import rows_of
from fsdp2_extra.text.text import Text
from fsdp2_extra.text.tokenizer import Bytes
from fsdp2_extra.text.tokenizer_file import FromFile, open_tokenizer
from fsdp2_extra.text.windows import Documents
from fsdp2_tools.data import __main__ as command
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


def test_text_that_changed_with_its_date_kept_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rsync, tar and `cp -p` keep the date of a content."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "a.txt"
    found = []
    for letter in "ab":
        file.write_text(letter * 500)
        os.utime(file, ns=(10**18, 10**18))
        made = text.load(str(file), 8, 256, Text(Bytes()), apart=True)
        found.append(bytes(made.train.tokens[:3]))  # type: ignore[attr-defined]
    assert found == [b"aaa", b"bbb"]


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


def test_a_column_is_found_by_its_whole_name(tmp_path: Path) -> None:
    """Arrow takes `a.b` for the field of a struct, too."""
    parquet, pyarrow = (pytest.importorskip(name) for name in ("pyarrow.parquet", "pyarrow"))
    table = pyarrow.table({"a": [{"b": "wrong" * 99}] * 20, "a.b": ["right" * 99] * 20})
    parquet.write_table(table, tmp_path / "t.parquet")
    made = text.load(str(tmp_path / "t.parquet"), 8, 256, Text(Bytes(), "a.b"), apart=True)
    assert bytes(made.train.tokens[:10]) == b"rightright"  # type: ignore[attr-defined]
    twice = table.rename_columns(["text", "text"])
    parquet.write_table(twice, tmp_path / "t.parquet")
    with pytest.raises(UnusableText, match="has several columns text; give one of them another name"):
        text.load(str(tmp_path / "t.parquet"), 8, 256, Text(Bytes()), apart=True)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("br[1].txt", "br[1].txt"),
        ("br[1]/a.txt", "br[1]"),
        ("br[1]/a.txt", "br[1]/*.txt"),
        ("a,b.txt", "a,b.txt"),
        ("a,b/a.txt", "a,b"),
        ("A.TXT", "A.TXT"),
        ("a/A.Md", "a"),
        ("A.JSONL", "[A-Z].JSONL"),
        ("a.Parquet", "a.Parquet"),
    ],
)
def test_a_path_that_exists_is_itself_and_its_ending_is_of_any_case(
    corpus: Path, tmp_path: Path, name: str, place: str
) -> None:
    file = tmp_path / "folder" / name
    file.parent.mkdir(parents=True)
    (tmp_path / "folder" / "br1.txt").write_text("other" * 100)  # which the name would be a pattern of
    if file.suffix == ".Parquet":
        pytest.importorskip("pyarrow.parquet").write_table(
            pytest.importorskip("pyarrow").table({"text": documents(300)}), file
        )
    else:
        file.write_bytes(corpus.read_bytes() if file.suffix == ".JSONL" else b"a" * 1000)
    config = parse(["--model=llama", "--seq-len=8", f"--dataset=text:{tmp_path / 'folder' / place}"])
    check_data(config)
    (found,) = find(config.dataset.removeprefix("text:"))
    assert found.name == str(file)
    out = tmp_path / "out"
    assert command.cli(["prepare", str(tmp_path / "folder" / place), "--tokenizer=bytes", f"--out={out}"]) == 0
    if file.suffix in (".JSONL", ".Parquet"):
        assert sum(read_meta(out)["documents"].values()) == 300  # and not one of all its lines


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.jsonl"])
def test_a_mark_of_utf_8_before_a_file_is_none_of_its_text(tmp_path: Path, name: str) -> None:
    """Editors write U+FEFF there. In the midst of a file, or of a field, it is a character."""
    lines = ['{"text": "\ufeffé"}\n', '{"text": "a\ufeff"}\n']
    whole = "".join(lines) if name.endswith(".jsonl") else "é\ufeffa"
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + whole.encode())
    rows = list(rows_of(find(str(tmp_path / name))[0], "text"))
    assert [row.content for row in rows] == (["\ufeffé", "a\ufeff"] if name.endswith(".jsonl") else ["é\ufeffa"])
    assert sum(row.size for row in rows) == len(whole.encode()) + 3


def test_a_folder_has_one_order_however_it_is_named(tmp_path: Path) -> None:
    for name in ("a.txt", "a.b.txt", "a/0.txt", "what?.txt", "q#x.txt", "é.txt", "e.txt", "z.TXT"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [find(place) for place in (str(tmp_path), f"{tmp_path}/**/*.[tT]*")]
    names = ["a.b.txt", "a.txt", "a/0.txt", "e.txt", "q#x.txt", "what?.txt", "z.TXT", "é.txt"]
    assert [[file.name.removeprefix(f"{tmp_path}/") for file in one] for one in found] == [names] * 2


def test_text_at_a_url_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^--dataset text:https://a\.example/b\.txt: is a URL, .*; give it as datasets:https:"
    ):
        check_data(parse(["--model=llama", "--dataset=text:https://a.example/b.txt"]))


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


def test_a_tokenizer_that_splits_by_chance_splits_each_time_the_same(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {one: number for number, one in enumerate(["a", "b", "ab", "abab"])}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[("a", "b"), ("ab", "ab")], dropout=0.5)
    tokenizers.Tokenizer(model).save(str(tmp_path / "chance.json"))
    opened = FromFile(tmp_path / "chance.json")
    assert opened.about["off"] == ["dropout of 0.5"]
    assert {tuple(tokens.tolist()) for tokens in opened.encode(["abab" * 4] * 50)} == {(3, 3, 3, 3)}


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


def test_data_that_was_moved_is_the_same_data(corpus: Path, tmp_path: Path) -> None:
    flags = [*LLAMA, "--batch-size=2", "--checkpoint-every=2", f"--run-dir={tmp_path}/run", "--no-save-model"]
    whole = losses(main_in_ranks([*flags, f"--dataset=text:{corpus}"]))
    moved = Path(shutil.copyfile(corpus, tmp_path / f"moved{corpus.suffix}"))
    again = [*flags, f"--dataset=text:{moved}", "--resume=2"]
    assert losses(main_in_ranks(again)) == whole[2:]
    moved.write_bytes(moved.read_bytes().replace(b'"text": "', b'"text": "x', 1))
    with pytest.raises(ConfigError, match="--dataset: the checkpoint's data differs from this run's"):
        main_in_ranks(again)


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
