"""`export --push`: a server on this machine takes the hub's calls, and shows what was sent to it, and when."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.commands.common import Cli, refusal
from tests.harness import Ranks, main_in_ranks, small

constants: Any = pytest.importorskip("huggingface_hub.constants", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

TOKEN = "hf_of_a_test"


@dataclass
class Hub:
    """Repositories, each with its files, and the requests that have come.

    Attributes:
        broken: the part of a path that is answered with an error of the server.
    """

    url: str = ""
    role: str = "write"
    broken: str | None = None
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    @property
    def sent(self) -> list[str]:
        """Requests that change something."""
        return [one for one in self.requests if not one.startswith("GET ")]

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any]:
        self.requests.append(f"{method} {path}")
        if method == "PUT" and path.startswith("/objects/"):  # LFS's store: a signed URL, without a token
            self.objects[path.removeprefix("/objects/")] = body
            return 200, {}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials"}
        if self.broken is not None and self.broken in path:
            return 403, {"error": "you may not write here"}
        if path == "/api/whoami-v2":
            return 200, {"name": "ada", "type": "user", "auth": {"accessToken": {"role": self.role}}}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.private[name], self.files[name] = asked.get("visibility") == "private", {".gitattributes": b""}
            return 200, {"url": f"{self.url}/{name}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith(".git/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            actions = [{**one, "actions": {"upload": {"href": f"{self.url}/objects/{one['oid']}"}}} for one in wanted]
            return 200, {"transfer": "basic", "objects": actions}
        name, _, rest = path.removeprefix("/api/models/").partition("/")
        name, _, rest = (
            f"{name}/{rest}".partition("/preupload/") if "/preupload/" in path else (f"{name}/{rest}", "", "")
        )
        name = name.removesuffix("/commit/main")
        if name not in self.files:
            return 404, {"error": "Repository not found"}
        if "/preupload/" in path:
            return 200, {
                "files": [
                    {
                        "path": one["path"],
                        "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for one in json.loads(body)["files"]
                ]
            }
        if path.endswith("/commit/main"):
            for line in body.splitlines():
                said = json.loads(line)
                if said["key"] == "file":
                    self.files[name][said["value"]["path"]] = base64.b64decode(said["value"]["content"])
                elif said["key"] == "lfsFile":
                    self.files[name][said["value"]["path"]] = self.objects[said["value"]["oid"]]
            return 200, {"commitUrl": f"{self.url}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40}
        files = [{"rfilename": file} for file in self.files[name]]
        return 200, {"id": name, "private": self.private[name], "siblings": files}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    there = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            status, said = there.answer(self.command, path, self.headers.get("Authorization", ""), body)
            content = json.dumps(said).encode()
            self.send_response(status)
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self.handle_one()

        def do_POST(self) -> None:
            self.handle_one()

        def do_PUT(self) -> None:
            self.handle_one()

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        there.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        # As HF_ENDPOINT and the like set them before huggingface_hub is imported.
        monkeypatch.setattr(constants, "ENDPOINT", there.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield there
        server.shutdown()


@pytest.fixture(scope="module")
def llama(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    (place / "notes.txt").write_text("To be, or not to be. " * 200)
    flags = ["--model=llama", "--model-size=debug", f"--dataset=text:{place}/notes.txt", "--tokenizer=bytes"]
    ranks.run(main_in_ranks, [*small(place / "run"), *flags, "--seq-len=32", "--max-steps=1", "--batch-size=2"])
    return place / "run"


class Terminal(io.StringIO):
    """A standard input at which somebody sits."""

    def isatty(self) -> bool:
        return True


def exported(cli: Cli, run: Path, out: Path, *options: str) -> tuple[int, str, str]:
    return cli("export", run, out, "--format", "hf", "--push", "ada/notes", *options)


def on_disk(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_with_yes_the_folder_becomes_a_private_repository(llama: Path, tmp_path: Path, cli: Cli, hub: Hub) -> None:
    status, out, err = exported(cli, llama, tmp_path / "out", "--yes")
    assert status == 0, err
    assert hub.private == {"ada/notes": True}
    there = hub.files["ada/notes"]
    assert there.pop(".gitattributes") == b""
    assert there == on_disk(tmp_path / "out")
    assert {"config.json", "model.safetensors", "README.md"} <= set(there)
    (stored,) = hub.objects
    assert stored == hashlib.sha256(there["model.safetensors"]).hexdigest()
    assert f"{hub.url}/ada/notes, private" in out.splitlines()[-1]
    assert hub.sent[0] == "POST /api/repos/create"


@pytest.mark.parametrize(
    ("answer", "pushed"), [("y\n", True), ("YES\n", True), ("\n", False), ("no\n", False), ("", False)]
)
def test_on_a_terminal_it_asks_first(
    llama: Path,
    tmp_path: Path,
    cli: Cli,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    pushed: bool,
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    status, out, err = exported(cli, llama, tmp_path / "out")
    assert f"to {hub.url}/ada/notes, private, as ada? [y/N]" in err
    assert (tmp_path / "out" / "config.json").is_file(), "what is exported stays"
    assert (status, bool(hub.sent), "ada/notes" in hub.files) == ((0, True, True) if pushed else (1, False, False))
    assert ("nothing was pushed" in out) == (not pushed)


def test_nobody_can_be_asked_without_a_terminal(llama: Path, tmp_path: Path, cli: Cli, hub: Hub) -> None:
    assert "--yes" in refusal(exported(cli, llama, tmp_path / "out"))
    assert hub.requests == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda hub, patch: patch.setattr(constants, "HF_HUB_OFFLINE", True), "HF_HUB_OFFLINE"),
        (lambda hub, patch: patch.setattr("huggingface_hub.get_token", lambda: None), "hf auth login"),
        (lambda hub, patch: patch.setitem(sys.modules, "huggingface_hub", None), r".[hf]"),
        (lambda hub, patch: patch.setenv("HF_TOKEN", "hf_of_nobody"), "Invalid user token"),
        (lambda hub, patch: setattr(hub, "role", "read"), "may only read"),
        (lambda hub, patch: patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9"), "doesn't say who"),
        (
            lambda hub, patch: (hub.private.update({"ada/notes": False}), hub.files.update({"ada/notes": {}})),
            "is public",
        ),
        (
            lambda hub, patch: (hub.private.update({"ada/notes": True}), hub.files.update({"ada/notes": {"a": b""}})),
            "nothing is overwritten",
        ),
    ],
    ids=["offline", "no login", "no library", "token of nobody", "read token", "no network", "public", "has files"],
)
def test_refused_before_anything_is_exported(
    llama: Path, tmp_path: Path, cli: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch, change: Any, says: str
) -> None:
    change(hub, monkeypatch)
    assert says in refusal(exported(cli, llama, tmp_path / "out", "--yes"))
    assert hub.sent == []
    assert not (tmp_path / "out").exists()


def test_an_empty_private_repository_is_taken(llama: Path, tmp_path: Path, cli: Cli, hub: Hub) -> None:
    hub.private["ada/notes"], hub.files["ada/notes"] = True, {".gitattributes": b""}
    assert exported(cli, llama, tmp_path / "out", "--yes")[0] == 0
    assert "POST /api/repos/create" not in hub.requests
    assert "model.safetensors" in hub.files["ada/notes"]


def test_what_fails_later_leaves_the_folder_and_says_how_to_go_on(
    llama: Path, tmp_path: Path, cli: Cli, hub: Hub
) -> None:
    hub.broken = "/commit/"
    status, out, err = exported(cli, llama, tmp_path / "out", "--yes")
    assert status == 2
    assert f"hf upload --private ada/notes {tmp_path / 'out'} tries again" in err.splitlines()[-1]
    assert "pushed" not in out
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--format", "hf", "--push", "notes"], "OWNER/NAME"),
        (["--format", "hf", "--push", "../notes"], "OWNER/NAME"),
        (["--format", "hf", "--push", "https://huggingface.co/ada/notes"], "OWNER/NAME"),
        (["--format", "pt", "--push", "ada/notes", "--yes"], "--format hf"),
        (["--format", "hf", "--yes"], "--push OWNER/NAME"),
    ],
)
def test_the_command_line(tmp_path: Path, cli: Cli, options: list[str], says: str) -> None:
    assert says in refusal(cli("export", tmp_path, tmp_path / "out", *options))
