"""A stand-in for the model repositories of the Hugging Face Hub on 127.0.0.1: commits, large files, downloads."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ModelHub:
    """Repositories in memory.

    Attributes:
        repositories: name → path → bytes of each that was created.
        private: name → whether nobody else may read it.
        large: hash → bytes of the files that went to the large storage (Git LFS), as weights do.
        refused: the Hub answers every request with 403.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.large: dict[str, bytes] = {}
        self.refused = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("H", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def commit(self, name: str) -> str:
        """Return the commit of a repository."""
        files = self.repositories[name]
        return hashlib.sha1(b"".join(path.encode() + files[path] for path in sorted(files))).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: ModelHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if api else parts[:2])
        files = self.hub.repositories.get(name)
        if self.hub.refused or files is None:
            self.reply(
                403 if self.hub.refused else 404, b"", {} if self.hub.refused else {"X-Error-Code": "RepoNotFound"}
            )
        elif api:
            siblings = [{"rfilename": path, "size": len(data)} for path, data in sorted(files.items())]
            about = {
                "id": name,
                "sha": self.hub.commit(name),
                "siblings": siblings,
                "tags": [],
                "downloads": 0,
                "likes": 0,
            }
            if "tree" in parts:
                about = [
                    {"type": "file", "path": path, "size": len(files[path]), "oid": _oid(files[path])} for path in files
                ]  # type: ignore[assignment]
            self.json(about)
        else:
            path = "/".join(parts[4:])
            if path not in files:
                self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            headers = {"X-Repo-Commit": self.hub.commit(name), "ETag": f'"{_oid(files[path])}"'}
            self.reply(200, files[path], headers)

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


def _mode(path: str) -> str:
    return "lfs" if path.endswith((".birdie", ".safetensors")) else "regular"


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
