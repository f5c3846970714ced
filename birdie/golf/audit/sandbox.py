"""Python in a sandbox: no network, a read-only file system, little memory and time, and a log of opened files.

    with Sandbox(script, seconds=120) as box:
        box.ask("load")                    JSON in, JSON out; never pickle
        box.ask("score", [1, 2, 3])

The process isolates itself before it reads the script (`sandbox_child`): Linux namespaces for users, network, mounts
and processes, resource limits, an empty environment, a scratch folder as the only one it can write to. Where that is
not possible nothing is run, and `unavailable` says why. When the time is over its whole namespace is killed.

A sandbox cannot keep files from being read. The log of opened files comes from the interpreter's audit hook, which
does not see code that opens files past Python, in C.
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
"""Limit of one answer."""
FILE_BYTES = 64 * 2**20
"""Limit of one file in the scratch folder."""
SCRATCH_BYTES = 256 * 2**20
"""Limit of all files there together; they are in memory."""
PROCESSES = 512
"""Limit of processes and threads; Linux does not count root's."""
CHILD = Path(__file__).with_name("sandbox_child.py")

_FORGED = "the script interfered: its answer has the wrong form"


class SandboxError(BirdieError):
    """The script in the sandbox failed, or its answer has the wrong form.

    Attributes:
        kind: the name of the script's exception; "" if there was none.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class RefusedError(SandboxError):
    """This machine has no sandbox."""


class OvertimeError(SandboxError):
    """The script's time is over."""


@dataclass(frozen=True, slots=True)
class Log:
    """The report of the interpreter's audit hook.

    Attributes:
        opened: files opened for reading, but for the interpreter's, and their bytes.
        network: attempts to use the network.
    """

    opened: dict[Path, int]
    network: tuple[str, ...]


@functools.cache
def unavailable() -> str | None:
    """Return why this machine has no sandbox; None if it has."""
    if not sys.platform.startswith("linux"):
        return f"sandboxes need Linux's namespaces, and this is {sys.platform}"
    try:
        with Sandbox(None, seconds=20):
            return None
    except SandboxError as error:
        return str(error)


class Sandbox:
    """An isolated process that runs a script.

    Raises:
        RefusedError: on entering, if the process cannot be isolated.
    """

    def __init__(self, script: Path | None, *, seconds: float = 120, memory: int = 4 * GIB) -> None:
        self.script = script.resolve() if script else None
        self.seconds, self.memory = seconds, memory
        self._scratch = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = self._answers = -1
        self._rest = b""
        self._end = 0.0

    def __enter__(self) -> Self:
        self._scratch = tempfile.mkdtemp(prefix="birdie-sandbox-")
        limits = {
            "cpu": int(self.seconds) + 5,
            "memory": self.memory,
            "file": FILE_BYTES,
            "scratch": SCRATCH_BYTES,
            "processes": PROCESSES,
        }
        source, self._requests = os.pipe()
        self._answers, sink = os.pipe()
        arguments = [str(source), str(sink), self._scratch, json.dumps(limits), str(self.script or "")]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(CHILD), *arguments],
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
        self._end = time.monotonic() + self.seconds
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
        for pipe in (self._requests, self._answers):
            if pipe >= 0:
                os.close(pipe)
        self._requests = self._answers = -1
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def expired(self) -> bool:
        """True when the time is over."""
        return time.monotonic() >= self._end

    def ask(self, operation: str, *args: Any) -> Any:
        """Call a method of `sandbox_child.Host` in the sandbox.

        Raises:
            SandboxError: it failed, the process died, or the answer has the wrong form.
            OvertimeError: the time is over.
        """
        try:
            self._write(json.dumps({"op": operation, "args": args}).encode() + b"\n")
        except BrokenPipeError as error:
            raise SandboxError(self._died()) from error
        answer = self._answer()
        if "error" in answer:
            raise SandboxError(str(answer["error"]), str(answer.get("kind", "")))
        return answer.get("value")

    def log(self) -> Log:
        """Return what was opened so far.

        Raises:
            SandboxError: as for `ask`.
        """
        log = self.ask("log")
        try:
            return Log({Path(path): int(size) for path, size in log["opened"]}, tuple(map(str, log["network"])))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise SandboxError(_FORGED) from error

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
            if not select.select([], [self._requests], [], max(0.0, self._end - time.monotonic()))[1]:
                raise OvertimeError(f"the {self.seconds:g} s it may take are over")
            data = data[os.write(self._requests, data[:4096]) :]

    def _answer(self) -> dict[str, Any]:
        parts, size = [self._rest], len(self._rest)
        while b"\n" not in parts[-1]:
            left = self._end - time.monotonic()
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
            raise SandboxError(_FORGED) from error
        if not isinstance(answer, dict):
            raise SandboxError(_FORGED)
        return answer

    def _died(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(2)
        except subprocess.TimeoutExpired:
            return "it stopped answering"
        return f"its process ended, with code {code}: killed by a limit, or by itself"
