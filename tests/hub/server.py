"""A stand-in for the Hugging Face Hub on 127.0.0.1: listings, commits, downloads, a host for large files."""

import base64
import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

MAX_IN_GIT = 2_000  # bytes; larger files are in large storage (Git LFS), on the other host

Fault = Callable[["_Handler", bytes], None]
"""Answers a request instead of the server."""


def status(code: int, **headers: str) -> Fault:
    """Answer with HTTP status `code`."""

    def answer(handler: "_Handler", data: bytes) -> None:  # noqa: ARG001
        handler.reply(code, b"", {name.replace("_", "-"): value for name, value in headers.items()})

    return answer


def send(content: bytes) -> Fault:
    """Answer with `content` instead of the requested file."""
    return lambda handler, data: handler.reply(200, content, {})  # noqa: ARG005


class Hub:
    """Two hosts: the Hub itself, and the storage that requests for large files are redirected to.

    Attributes:
        repositories: name → path → bytes; the name of a data set begins with "datasets/".
        private: name → whether nobody else may read it.
        large: hash → bytes of the files that were uploaded to the large storage, as weights are.
        refused: the Hub answers every request with 403.
        faults: path (or "api") → faults of the next requests, first to last.
        requests: (method, path or "api", request headers), in order.
        edit_listing: called with the JSON of a listing before it is sent.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.large: dict[str, bytes] = {}
        self.refused = False
        self.faults: defaultdict[str, list[Fault]] = defaultdict(list)
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.edit_listing: Callable[[dict[str, Any]], None] = lambda answer: None  # noqa: ARG005
        self._hosts = [ThreadingHTTPServer(("127.0.0.1", 0), type("H", (_Handler,), {"hub": self})) for _ in range(2)]
        self.endpoint, self.storage = (f"http://127.0.0.1:{host.server_port}" for host in self._hosts)
        for host in self._hosts:
            threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        for host in self._hosts:
            host.shutdown()
            host.server_close()

    def commit(self, name: str) -> str:
        """Return the commit of a repository."""
        files = self.repositories[name]
        return hashlib.sha1(b"".join(path.encode() + files[path] for path in sorted(files))).hexdigest()

    def downloads(self, part: str = "") -> list[str]:
        """Return the paths of the downloaded files that contain `part`, sorted."""
        return sorted(path for method, path, _ in self.requests if method == "GET" and path != "api" and part in path)


@contextmanager
def running(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Hub]:
    """Run a Hub without repositories; the user's token and cache are not touched, and no retry waits."""
    library = pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.HF_TOKEN_PATH", str(folder / "no-token"))
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(f"{constants}.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # noqa: ARG005
    server = Hub()
    try:
        yield server
    finally:
        library.close_session()
        server.close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if self.hub.refused:
            self.reply(403, b"", {})
        elif parts[0] == "storage":
            self.file(_unquoted(parts[2:]), self.hub.large[parts[1]], {})
        elif parts[0] == "api":
            self.listing("/".join(parts[2:4] if parts[1] == "models" else parts[1:4]), parts[4:])
        else:
            end = 3 if parts[0] == "datasets" else 2
            self.resolve("/".join(parts[:end]), _unquoted(parts[end + 2 :]))

    def listing(self, name: str, rest: list[str]) -> None:
        self.record("api")
        files = self.hub.repositories.get(name)
        if fault := self.next_fault("api"):
            fault(self, b"")
        elif files is None:
            self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif rest[1:] not in ([], ["main"], [self.hub.commit(name)]):
            self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif rest[:1] == ["tree"]:
            self.json([{"type": "file", "path": path, **_described(data, "oid")} for path, data in files.items()])
        else:
            siblings = [{"rfilename": path, **_described(data, "blobId")} for path, data in files.items()]
            answer = {"id": name.removeprefix("datasets/"), "sha": self.hub.commit(name), "siblings": siblings}
            self.hub.edit_listing(answer)
            self.json({**answer, "tags": [], "downloads": 0, "likes": 0})

    def resolve(self, name: str, path: str) -> None:
        data = self.hub.repositories.get(name, {}).get(path)
        if data is None:
            self.reply(404, b"", {"X-Error-Code": "EntryNotFound" if name in self.hub.repositories else "RepoNotFound"})
            return
        sha256 = hashlib.sha256(data).hexdigest()
        headers = {"X-Repo-Commit": self.hub.commit(name), "ETag": f'"{_oid(data)}"'}
        if len(data) <= MAX_IN_GIT:
            self.file(path, data, headers)
            return
        self.hub.large[sha256] = data
        headers |= {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{sha256}"'}
        self.reply(302, b"", {**headers, "Location": f"{self.hub.storage}/storage/{sha256}/{path}"})

    def file(self, path: str, data: bytes, headers: dict[str, str]) -> None:
        self.record(path)
        if self.command == "GET" and (fault := self.next_fault(path)):
            fault(self, data)
            return
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.reply(206 if start else 200, data[start:], headers)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = self.path.partition("?")[0].strip("/").split("/")
        name = "/".join(parts[2:4])
        if self.hub.refused:
            self.reply(403, b"", {})
        elif parts[:3] == ["api", "repos", "create"]:
            request = json.loads(body)
            name = f"{request.get('organization') or 'user'}/{request['name']}"
            self.hub.repositories.setdefault(name, {})
            self.hub.private[name] = bool(request.get("private")) or request.get("visibility") == "private"
            self.json({"url": f"{self.hub.endpoint}/{name}", "name": name})
        elif parts[-1] == "validate-yaml":
            self.json({"errors": [], "warnings": []})
        elif "preupload" in parts:
            files = [
                {"path": one["path"], "uploadMode": _mode(one["path"]), "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            self.json({"files": files})
        elif parts[-2:] == ["objects", "batch"]:
            wanted = json.loads(body)["objects"]
            self.json({"transfer": "basic", "objects": [self.large_object(one) for one in wanted]})
        elif parts[:2] == ["large", "verify"]:
            known = self.hub.large.get(json.loads(body)["oid"])
            self.reply(200 if known is not None else 404, b"", {})
        elif "commit" in parts:
            for line in body.splitlines():
                item = json.loads(line)
                if item["key"] == "file":
                    content = base64.b64decode(item["value"]["content"])
                    self.hub.repositories[name][item["value"]["path"]] = content
                elif item["key"] == "lfsFile":
                    self.hub.repositories[name][item["value"]["path"]] = self.hub.large[item["value"]["oid"]]
            commit = self.hub.commit(name)
            self.json(
                {"commitUrl": f"{self.hub.endpoint}/{name}/commit/{commit}", "commitOid": commit, "success": True}
            )
        else:
            self.reply(404, b"", {})

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        oid = self.path.rpartition("/")[2]
        if hashlib.sha256(body).hexdigest() == oid:
            self.hub.large[oid] = body
            self.reply(200, b"", {})
        else:
            self.reply(400, b"", {})

    def large_object(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Return where an object of the large storage is to go; nowhere if it is there."""
        upload = {"href": f"{self.hub.endpoint}/large/{wanted['oid']}", "header": {}}
        verify = {"href": f"{self.hub.endpoint}/large/verify", "header": {}}
        return wanted | ({} if wanted["oid"] in self.hub.large else {"actions": {"upload": upload, "verify": verify}})

    def record(self, name: str) -> None:
        self.hub.requests.append((self.command, name, dict(self.headers.items())))

    def next_fault(self, name: str) -> Fault | None:
        faults = self.hub.faults[name]
        return faults.pop(0) if faults else None

    def json(self, value: Any) -> None:
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def reply(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _described(data: bytes, digest: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"size": len(data), digest: _oid(data)}
    if len(data) > MAX_IN_GIT:
        sha256 = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"sha256": sha256, "oid": sha256, "size": len(data), "pointerSize": 134}
    return entry


def _mode(path: str) -> str:
    return "lfs" if path.endswith((".birdie", ".safetensors")) else "regular"


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _unquoted(parts: list[str]) -> str:
    return "/".join(map(unquote, parts))
