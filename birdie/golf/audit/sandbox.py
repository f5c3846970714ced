"""Python in a sandbox: no network, a read-only file system, little memory and time, and a log of what is opened.

    with Sandbox(script, seconds=120) as box:
        box.ask("load")                    JSON in, JSON out; never pickle
        box.ask("score", [1, 2, 3])

The process fences itself in before it looks at the script (`inside`): Linux namespaces for users, network,
mounts and processes, resource limits, an empty environment, a scratch folder as its only place to write. Where that
is not possible nothing is run and `available` says why. When the time is over its whole namespace is killed.

What a sandbox cannot do: hide files from being read. The log of opened files is what the interpreter's audit hook
tells: code that opens files past Python, in C, is not in it.
"""

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from birdie.errors import BirdieError

GIB = 2**30
ANSWER_BYTES = 64 * 2**20
"""Most that one answer may be."""
FILE_BYTES = 64 * 2**20
"""Largest file that may be written to the scratch folder."""
SCRATCH_BYTES = 256 * 2**20
"""Most that all files there may have together; they are in memory."""
PROCESSES = 512
"""Most processes and threads; root's are not counted by Linux."""

INSIDE = Path(__file__).with_name("inside.py")


class SandboxError(BirdieError):
    """The script in the sandbox failed, or what it sent back is not an answer.

    Attributes:
        kind: the name of the script's own exception; "" if it was none.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class RefusedError(SandboxError):
    """There is no sandbox here."""


class OvertimeError(SandboxError):
    """The time is over."""


@dataclass(frozen=True, slots=True)
class Log:
    """What the interpreter saw.

    Attributes:
        opened: files that were opened for reading, the interpreter's own apart, and their bytes.
        tried: attempts at the network.
    """

    opened: dict[Path, int]
    tried: tuple[str, ...]


@functools.cache
def available() -> str | None:
    """Why there is no sandbox here; None: there is."""
    if not sys.platform.startswith("linux"):
        return f"sandboxes need Linux's namespaces, and this is {sys.platform}"
    try:
        with Sandbox(None, seconds=20):
            return None
    except SandboxError as error:
        return str(error)


class Sandbox:
    """A process that is shut in.

    Raises:
        RefusedError: on entering, where it cannot be shut in.
    """

    def __init__(self, script: Path | None, *, seconds: float = 120, memory: int = 4 * GIB) -> None:
        self.script = script.resolve() if script else None
        self.seconds, self.memory = seconds, memory
        self._scratch = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = self._answers = -1
        self._rest = b""
        self._until = 0.0

    def __enter__(self) -> Self:
        self._scratch = tempfile.mkdtemp(prefix="birdie-sandbox-")
        limits = {
            "cpu": int(self.seconds) + 5,
            "memory": self.memory,
            "file": FILE_BYTES,
            "scratch": SCRATCH_BYTES,
            "processes": PROCESSES,
        }
        source, self._asked = os.pipe()
        self._answers, sink = os.pipe()
        said = [str(source), str(sink), self._scratch, json.dumps(limits), str(self.script or "")]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(INSIDE), *said],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(source, sink),
                cwd=self._scratch,
                env=self._environment(),
                start_new_session=True,
            )
        finally:
            os.close(source)
            os.close(sink)
        self._until = time.monotonic() + self.seconds
        try:
            refused = self._answer().get("refused")
            if refused:
                raise RefusedError(str(refused))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._asked, self._answers):
            if pipe >= 0:
                os.close(pipe)
        self._asked = self._answers = -1
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def over(self) -> bool:
        """Whether the time is."""
        return time.monotonic() >= self._until

    def ask(self, what: str, *args: Any) -> Any:
        """Have the inside do one of the things it can.

        Raises:
            SandboxError: it failed there, died, or sent what is no answer.
            OvertimeError: the time is over.
        """
        try:
            self._write(json.dumps({"op": what, "args": args}).encode() + b"\n")
        except BrokenPipeError as error:
            raise SandboxError(self._died()) from error
        answer = self._answer()
        if "error" in answer:
            raise SandboxError(str(answer["error"]), str(answer.get("kind", "")))
        return answer.get("value")

    def log(self) -> Log:
        """What was opened and tried so far.

        Raises:
            SandboxError: as for `ask`.
        """
        told = self.ask("log")
        try:
            return Log({Path(path): int(size) for path, size in told["opened"]}, tuple(str(t) for t in told["tried"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise SandboxError("the script spoke out of turn: its log is none") from error

    def _environment(self) -> dict[str, str]:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        return {
            "PATH": os.defpath,
            "HOME": self._scratch,
            "TMPDIR": self._scratch,
            "LANG": "C.UTF-8",
            "CUDA_VISIBLE_DEVICES": "",
            **threads,
        }

    def _write(self, data: bytes) -> None:
        while data:
            if not select.select([], [self._asked], [], max(0.0, self._until - time.monotonic()))[1]:
                raise OvertimeError(f"the {self.seconds:g} s it may take are over")
            data = data[os.write(self._asked, data[:4096]) :]

    def _answer(self) -> dict[str, Any]:
        parts, size = [self._rest], len(self._rest)
        while b"\n" not in parts[-1]:
            left = self._until - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise OvertimeError(f"the {self.seconds:g} s it may take are over")
            part = os.read(self._answers, 1 << 16)
            if not part:
                raise SandboxError(self._died())
            size += len(part)
            if size > ANSWER_BYTES:
                raise SandboxError(f"its answer is larger than {ANSWER_BYTES:,} bytes")
            parts.append(part)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SandboxError("the script spoke out of turn: what it sent is no answer") from error
        if not isinstance(answer, dict):
            raise SandboxError("the script spoke out of turn: what it sent is no answer")
        return answer

    def _died(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(2)
        except subprocess.TimeoutExpired:
            return "it stopped answering"
        return f"its process ended, with code {code}: killed by a limit, or by itself"
