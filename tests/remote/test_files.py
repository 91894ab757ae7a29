"""File operations on a real S3 server: tried again as often as it says, never torn, never outside their place."""

from __future__ import annotations

import gc
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp2.checkpoint.dcp_files import DcpFiles
from fsdp2.checkpoint.files import NotTheWriter, Unreachable
from fsdp2.checkpoint.store import Store, fingerprint, verify
from fsdp2_extra.remote import files as remote
from fsdp2_extra.remote.files import RemoteFiles
from tests.remote.s3 import EVER, Bucket, Proxy

# --- names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../other/secret", "a/../../secret", "/etc/passwd", "a\\b", "a\0b", ".."])
def test_names_that_lead_out_are_refused_and_never_asked_for(files: RemoteFiles, proxy: Proxy, name: str) -> None:
    operations: list[Callable[[], object]] = [
        lambda: files.at(name),
        lambda: files.create(name),
        lambda: files.open(name),
        lambda: files.put(__file__, name),
        lambda: files.write(name, b""),
        lambda: files.read(name),
        lambda: files.read_range(name, 0, 1),
        lambda: files.size(name),
        lambda: files.rename(name, "inside"),
        lambda: files.unlink(name),
        lambda: files.list(name),
        # As the reader of a checkpoint asks for what its .metadata names.
        lambda: DcpFiles(files).create_stream(name, "rb").__enter__(),
    ]
    for operation in operations:
        with pytest.raises(ValueError, match="leads out of the checkpoint; it was not followed"):
            operation()
    assert proxy.log == []
    files.write("source", b"")
    with pytest.raises(ValueError, match="leads out"):
        files.rename("source", name)


def test_a_folder_made_by_a_browser_is_no_entry(files: RemoteFiles, bucket: Bucket) -> None:
    bucket.put("run/checkpoints/", b"")
    bucket.put("run/checkpoints/step-00000001/", b"")
    assert files.list("checkpoints") == ["step-00000001"]
    assert files.list("checkpoints/step-00000001") == []
    assert files.size("checkpoints/step-00000001") is None
    assert Store(files.at("checkpoints")).committed() == []


# --- trying again ----------------------------------------------------------------------------------------


def test_each_operation_is_tried_as_often_as_it_says(files: RemoteFiles, proxy: Proxy, tmp_path: Path) -> None:
    (tmp_path / "local").write_bytes(b"content")
    files.write("name", b"content")
    operations: dict[str, Callable[[], object]] = {
        "writing new to": lambda: files.write("new", b""),
        "writing local to": lambda: files.put(str(tmp_path / "local"), "local"),
        "reading name of": lambda: files.read("name"),
        "looking for name in": lambda: files.size("name"),
        "listing all of": lambda: files.list(""),
        "removing name from": lambda: files.unlink("name"),
    }
    for what, operation in operations.items():
        proxy.heal()
        proxy.fail("refuse", times=EVER)
        with pytest.raises(
            Unreachable, match=f"^{what} {files.url} failed 4 times, last with OSError: .*(Service|request rate)"
        ):
            operation()
        assert proxy.count("refuse") == len(proxy.log) == 4, what
        proxy.heal()
        proxy.fail("refuse", times=3)
        operation()
        assert proxy.count("refuse") == 3


def test_pauses_leave_the_generators_of_a_run_alone(files: RemoteFiles, proxy: Proxy) -> None:
    before = random.getstate()
    proxy.fail("refuse", times=3)
    proxy.fail("cut", times=1)
    files.write("name", b"")
    assert proxy.count("refuse") == 3
    assert random.getstate() == before


