"""The decoder in WebAssembly as a process that decodes one file after another; a fault ends with its file.

Python ──(limit, file)──► node served.mjs ──► tensors as digests, or why the file is refused
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
from birdie.standalone import DECODER, PROGRAM
from scripts import wasm
from tests.hostile.seeds import CHUNK, TILE

SECONDS = 30
"""After which a file makes the decoder hang."""
NOT_DECODED = "load it with birdie"
"""Part of every message about a file that birdie decodes and the decoder does not."""


class FaultError(Exception):
    """The decoder raised what is no sentence about a file, ended, or hung."""


class Decoder:
    """A process of Node that decodes files.

    Args:
        short: cut chunks and tiles as `seeds.short_chunks` does.
        program: the decoder, where they are not cut.
    """

    def __init__(self, *, short: bool = False, program: Path = PROGRAM) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._program = program
        if short:
            self._program = Path(self._folder.name) / "short.wasm"
            wasm.build(self._program, "-O3", f"-DBIRDIE_CHUNK={CHUNK}", f"-DBIRDIE_TILE={TILE}")
        self._process: subprocess.Popen[bytes] | None = None

    def tensors(self, data: bytes, max_bytes: int) -> dict[str, tuple[str, list[int], str]]:
        """Return name → (dtype, shape, SHA-256 of the elements); raise ArtifactError if the file is refused."""
        return {name: (dtype, shape, digest) for name, dtype, shape, digest in self._ask(data, max_bytes)["tensors"]}

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

    def _ask(self, data: bytes, limit: int) -> dict[str, Any]:
        answer = self._answer(struct.pack("<II", limit, len(data)) + data)
        if "fault" in answer:
            raise FaultError(f"the decoder in WebAssembly raised {answer['fault']}")
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
            raise FaultError(f"the decoder in WebAssembly {how}, exit code {process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        command = ["node", str(Path(__file__).with_name("served.mjs")), str(DECODER), str(self._program)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=_without_limit)


def is_installed() -> bool:
    """Return whether there is a Node to run."""
    return shutil.which("node") is not None


def is_compiler_installed() -> bool:
    """Return whether there is also a compiler, for a decoder of short chunks."""
    return is_installed() and wasm.is_installed()


def _without_limit() -> None:
    """Take back the limit of the fuzzer, whose address space would not do for Node."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
