"""`--dataset datasets:`: what Hugging Face's library reads is what a file of the same text or conversations is."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fsdp2.config import parse
from fsdp2.data.errors import UnusableText
from fsdp2.options.errors import ConfigError
from fsdp2.options.own_model import require_named
from fsdp2.run.preflight import check_data
from fsdp2_extra.foreign import bounds
from fsdp2_extra.text import published, text
from fsdp2_tools.data import __main__ as command
from tests.harness import Ranks, losses, main_in_ranks, of_kind, refusal_in_ranks
from tests.hostile.common import one_line
from tests.test_text import LLAMA, documents

library = pytest.importorskip("datasets")

TEXTS = [{"text": one, "source": number} for number, one in enumerate(documents(60))]


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    published.look.cache_clear()


def write(file: Path, rows: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    table = library.Dataset.from_list(rows)
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        {".parquet": table.to_parquet, ".csv": table.to_csv, "": table.save_to_disk}[file.suffix](str(file))
    return file


def as_saved_less(folder: Path) -> None:
    as_saved(folder, TEXTS)
    (folder / "data-00001-of-00003.arrow").unlink()


def as_saved_by_another(folder: Path, rows: Any = TEXTS) -> None:
    as_saved(folder, rows)
    (folder / "state.json").write_text('{"_data_files": [1]}')


def as_tables(folder: Path, rows: list[Any]) -> None:
    as_saved(folder, rows)
    (folder / "state.json").unlink()


def as_dict(folder: Path, rows: list[Any]) -> None:
    sets = {"train": library.Dataset.from_list(rows), "validation": library.Dataset.from_list(rows[:1])}
    library.DatasetDict(sets).save_to_disk(str(folder))


def as_shards(folder: Path, rows: list[Any]) -> None:
    write(folder / "data" / "train-00000-of-00002.parquet", rows[:25])
    write(folder / "data" / "train-00001-of-00002.parquet", rows[25:])
    write(folder / "data" / "test-00000-of-00001.parquet", rows[:1])


def as_saved(folder: Path, rows: list[Any]) -> None:
    library.Dataset.from_list(rows).save_to_disk(str(folder), num_shards=3)
    (folder / "cache-0123456789abcdef.arrow").write_bytes(b"of a map")


def as_saved_twice(folder: Path, rows: list[Any]) -> None:
    library.Dataset.from_list([{"text": "of the first time"}] * 6).save_to_disk(str(folder), num_shards=3)
    write(folder, rows)  # in one file, beside those three


PLACES: dict[str, tuple[Callable[[Path, list[Any]], Any], str]] = {
    "saved": (as_saved, ""),
    "twice": (as_saved_twice, ""),
    "arrow": (as_tables, ""),
    "dict": (as_dict, ":train"),
    "shards": (as_shards, ""),
    "a.csv": (write, ""),
    "a.json": (write, ""),
    "b/train.jsonl": (lambda file, rows: (write(file, rows), write(file.with_name("dev.jsonl"), rows[:1])), ""),
}


def contents(name: str, tokenizer: str = "bytes") -> str:
    """Says which documents or conversations came, in their order."""
    place, encoder = text.opened(name, tokenizer)
    return str(text.load(place, 64 if encoder.kind == "chat" else 8, 256, encoder, apart=True).about["content"])


@pytest.mark.parametrize("name", PLACES)
def test_documents_are_those_of_a_file_of_text_in_their_order(tmp_path: Path, name: str) -> None:
    make, split = PLACES[name]
    wanted = contents(f"text:{write(tmp_path / 'wanted.jsonl', TEXTS)}")
    make(tmp_path / name, TEXTS)
    place = (tmp_path / name).parent if name.startswith("b/") else tmp_path / name
    assert contents(f"datasets:{place}{split}") == wanted


def _runs_of(place: str, tokenizer: str, folder: str) -> tuple[list[float], list[str]]:
    flags = [*LLAMA, f"--dataset={place}", f"--tokenizer={tokenizer}", "--batch-size=2", "--checkpoint-every=2"]
    events = main_in_ranks([*flags, f"--run-dir={folder}"])
    return losses(events), of_kind(events, "start")[0]["header"]


def test_a_run_has_one_order_at_every_world_size_and_after_a_resume(ranks: Ranks, tmp_path: Path) -> None:
    place = tmp_path / "saved"
    as_saved(place, TEXTS)
    file = write(tmp_path / "a.jsonl", TEXTS)
    whole, header = ranks.run(_runs_of, f"datasets:{place}", "bytes", str(tmp_path / "whole"))[0]
    assert len(whole) == 4
    assert whole == ranks.run(_runs_of, f"text:{file}", "bytes", str(tmp_path / "text"))[0][0]
    assert "read: text, as documents" in header
    rest = [f"--dataset=datasets:{place}", "--tokenizer=bytes", "--batch-size=2", "--grad-accumulation=2"]
    rest.append(f"--resume={tmp_path}/whole/checkpoints/step-00000002")
    # One process that accumulates over the halves adds up as two ranks do.
    (alone,) = ranks.run(main_in_ranks, [*LLAMA, *rest, f"--run-dir={tmp_path}/rest"], ranks=1)
    assert losses(alone) == whole[2:]
    as_saved(place, [*TEXTS[1:], TEXTS[0]])  # of the same length
    published.look.cache_clear()
    for line in ranks.run(refusal_in_ranks, [*LLAMA, *rest, f"--run-dir={tmp_path}/other"], ranks=2):
        assert "samples would be repeated or left out" in line


def test_prepared_ahead_of_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    as_dict(tmp_path / "dict", TEXTS)
    line = ["prepare", f"datasets:{tmp_path}/dict:train", "--tokenizer=bytes", f"--out={tmp_path}/out"]
    assert command.cli(line) == 0
    assert f"--dataset text:{tmp_path}/out --tokenizer bytes" in capsys.readouterr().out
    assert contents(f"text:{tmp_path}/out") == contents(f"text:{write(tmp_path / 'wanted.jsonl', TEXTS)}")
    for more in ("--chat", str(tmp_path / "wanted.jsonl")):
        assert command.cli(["prepare", more, *line[1:]]) == 2
        assert "datasets:PATH stands alone" in capsys.readouterr().err


def test_a_column_that_is_named_makes_no_conversations_unreadable(tmp_path: Path) -> None:
    """Of a mixture the name is for those that are text."""
    write(tmp_path / "a.json", [{"id": 1, "messages": [{"role": "user", "content": "a"}]}])
    found = published.find(f"{tmp_path}/a.json")
    assert published.kind_of(found, "content", {}, mixed=True) == "chat"
    with pytest.raises(UnusableText, match="has the columns id, messages, and reads content as documents"):
        published.kind_of(found, "content", {})


def test_a_column_that_is_named_is_text_whatever_stands_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [{"prompt": one["text"], "completion": "b"} for one in TEXTS])
    place, encoder = text.opened(f"datasets:{tmp_path}/a.parquet", "bytes", "prompt")
    wanted = contents(f"text:{write(tmp_path / 'wanted.jsonl', TEXTS)}")
    assert text.load(place, 8, 256, encoder, apart=True).about["content"] == wanted


# --- what is refused ------------------------------------------------------------------------------------------


def _bomb(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = pyarrow.array([0] * 256)
    column = pyarrow.DictionaryArray.from_arrays(rows, pyarrow.array(["x" * (2 << 20)]))
    parquet.write_table(pyarrow.table({"text": column}), folder / "a", compression="zstd")
    (folder / "a").rename(folder / "a.parquet")


REFUSED: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "columns": (
        lambda to: write(to / "a.parquet", [{"question": "a", "answer": "b"}]),
        "a.parquet",
        r"has the columns question, answer, and reads text as documents, or as conversations messages, .*--text-field",
    ),
    "split": (
        lambda to: as_dict(to / "a", TEXTS),
        "a:test",
        r"is of the split test; name another .*; it has train/data-",
    ),
    "no split": (
        lambda to: (write(to / "a" / "dev.csv", TEXTS), write(to / "a" / "test.csv", TEXTS)),
        "a",
        r"is of the split train; name another behind a colon, or none; it has dev\.csv, test\.csv",
    ),
    "kinds": (
        lambda to: (write(to / "a" / "a.csv", TEXTS), write(to / "a" / "b.json", TEXTS)),
        "a",
        "files of one kind are read together",
    ),
    "empty": (lambda to: write(to / "a.csv", TEXTS[:0] or [{"text": None}][:0]), "a.csv", "empty|gives up"),
    "a file less": (
        lambda to: as_saved_less(to / "a"),
        "a",
        r"state\.json: names '.*data-00001-of-00003\.arrow', which isn't there; save the dataset again",
    ),
    "another's state": (
        lambda to: as_saved_by_another(to / "a"),
        "a",
        r"state\.json: names no files of data",
    ),
    "nothing": (lambda to: (to / "a").mkdir(), "a", "there is nothing that datasets reads"),
    "a pattern": (lambda to: write(to / "a[1].csv", TEXTS), "a[1].csv", "takes its name for a pattern or a URL"),
    "junk": (lambda to: (to / "a.parquet").write_bytes(b"PAR1junkPAR1"), "a.parquet", "gives up"),
    "a bomb": (_bomb, "a.parquet", "(takes|makes) more than"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_one_line_before_any_rank_waits(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, place, part = REFUSED[what]
    make(tmp_path)
    monkeypatch.setattr(bounds, "MEMORY", 400 << 20)  # which the library takes a part of
    with pytest.raises(ConfigError, match=part) as caught:
        check_data(parse(["--model=llama", f"--dataset=datasets:{tmp_path}/{place}", "--seq-len=8"]))
    one_line(caught.value, str(tmp_path))


def test_without_the_extra_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "find_spec", lambda name: None)
    (tmp_path / "a.arrow").touch()
    with pytest.raises(ConfigError, match=r"datasets isn't installed; .*pip install -e '\.\[datasets\]'"):
        check_data(parse(["--model=llama", f"--dataset=datasets:{tmp_path}"]))
    (tmp_path / "b.json").write_text(json.dumps([{"text": "to be or not to be " * 9}] * 40))  # read without it
    check_data(parse(["--model=llama", f"--dataset=datasets:{tmp_path}/b.json", "--seq-len=8"]))
    check_data(parse(["--model=llama", f"--dataset=text:{tmp_path}/b.json", "--seq-len=8"]))


# --- elsewhere ------------------------------------------------------------------------------------------------


class Handler(http.server.SimpleHTTPRequestHandler):
    version = "1"
    asked: ClassVar[list[str]] = []

    def end_headers(self) -> None:
        if self.version:
            self.send_header("ETag", self.version)
        super().end_headers()

    def log_message(self, form: str, *arguments: Any) -> None:
        self.asked.append(self.path)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Handler, "asked", [])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_folder_opens_no_connection(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its description nor what its rows name is opened, by any process."""
    from pyarrow import parquet

    picture = library.Features({"text": library.Value("string"), "image": library.Image()})
    rows = [{**one, "image": {"path": f"{server}/a.png", "bytes": None}} for one in TEXTS]
    table = library.Dataset.from_list([{"text": one["text"], "image": one["image"]} for one in rows])
    folder = tmp_path / "folder"
    folder.mkdir()
    parquet.write_table(table.data.table.cast(picture.arrow_schema), folder / "train.parquet")
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: a\n  data_files: {server}/train.parquet\n---\n")
    connect = tmp_path / "connected"
    monkeypatch.setattr("socket.socket.connect", lambda *_: connect.touch())
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: connect.touch())
    wanted = contents(f"text:{write(tmp_path / 'wanted.jsonl', TEXTS)}")
    assert contents(f"datasets:{folder}") == wanted
    assert (Handler.asked, connect.exists()) == ([], False)


