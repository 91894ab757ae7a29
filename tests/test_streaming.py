"""Text at a URL: the tokens of the same files on a disk, whatever the network does, and nothing of them kept."""

from __future__ import annotations

import http.server
import json
import re
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest

from fsdp2.config import parse
from fsdp2.data import places, preparing, reading
from fsdp2.data.errors import UnusableText
from fsdp2.data.places import find
from fsdp2.data.prepared import read_meta
from fsdp2.data.preparing import prepare
from fsdp2.data.text import Text
from fsdp2.data.tokenizer import Bytes
from fsdp2.options.errors import ConfigError
from fsdp2.run.preflight import check_data
from tests.harness import Ranks, losses, main_in_ranks
from tests.test_text import LLAMA, documents

pytest.importorskip("aiohttp")


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder.

    Attributes:
        ranges: whether it gives parts of files.
        cuts: how many more answers it cuts in their midst.
        version: what it calls the state of its files.
    """

    daemon_threads = True
    ranges, cuts, version, tells_size = True, 0, "1", True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.SimpleHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        file, server = Path(self.translate_path(self.path)), self.server
        if not file.is_file():
            self.send_error(404)
            return
        size = file.stat().st_size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if server.ranges else None
        first, last = (int(wanted[1]), min(int(wanted[2] or size - 1), size - 1)) if wanted else (0, size - 1)
        self.send_response(206 if wanted else 200)
        self.send_header("Accept-Ranges", "bytes" if server.ranges else "none")
        self.send_header("ETag", server.version)
        if server.tells_size:
            self.send_header("Content-Length", str(last + 1 - first))
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        if body:
            with open(file, "rb") as stream:
                stream.seek(first)
                if server.cuts > 0:
                    server.cuts -= 1
                    self.wfile.write(stream.read((last + 1 - first) // 2))
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                while first <= last:
                    first += self.wfile.write(stream.read(min(1 << 14, last + 1 - first)))

    def log_message(self, *arguments: Any) -> None:
        """A line for each request."""


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in documents(300)))
    (folder / "b.txt").write_text("\n".join(documents(200)))
    return folder


@pytest.fixture
def server(corpus: Path) -> Iterator[Server]:
    with Server(("127.0.0.1", 0), partial(Handler, directory=str(corpus))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "BLOCK", 1 << 10)
    monkeypatch.setattr(reading, "BLOCK", 1 << 10)
    monkeypatch.setattr(reading, "PIECE", 1 << 9)
    monkeypatch.setattr(preparing, "AT_A_TIME", 20)
    monkeypatch.setattr(places, "FIRST_PAUSE_SECONDS", 0.0)


def content_of(place: str, out: Path) -> str:
    """Says which documents came from a place, after its files were compared with what meta.json says."""
    prepare(find(place), out, Text(Bytes()))
    return str(read_meta(out)["content"])


@pytest.mark.usefixtures("in_small_blocks")
@pytest.mark.parametrize("ranges", [True, False])
def test_a_url_gives_the_tokens_of_the_file_whatever_the_network_does(
    corpus: Path, server: Server, tmp_path: Path, ranges: bool
) -> None:
    wanted = content_of(f"{corpus}/a.jsonl,{corpus}/b.txt", tmp_path / "disk")
    both = f"{server.url}/a.jsonl,{server.url}/b.txt?download=true"
    server.ranges = ranges
    assert content_of(both, tmp_path / "network") == wanted
    server.cuts = 5  # fewer than the attempts that a read has
    assert content_of(both, tmp_path / "cut") == wanted
    assert server.cuts == 0
    for name in ("train.bin", "train-ends.bin", "test.bin"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "disk" / name).read_bytes()


@pytest.mark.usefixtures("in_small_blocks")
def test_where_a_server_fails_for_long_the_next_process_goes_on(
    corpus: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = content_of(f"{corpus}/a.jsonl,{corpus}/b.txt", tmp_path / "disk")
    both, out = f"{server.url}/a.jsonl,{server.url}/b.txt", tmp_path / "out"
    monkeypatch.setenv("FSDP2_REMOTE_ATTEMPTS", "2")
    read: list[int] = []
    lines = reading._lines

    def failing(*arguments: Any) -> Iterator[reading.Row]:
        for row in lines(*arguments):
            yield row
            read.append(row.after[0])
            server.cuts = 1_000_000 if len(read) == 150 else server.cuts

    monkeypatch.setattr(reading, "_lines", failing)
    with pytest.raises(places.Unreachable, match=r"/a\.jsonl: reading failed 2 times, last with"):
        prepare(find(both), out, Text(Bytes()), save_seconds=0)
    server.cuts, first = 0, len(read)
    prepare(find(both), out, Text(Bytes()), save_seconds=0)
    assert read_meta(out)["content"] == wanted
    assert first > 100
    assert read[first] > 2000  # what was done isn't read again


def test_no_whole_file_is_in_memory_or_on_a_disk(
    corpus: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "BLOCK", 1 << 17)
    monkeypatch.setattr(reading, "BLOCK", 1 << 17)
    monkeypatch.setattr(reading, "PIECE", 1 << 17)
    monkeypatch.setattr(preparing, "BYTES_AT_A_TIME", 1 << 17)
    (corpus / "large.txt").write_bytes(b"some words in a line\n" * (1 << 19))  # 11 MB
    (corpus / "large.jsonl").write_bytes((json.dumps({"text": "word " * 4000}) + "\n").encode() * 500)  # 10 MB
    for name in ("large.txt", "large.jsonl"):
        files = find(f"{server.url}/{name}")
        tracemalloc.start()
        prepare(files, tmp_path / name, Text(Bytes()))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 3 << 20
        on_disk = sum(file.stat().st_size for file in (tmp_path / name).iterdir())
        assert on_disk < files[0].size + 10_000  # a byte a token, and no other copy


def test_a_folder_and_a_pattern_in_a_store(corpus: Path, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for file in corpus.iterdir():
        memory.pipe_file(f"/streaming/{file.name}", file.read_bytes())
    memory.pipe_file("/streaming/other.bin", b"x")
    try:
        wanted = content_of(str(corpus), tmp_path / "disk")
        assert content_of("memory://streaming", tmp_path / "folder") == wanted
        of_lines = content_of(f"{corpus}/a.jsonl", tmp_path / "lines")
        assert content_of("memory://streaming/*.jsonl", tmp_path / "pattern") == of_lines
        check_data(parse(["--model=llama", "--dataset=text:memory://streaming"]))
    finally:
        memory.rm("/streaming", recursive=True)


def test_a_server_that_tells_no_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/unversioned.txt", b"words")
    facts = {"name": "/unversioned.txt", "size": 5, "type": "file"}
    monkeypatch.setattr(type(memory), "info", lambda *given, **more: facts)
    with pytest.raises(UnusableText, match="reports neither a version nor a date of it") as caught:
        places.find("memory://unversioned.txt")
    assert "\n" not in str(caught.value)


def test_a_folder_has_one_order_however_it_is_named(tmp_path: Path) -> None:
    """Its place in a store, a pattern, names with what a URL of http would need escapes for."""
    memory, disk = fsspec.filesystem("memory"), tmp_path / "disk"
    for name in ("a.txt", "a.b.txt", "a/0.txt", "what?.txt", "q#x.txt", "é.txt", "e.txt", "z.TXT"):
        (disk / name).parent.mkdir(parents=True, exist_ok=True)
        (disk / name).write_text(f"{name} ")
        memory.pipe_file(f"/one-order/{name}", f"{name} ".encode())
    try:
        found = [places.find(place) for place in (str(disk), f"{disk}/**/*.[tT]*", "memory://one-order")]
    finally:
        memory.rm("/one-order", recursive=True)
    names = ["a.b.txt", "a.txt", "a/0.txt", "e.txt", "q#x.txt", "what?.txt", "z.TXT", "é.txt"]
    assert [
        [file.name.rpartition(f"{top}/")[2] for file in one]
        for one, top in zip(found, ("disk", "disk", "one-order"), strict=True)
    ] == [names] * 3


def test_parquet_at_a_url(corpus: Path, server: Server, tmp_path: Path) -> None:
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.table({"text": documents(300)}), corpus / "c.parquet", row_group_size=40)
    wanted = content_of(f"{corpus}/c.parquet", tmp_path / "disk")
    assert content_of(f"{server.url}/c.parquet", tmp_path / "network") == wanted
    (file,) = find(f"{server.url}/c.parquet")
    rows = list(reading.rows_of(file, "text"))
    assert list(reading.rows_of(file, "text", rows[100].after)) == rows[101:]


@pytest.mark.usefixtures("in_small_blocks")
def test_what_cannot_be_streamed_soundly_is_one_line(
    corpus: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (corpus / "c.bin").write_bytes(b"x")

    def refused(place: str) -> str:
        with pytest.raises(ConfigError) as error:
            check_data(parse(["--model=llama", f"--dataset=text:{place}"]))
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "reading failed with FileNotFoundError" in refused(f"{server.url}/none.jsonl")
    assert "isn't of a type that is read here" in refused(f"{server.url}/c.bin")
    assert "is no URL that fsspec reads (Protocol not known: nowhere" in refused("nowhere://a/b.txt")
    server.tells_size = False
    assert "doesn't report its size" in refused(f"{server.url}/a.jsonl")
    server.tells_size = True

    files = find(f"{server.url}/a.jsonl")
    server.version = "2"
    with pytest.raises(UnusableText, match="has changed while it was read"):
        prepare(files, tmp_path / "out", Text(Bytes()))

    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    assert (
        "s3:// needs a package that isn't installed; in the clone of this repository, pip install -e '.[s3]'"
        in refused("s3://a/b.txt")
    )


def _runs_of(place: str, folder: str, batch: int) -> tuple[list[float], list[float]]:
    flags = [*LLAMA, f"--dataset=text:{place}", f"--batch-size={batch}", "--checkpoint-every=2"]
    whole = main_in_ranks([*flags, f"--run-dir={folder}/whole"])
    resumed = [f"--resume={folder}/whole/checkpoints/step-00000002", f"--run-dir={folder}/rest"]
    return losses(whole), losses(main_in_ranks([*flags, *resumed]))


def test_a_run_from_a_url_is_that_of_the_files(ranks: Ranks, corpus: Path, server: Server, tmp_path: Path) -> None:
    """The same samples in the same steps, on any number of ranks, after a resume in mid-epoch too."""
    place = f"{server.url}/a.jsonl"
    whole, rest = ranks.run(_runs_of, place, str(tmp_path), 3)[0]
    of_files = ranks.run(
        main_in_ranks, [*LLAMA, f"--dataset=text:{corpus}/a.jsonl", "--batch-size=3", f"--run-dir={tmp_path}/f"]
    )
    assert whole == losses(of_files[0])
    assert rest == whole[2:]
    # Other text of the same length under the same name.
    (corpus / "a.jsonl").write_text((corpus / "a.jsonl").read_text().replace("a", "z"))
    server.version = "2"
    flags = [*LLAMA, f"--dataset=text:{place}", "--batch-size=3", f"--run-dir={tmp_path}/other"]
    for line in ranks.run(_refusal_of, [*flags, f"--resume={tmp_path}/whole/checkpoints/step-00000002"]):
        assert "samples would be repeated or left out" in line


def _refusal_of(flags: list[str]) -> str:
    try:
        main_in_ranks(flags)
    except ConfigError as error:
        return str(error)
    return "nothing was noticed"