@pytest.mark.parametrize("kind", ["hang", "stall"])
def test_a_silent_server_is_given_up_wherever_it_falls_silent(
    here: None, bucket: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("FSDP2_REMOTE_TIMEOUT", "0.5")
    files = RemoteFiles(bucket.url())
    content = random.randbytes(1 << 20) * 8  # more than the sockets' buffers take
    proxy.fail(kind, "PUT", after=1000)
    with files.create("name") as file:
        file.write(content)
    assert proxy.count(kind) == 1
    assert bucket.get("run/name") == content
    proxy.fail(kind, "PUT", times=EVER, after=1000)
    with pytest.raises(Unreachable, match=r"writing name to .* failed 4 times, last with (Timeout|ReadTimeoutError)"):
        files.write("name", content)


def test_what_is_not_there_as_it_was_put_is_put_again(files: RemoteFiles, proxy: Proxy, bucket: Bucket) -> None:
    proxy.when("HEAD .*name", lambda: bucket.put("run/name", b"torn"))
    with files.create("name") as file:
        file.write(b"the whole content")
    assert proxy.count("pass", "PUT .*name") == 2
    assert bucket.get("run/name") == b"the whole content"


def test_reading_goes_on_where_it_was_cut(
    files: RemoteFiles, proxy: Proxy, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "READ_AHEAD", 1 << 12)
    content = random.randbytes(50_001)
    files.write("name", content)
    generator = random.Random(1)
    with files.open("name") as file:
        for _ in range(40):
            proxy.fail(generator.choice(["refuse", "lose", "cut", "pass"]), "GET")
            start, length = generator.randrange(60_000), generator.randrange(9_000)
            file.seek(start)
            assert file.read(length) == content[start : start + length]
        file.seek(-7, 2)
        assert file.read() == content[-7:]
    assert fingerprint(files, "name")["size"] == len(content)
    assert proxy.count("refuse") > 3
    with pytest.raises(FileNotFoundError, match=f"{files.url}/other"):
        files.open("other")


def test_a_file_that_shrinks_while_it_is_read_is_an_error(files: RemoteFiles, bucket: Bucket) -> None:
    files.write("name", bytes(1000))
    with files.open("name") as file:
        bucket.put("run/name", bytes(500))
        with pytest.raises(Unreachable, match="failed 4 times, last with OSError: name gave 500 bytes and not 1000"):
            file.read()


# --- never torn ------------------------------------------------------------------------------------------


def _write_half(file: Any) -> None:
    file.write(b"half")
    raise ZeroDivisionError


def test_a_file_that_an_error_cuts_short_is_not_uploaded(files: RemoteFiles, proxy: Proxy, bucket: Bucket) -> None:
    bucket.put("run/name", b"before")
    with pytest.raises(ZeroDivisionError), files.create("name") as file:
        _write_half(file)
    dcp = DcpFiles(files)
    with pytest.raises(ZeroDivisionError), dcp.create_stream("name", "wb") as stream:
        _write_half(stream)
    assert dcp.written == {}
    never_closed = files.create("name")
    never_closed.write(b"half")
    del never_closed
    gc.collect()
    assert proxy.log == []
    assert bucket.get("run/name") == b"before"
    with dcp.create_stream("name", "wb") as stream:
        stream.write(b"whole")
    assert bucket.get("run/name") == b"whole"


def test_a_full_disk_is_named_with_its_place(files: RemoteFiles, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with (
            pytest.raises(OSError, match=r"File too large: the file system is /.*; name is collected there, set "),
            files.create("name") as file,
        ):
            file.write(bytes(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert proxy.log == []


@pytest.mark.slow
def test_a_large_file_goes_in_parts_and_leaves_none(files: RemoteFiles, proxy: Proxy, bucket: Bucket) -> None:
    content = random.randbytes(1 << 20) * 120
    proxy.fail("cut", "PUT .*partNumber=2", times=2, after=1 << 20)
    with files.create("name") as file:
        file.write(content)
    assert proxy.count("cut") == 2
    assert bucket.get("run/name") == content
    proxy.fail("refuse", "PUT .*partNumber=2", times=EVER)
    with pytest.raises(Unreachable), files.create("other") as file:
        file.write(content)
    assert bucket.objects() == ["run/name"]
    assert b"<Key>" not in bucket.get("?uploads")


# --- checkpoints -----------------------------------------------------------------------------------------


def _commit(store: Store, step: int) -> None:
    store.begin(step)
    checkpoint, content = store.checkpoint(step), f"of step {step}".encode()
    names = ["__0_0.distcp", "__1_0.distcp", ".metadata"]
    for name in names:
        checkpoint.write(name, content)
    store.commit(step, {name: fingerprint(checkpoint, name) for name in names}, {})


def _whole(store: Store) -> dict[str, bytes]:
    """Each directory that has a marker, all of whose files are verified, with one file's content."""
    found = {}
    for name in store.files.list(""):
        if store.files.size(f"{name}/COMMIT.json") is not None:
            verify(store.files.at(name))
            found[name] = store.files.read(f"{name}/.metadata")
    return found


def test_setting_aside_and_removing_vouch_for_nothing_that_is_missing(tmp_path: Path) -> None:
    """Ended after each of their requests, they have lost nothing, and what they leave is cleaned."""
    for changes in range(40):
        files = RemoteFiles(f"memory://{tmp_path.name}/{changes}")
        store = Store(files)
        for step in (1, 2, 3):
            _commit(store, step)

        left = changes

        def dies() -> None:
            nonlocal left
            if left == 0:
                raise NotTheWriter("dead")
            left -= 1

        files.guards.append(dies)
        try:
            store.set_aside(2)
            store.retain(1)
        except NotTheWriter:
            left = -1
        files.guards.remove(dies)

        whole = _whole(store)
        assert {b"of step 3", b"of step 2"} <= set(whole.values()), changes
        store.set_aside(2)
        store.retain(1)
        store.remove_dead()
        whole = _whole(store)
        assert store.files.list("") == sorted(whole), f"{changes}: something is left that is no checkpoint"
        assert store.committed() == [2]
        assert {content for name, content in whole.items() if name.startswith("superseded-")} == {b"of step 3"}
        if left >= 0:
            break
    assert changes == 12, "each of the 4 copies and 8 removals was the last one once"


def test_a_save_whose_upload_fails_is_removed(files: RemoteFiles, proxy: Proxy, bucket: Bucket) -> None:
    store = Store(files.at("checkpoints"))
    _commit(store, 1)
    proxy.fail("cut", "PUT .*step-00000002/.metadata", times=EVER)
    with pytest.raises(Unreachable):
        _commit(store, 2)
    proxy.heal()
    assert len(bucket.objects("run/checkpoints/step-00000002/")) == 2
    assert store.committed() == [1]
    assert store.remove_dead() == ["step-00000002"]
    assert bucket.objects("run/checkpoints/step-00000002/") == []
    _commit(store, 2)
    assert store.committed() == [1, 2]


def test_a_rename_of_nothing_fails(files: RemoteFiles) -> None:
    with pytest.raises(FileNotFoundError, match=f"{files.url}/nothing"):
        files.rename("nothing", "something")
    files.write("file", b"content")
    files.rename("file", "other")
    assert files.list("") == ["other"]
    assert files.read("other") == b"content"
    assert files.at("a").guards is files.guards