def test_a_url_is_streamed_and_known_by_its_version(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp")
    wanted = contents(f"text:{write(tmp_path / 'a.jsonl', TEXTS)}")
    place = parse(["--model=llama", f"--dataset=datasets:{server}/a.jsonl"]).dataset
    assert contents(place) == wanted
    asked = len(Handler.asked)
    published.look.cache_clear()
    monkeypatch.setattr(text, "prepare", None)  # what was prepared is found
    assert contents(place) == wanted
    assert len(Handler.asked) > asked
    published.look.cache_clear()
    monkeypatch.setattr(Handler, "version", "")
    with pytest.raises(UnusableText, match=r"its server tells no version, .*; download it"):
        contents(place)


def test_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is called in a child, which is a copy of this process."""

    class Builder:
        def __init__(self, path: str) -> None:
            assert path == "owner/name"
            files = type("Files", (), {"origin_metadata": [(path, "a commit")]})
            self.config = type("Config", (), {"data_files": {"train": files}})

        def as_streaming_dataset(self) -> dict[str, Any]:
            return {"train": library.Dataset.from_list(TEXTS).to_iterable_dataset(), "test": None}

    monkeypatch.setattr(library, "load_dataset_builder", Builder)
    wanted = contents(f"text:{write(tmp_path / 'a.jsonl', TEXTS)}")
    monkeypatch.chdir(tmp_path)
    for name in ("datasets:owner/name", "datasets:owner/name:train"):
        config = parse(["--model=llama", f"--dataset={name}"])
        assert config.dataset == name.replace("owner", "hf://datasets/owner")
        assert contents(config.dataset) == wanted
    for value in (config.dataset, name):  # as a run writes it, and as a stranger may
        with pytest.raises(ConfigError, match=r"its dataset is at a URL, .* add --dataset"):
            require_named({"dataset": value}, {}, "config.json")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert parse(["--model=llama", f"--dataset={name}"]).dataset == f"datasets:{tmp_path}/owner/name:train"
    assert parse(["--model=llama", "--dataset=datasets:a/b.csv"]).dataset == f"datasets:{tmp_path}/a/b.csv"
    assert parse(["--model=llama", "--dataset=datasets:../a/b"]).dataset == f"datasets:{tmp_path.parent}/a/b"


def _on_the_hub(folder: Path, name: str | None, settings: str = "") -> published.Published:
    """A folder in the place of a name on the hub: the library describes both in the same way."""
    if name is not None:
        head = f"---\nconfigs:\n- config_name: default\n  data_files: {name}\n  {settings}\n---\n"
        (folder / "README.md").write_text(head)
    return published.Published("hub", 0, "a commit", "", (str(folder),), "train")


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("a.csv", "quoting: 3", "csv with quoting 3"),
        ("a.csv", "sep: ';'\n  nrows: 3", "csv with sep ';', nrows 3"),
        ("a.tsv", "", r"csv with sep '\\t'"),
        ("a.json", "field: data", "json with field 'data'"),
    ],
)
def test_a_description_that_reads_files_in_another_way_is_refused(
    tmp_path: Path, name: str, settings: str, said: str
) -> None:
    write(tmp_path / "data" / name.replace("tsv", "csv"), TEXTS).rename(tmp_path / "data" / name)
    hub = _on_the_hub(tmp_path / "data", name, settings)
    with pytest.raises(UnusableText, match=rf"hub: its description reads {said}, which isn't followed"):
        published.look(hub)


PARTS = [{"type": "text", "text": "b"}]
TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": PARTS}]}


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize(
    ("name", "content", "field", "wanted"),
    [
        ("a.csv", "text,day\nNone,1\n007,NA\n", "text", ["None", "007"]),
        ("a.json", json.dumps([TALK, TALK]), {}, [TALK, TALK]),
    ],
)
def test_files_of_a_name_on_the_hub_are_read_as_they_are_written(
    tmp_path: Path, described: bool, name: str, content: str, field: Any, wanted: list[Any]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text(content)
    hub = _on_the_hub(tmp_path / "data", name if described else None)
    assert [row.content for row in published.rows(published.look(hub), field)] == wanted
