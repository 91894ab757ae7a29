"""A real S3 server on loopback, and a proxy before it that fails as networks do.

    with s3_server() as endpoint, Proxy(endpoint) as proxy:
        proxy.fail("cut", "PUT .*distcp", times=2)

The proxy hands a request on only when it has all of it: what is cut in the middle never reaches the server, as
S3 never keeps a part of a put.
"""

from __future__ import annotations

import logging
import os
import re
import select
import socket
import struct
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from moto.server import ThreadedMotoServer

from tests.harness import imported_once

imported_once("s3fs")

EVER = 1_000_000
CHUNK = 1 << 14


def environment(endpoint: str, **more: str) -> dict[str, str]:
    """What a process needs to find the server, with short pauses, timeouts and leases."""
    return {
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "FSDP2_REMOTE_ATTEMPTS": "4",
        "FSDP2_REMOTE_TIMEOUT": "20",
        "FSDP2_LEASE_SECONDS": "4",
        **more,
    }


@contextmanager
def s3_server() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@dataclass
class Fault:
    kind: str
    pattern: str
    times: int
    after: int


class Proxy:
    """A TCP proxy to an HTTP server: one request to a connection, each with the first fault that fits it.

    Kinds of faults:
        cut: reset the connection when `after` bytes of the body have come.
        refuse: answer 503.
        lose: do what is asked, and reset the connection instead of answering.
        hang: take the request and never answer.
        stall: read no further when `after` bytes of the body have come, and never answer.
        slow: take and give `CHUNK` bytes at a time, with a pause after each.
    """

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("http://").split(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._faults: list[Fault] = []
        self._actions: list[tuple[str, Callable[[], None]]] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.log: list[tuple[str, str]] = []  # request line without version, kind of fault or "pass"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._listener.close()
        for thread in self._threads:
            thread.join(timeout=10)

    def fail(self, kind: str, pattern: str = "", *, times: int = 1, after: int = 0) -> None:
        """Let the next `times` requests whose "METHOD /path" holds the pattern fail."""
        with self._lock:
            self._faults.append(Fault(kind, pattern, times, after))

    def when(self, pattern: str, action: Callable[[], None]) -> None:
        """Call `action` at the first request that fits, before that is looked at."""
        with self._lock:
            self._actions.append((pattern, action))

    def heal(self) -> None:
        """As new: no faults, and nothing counted."""
        with self._lock:
            self._faults.clear()
            self._actions.clear()
            self.log.clear()

    def count(self, kind: str, pattern: str = "") -> int:
        """How many requests that fit had this fault, or "pass"."""
        with self._lock:
            return sum(1 for line, fault in self.log if fault == kind and re.search(pattern, line))

    def _fault_of(self, line: str) -> Fault:
        with self._lock:
            due = [entry for entry in self._actions if re.search(entry[0], line)]
            self._actions = [entry for entry in self._actions if entry not in due]
        for _, action in due:
            action()
        with self._lock:
            found = Fault("pass", "", 1, 0)
            for fault in self._faults:
                if fault.times > 0 and re.search(fault.pattern, line):
                    fault.times -= 1
                    found = fault
                    break
            self.log.append((line, found.kind))
            return found

    def _accept(self) -> None:
        self._listener.settimeout(0.2)
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return  # closed
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self, client: socket.socket) -> None:
        with client:
            client.settimeout(60)
            try:
                self._exchange(client)
            except OSError as error:
                # The other side went away in the middle, which is what the tests are about.
                self.log.append((f"{type(error).__name__}", "broken"))

    def _exchange(self, client: socket.socket) -> None:
        head, _, rest = _receive_until(client, b"\r\n\r\n").partition(b"\r\n\r\n")
        body = bytearray(rest)
        lines = head.split(b"\r\n")
        if len(lines) == 1:
            return  # a connection that was not used
        line = lines[0].decode().rsplit(" ", 1)[0]
        headers = {k.strip().lower(): v.strip() for k, v in (text.split(b":", 1) for text in lines[1:])}
        fault = self._fault_of(line)
        pause = 0.05 if fault.kind == "slow" else 0.0
        if b"expect" in headers:
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not _is_whole(headers, body) and not (fault.kind in ("cut", "stall") and len(body) >= fault.after):
            data = client.recv(CHUNK)
            if not data:
                return
            body += data
            time.sleep(pause)
        if fault.kind == "cut":
            _reset(client)
        elif fault.kind in ("hang", "stall"):
            self._wait_until_gone(client, reads=fault.kind == "hang")
        elif fault.kind == "refuse":
            _refuse(client, with_text=not line.startswith("HEAD"))
        else:
            kept = [text for text in lines if not text.lower().startswith((b"connection:", b"expect:"))]
            request = b"\r\n".join([*kept, b"Connection: close"]) + b"\r\n\r\n" + body
            with socket.create_connection(self._server) as server:
                server.sendall(request)
                while data := server.recv(CHUNK):
                    if fault.kind != "lose":
                        client.sendall(data)
                        time.sleep(pause)
            if fault.kind == "lose":
                _reset(client)

    def _wait_until_gone(self, client: socket.socket, *, reads: bool) -> None:
        while not self._closing.wait(0.05):
            # A reset shows as an exceptional or readable socket, also where nothing is read.
            readable, _, broken = select.select([client] if reads else [], [], [client], 0)
            if broken or (readable and not client.recv(CHUNK)):
                return


def _receive_until(client: socket.socket, end: bytes) -> bytes:
    received = b""
    while end not in received and (data := client.recv(CHUNK)):
        received += data
    return received


def _refuse(client: socket.socket, *, with_text: bool) -> None:
    text = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
    head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(text) + (text if with_text else b""))


def _is_whole(headers: dict[bytes, bytes], body: bytearray) -> bool:
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        return body == b"0\r\n\r\n" or body.endswith(b"\r\n0\r\n\r\n")
    return len(body) >= int(headers.get(b"content-length", 0))


def _reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Bucket:
    """A new bucket of a server, as its owner sees it."""

    def __init__(self, endpoint: str) -> None:
        self.name = f"b{uuid.uuid4().hex[:12]}"
        self._base = f"{endpoint}/{self.name}"
        self._ask("PUT", "")

    def _ask(self, method: str, path: str, content: bytes | None = None) -> bytes:
        # Who it is does not matter there, but that it is somebody; and that it sends no form, as urllib thinks.
        headers = {"Authorization": "AWS owner:nothing", "Content-Type": "application/octet-stream"}
        request = urllib.request.Request(self._base + path, content, headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())

    def url(self, prefix: str = "run") -> str:
        return f"s3://{self.name}/{prefix}"

    def objects(self, prefix: str = "") -> list[str]:
        return re.findall("<Key>([^<]*)</Key>", self._ask("GET", f"?list-type=2&prefix={prefix}").decode())

    def get(self, key: str) -> bytes:
        return self._ask("GET", f"/{key}")

    def put(self, key: str, content: bytes) -> None:
        self._ask("PUT", f"/{key}", content)

    def delete(self, key: str) -> None:
        self._ask("DELETE", f"/{key}")


@contextmanager
def surroundings(environment: dict[str, str], folder: Path) -> Iterator[None]:
    """Another environment and working directory, as on another machine; as they were, afterwards."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        with chdir(folder):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
