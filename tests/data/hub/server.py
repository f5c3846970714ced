"""A stand-in for the Hugging Face hub on 127.0.0.1: a host for listing and small files, a storage host, and faults."""

import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REPO = "golf/shards"
COMMIT = "c0" * 20
MAX_IN_GIT = 2_000  # bytes; larger files are in large storage, on the other host

Fault = Callable[["Handler", bytes], None]
"""Answers a request instead of the server."""


def status(code: int, **headers: str) -> Fault:
    """Answer with HTTP status `code`."""

    def answer(handler: "Handler", data: bytes) -> None:  # noqa: ARG001
        handler.reply(code, b"", {name.replace("_", "-"): value for name, value in headers.items()})

    return answer


def disconnect(after: int) -> Fault:
    """Announce the entire file and disconnect after `after` bytes."""

    def answer(handler: "Handler", data: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[:after])
        handler.close_connection = True

    return answer


def send(content: bytes) -> Fault:
    """Answer with `content` instead of the requested file."""
    return lambda handler, data: handler.reply(200, content, {})  # noqa: ARG005


class Hub:
    """Two hosts: the hub itself, and the storage that requests for large files are redirected to.

    Attributes:
        files: path → bytes.
        faults: path (or "api") → faults of the next requests, first to last.
        requests: (method, path or "api", request headers), in order.
        edit_listing: called with the JSON of the listing before it is sent.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.faults: defaultdict[str, list[Fault]] = defaultdict(list)
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.edit_listing: Callable[[dict[str, Any]], None] = lambda answer: None  # noqa: ARG005
        self._hosts = [ThreadingHTTPServer(("127.0.0.1", 0), type("H", (Handler,), {"hub": self})) for _ in range(2)]
        self.endpoint, self.storage = (f"http://127.0.0.1:{host.server_port}" for host in self._hosts)
        for host in self._hosts:
            threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        for host in self._hosts:
            host.shutdown()
            host.server_close()

    def downloads(self, part: str = "") -> list[str]:
        """Return the paths of the downloaded files that contain `part`, in order."""
        return [path for method, path, _ in self.requests if method == "GET" and path != "api" and part in path]

    def listing(self) -> dict[str, Any]:
        """Return the JSON of the listing."""
        siblings = []
        for path, data in self.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": blob}
            if len(data) > MAX_IN_GIT:
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        answer = {"id": REPO, "sha": COMMIT, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0}
        self.edit_listing(answer)
        return answer


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/datasets/"):
            self.record("api")
            exists = path in {f"/api/datasets/{REPO}", f"/api/datasets/{REPO}/revision/main"}
            if fault := self.next_fault("api"):
                fault(self, b"")
            elif exists:
                self.reply(200, json.dumps(self.hub.listing()).encode(), {"Content-Type": "application/json"})
            elif path.startswith(f"/api/datasets/{REPO}/"):
                self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
            else:
                self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
            return
        name = path.removeprefix(f"/datasets/{REPO}/resolve/{COMMIT}/").removeprefix("/storage/")
        data = self.hub.files.get(name)
        if data is None:
            self.reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        if self.command == "HEAD" or path.startswith("/storage/") or len(data) <= MAX_IN_GIT:
            self.record(name)
        large = len(data) > MAX_IN_GIT
        etag = hashlib.sha256(data).hexdigest() if large else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}
        if large and not path.startswith("/storage/"):
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{etag}"'}
            self.reply(302, b"", {**headers, "Location": f"{self.hub.storage}/storage/{name}"})
        elif self.command == "GET" and (fault := self.next_fault(name)):
            fault(self, data)
        else:
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self.reply(206 if start else 200, data[start:], headers)

    def record(self, name: str) -> None:
        self.hub.requests.append((self.command, name, dict(self.headers.items())))

    def next_fault(self, name: str) -> Fault | None:
        faults = self.hub.faults[name]
        return faults.pop(0) if faults else None

    def reply(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
