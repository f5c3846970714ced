"""A small stand-in for the Hugging Face hub on 127.0.0.1: its listing, its files, a storage apart, and its moods."""

import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REPO = "golf/shards"
COMMIT = "c0" * 20
IN_GIT = 2_000  # bytes; larger files are in large storage, on the other host

Mood = Callable[["Handler", bytes], None]  # answers in place of the server


def status(code: int, **headers: str) -> Mood:
    """Answer `code`."""

    def answer(handler: "Handler", data: bytes) -> None:  # noqa: ARG001
        handler.reply(code, b"", {name.replace("_", "-"): value for name, value in headers.items()})

    return answer


def cut(after: int) -> Mood:
    """Promise the whole file and hang up after `after` bytes."""

    def answer(handler: "Handler", data: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[:after])
        handler.close_connection = True

    return answer


def send(other: bytes) -> Mood:
    """Answer with other bytes than asked for."""
    return lambda handler, data: handler.reply(200, other, {})  # noqa: ARG005


class Hub:
    """Two hosts: the hub itself, and the storage its large files redirect to.

    Attributes:
        files: path → bytes.
        moods: path (or "api") → what the next answers are instead of the right one, first to last.
        seen: (method, path or "api", request headers), in order.
        listing: may change the JSON of the listing before it is sent.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.moods: defaultdict[str, list[Mood]] = defaultdict(list)
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.listing: Callable[[dict[str, Any]], None] = lambda answer: None  # noqa: ARG005
        self._hosts = [ThreadingHTTPServer(("127.0.0.1", 0), type("H", (Handler,), {"hub": self})) for _ in range(2)]
        self.endpoint, self.storage = (f"http://127.0.0.1:{host.server_port}" for host in self._hosts)
        for host in self._hosts:
            threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        for host in self._hosts:
            host.shutdown()
            host.server_close()

    def got(self, part: str = "") -> list[str]:
        """Paths of the files that were asked for, in order, if `part` is in them."""
        return [path for method, path, _ in self.seen if method == "GET" and path != "api" and part in path]

    def describe(self) -> dict[str, Any]:
        """The listing."""
        siblings = []
        for path, data in self.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": blob}
            if len(data) > IN_GIT:
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        answer = {"id": REPO, "sha": COMMIT, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0}
        self.listing(answer)
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
            self.note("api")
            known = path in {f"/api/datasets/{REPO}", f"/api/datasets/{REPO}/revision/main"}
            if mood := self.mood("api"):
                mood(self, b"")
            elif known:
                self.reply(200, json.dumps(self.hub.describe()).encode(), {"Content-Type": "application/json"})
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
        if self.command == "HEAD" or path.startswith("/storage/") or len(data) <= IN_GIT:
            self.note(name)
        large = len(data) > IN_GIT
        etag = hashlib.sha256(data).hexdigest() if large else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}
        if large and not path.startswith("/storage/"):
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{etag}"'}
            self.reply(302, b"", {**headers, "Location": f"{self.hub.storage}/storage/{name}"})
        elif self.command == "GET" and (mood := self.mood(name)):
            mood(self, data)
        else:
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self.reply(206 if start else 200, data[start:], headers)

    def note(self, name: str) -> None:
        self.hub.seen.append((self.command, name, dict(self.headers.items())))

    def mood(self, name: str) -> Mood | None:
        waiting = self.hub.moods[name]
        return waiting.pop(0) if waiting else None

    def reply(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
