"""The JavaScript decoder as a process that decodes one file after another; a fault ends with its file.

Python ──(kind, limit, file)──► node served.mjs ──► tensors or streams as digests, or why the file is refused
"""

import json
import resource
import select
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from birdie.errors import ArtifactError
from tests.hostile.seeds import CHUNK, TILE

SECONDS = 30
"""After which a file makes the decoder hang."""
NOT_DECODED = "not decoded here"
"""Part of every message about a file that birdie decodes and JavaScript does not."""
_WEB = Path(__file__).resolve().parents[2] / "birdie" / "web"
_SHORT = {
    "alphabet.js": ("CHUNK = 1 << 20", f"CHUNK = {CHUNK}"),
    "tiles.js": ("TILE = 1024", f"TILE = {TILE}"),
}
"""Lengths as those of `tests.hostile.seeds.short_chunks`."""


class FaultError(Exception):
    """The decoder raised what is no sentence about a file, ended, or hung."""


class Decoder:
    """A process of Node that decodes files.

    Args:
        short: cut chunks and tiles as `seeds.short_chunks` does.
    """

    def __init__(self, *, short: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory()
        root = Path(self._folder.name)
        for path in (_WEB / "decoder.js", _WEB / "package.json", *(_WEB / "decoder").iterdir()):
            source = path.read_text(encoding="utf-8")
            if short and path.name in _SHORT:
                long, brief = _SHORT[path.name]
                assert source.count(long) == 1, path
                source = source.replace(long, brief)
            target = root / path.relative_to(_WEB)
            target.parent.mkdir(exist_ok=True)
            target.write_text(source, encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None

    def tensors(self, data: bytes, max_bytes: int) -> dict[str, tuple[str, list[int], str]]:
        """Return name → (dtype, shape, SHA-256 of the elements); raise ArtifactError if the file is refused."""
        return {name: (dtype, shape, digest) for name, dtype, shape, digest in self._ask(0, data, max_bytes)["tensors"]}

    def streams(self, data: bytes, most: int) -> list[tuple[str, str]]:
        """Return (name of the entry, SHA-256 of the values as int32) of every stream; raise as `tensors`."""
        return [(name, digest) for name, digest in self._ask(1, data, most)["streams"]]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def __enter__(self) -> "Decoder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._folder.cleanup()

    def _ask(self, kind: int, data: bytes, limit: int) -> dict[str, Any]:
        answer = self._answer(struct.pack("<III", kind, limit, len(data)) + data)
        if "fault" in answer:
            raise FaultError(f"the JavaScript decoder raised {answer['fault']}")
        if "refused" in answer:
            raise ArtifactError(answer["refused"])
        return answer

    def _answer(self, request: bytes) -> dict[str, Any]:
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], SECONDS)
            line = process.stdout.readline() if ready else b""
        except BrokenPipeError:
            line = b""
        if not line:
            how = "ended" if process.poll() is not None else f"hung for {SECONDS} s"
            self.close()
            raise FaultError(f"the JavaScript decoder {how}, exit code {process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        command = ["node", str(Path(__file__).with_name("served.mjs")), self._folder.name]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=_without_limit)


def is_installed() -> bool:
    """Return whether there is a Node to run."""
    return shutil.which("node") is not None


def _without_limit() -> None:
    """Take back the limit of the fuzzer, whose address space would not do for Node."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
