"""Python in a sandbox: a process that maps requests to answers over a pipe, and has nothing else.

    with Sandbox(script, seconds=120) as box:
        box.ask("load")                    JSON in, JSON out; never pickle
        box.ask("score", [1, 2, 3])
        box.opened()                       as the kernel reports it to this process

The process is isolated (`isolation`) before it reads the script: by bubblewrap, else by Linux namespaces set up by
birdie. It has no network and no sockets, a copy of the script's folder, Python and the system's libraries, and a
scratch folder in memory. Where neither way is possible nothing is run, and `unavailable` says why. Everything is judged
out here; what the process says about itself is not asked for. When the time is over, or its processes exceed a limit
together (`limits`), all of them are killed.
"""

import contextlib
import functools
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from birdie.errors import BirdieError
from birdie.golf.audit import isolation
from birdie.golf.audit.limits import Limits, Watch
from birdie.golf.audit.snapshot import Snapshot
from birdie.runtime.parsing import parse_object

GIB = 2**30
ANSWER_BYTES = 64 * 2**20
"""Limit of one answer."""
FILE_BYTES = 64 * 2**20
"""Limit of one file in the scratch folder."""
SCRATCH_BYTES = 256 * 2**20
"""Limit of all files there together; they are in memory."""
SCRATCH_FILES = 4096
"""Limit of their number."""
PROCESSES = 512
"""Limit of processes and threads together."""

_INTERFERED = "the script interfered: its answer has the wrong form"


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


class InterferedError(SandboxError):
    """An answer has the wrong form, or comes without a request; nothing more is asked."""

    def __init__(self) -> None:
        super().__init__(_INTERFERED)


class LimitError(SandboxError):
    """The script's time is over, or it takes more than it may."""


@functools.cache
def problem(way: str) -> str | None:
    """Return why one of `isolation.WAYS` is not possible on this machine; None if it is."""
    try:
        with Sandbox(None, seconds=20, way=way):
            return None
    except SandboxError as error:
        return str(error)


def unavailable() -> str | None:
    """Return why this machine has no sandbox; None if it has."""
    problems = []
    for way in isolation.WAYS:
        if (reason := problem(way)) is None:
            return None
        problems.append(f"{way}: {reason}")
    return "; ".join(problems)


class Sandbox:
    """An isolated process that runs a script.

    Attributes:
        way: how it is isolated, one of `isolation.WAYS`; None: the first that is possible.
    """

    def __init__(
        self, script: Path | None, *, seconds: float = 120, memory: int = 4 * GIB, way: str | None = None
    ) -> None:
        self.script, self.seconds, self.way = script, seconds, way
        self.limits = Limits(memory, PROCESSES, SCRATCH_BYTES, SCRATCH_FILES)
        self._folder: Path | None = None
        self._snapshot: Snapshot | None = None
        self._watch: Watch | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._remover: subprocess.Popen[bytes] | None = None
        self._requests = self._answers = -1
        self._stopped: SandboxError | None = None
        self._end = 0.0

    def __enter__(self) -> Self:
        if self.way is None:
            if (reason := unavailable()) is not None:
                raise RefusedError(reason)
            self.way = next(way for way in isolation.WAYS if problem(way) is None)
        # hidden, so that the snapshot of a script that lies in the temporary folder does not copy itself
        self._folder = Path(tempfile.mkdtemp(prefix=".birdie-sandbox-"))
        try:
            self._remover = _remover(self._folder)
            self._start(self.way)
        except (OSError, isolation.NotPossibleError) as error:
            self.__exit__(None, None, None)
            raise RefusedError(str(error)) from error
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.kill()
        if self._process is not None:
            if self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self._process.stderr is not None:
                self._process.stderr.close()
        for part in (self._watch, self._snapshot):
            if part is not None:
                part.close()
        self._watch = self._snapshot = None
        for pipe in (self._requests, self._answers):
            if pipe >= 0:
                os.close(pipe)
        self._requests = self._answers = -1
        if self._remover is not None:
            self._remover.communicate()
            self._remover = None

    @property
    def description(self) -> str:
        """Name of the isolation, and of what limits memory and processes."""
        cgroup = self._watch.cgroup if self._watch is not None else None
        return (
            f"{self.way}, {f'a control group (version {cgroup.version})' if cgroup else 'limits counted from outside'}"
        )

    @property
    def snapshot(self) -> Snapshot:
        """The script's folder as the sandbox has it."""
        assert self._snapshot is not None
        return self._snapshot

    def require_running(self) -> None:
        """Check that nothing has stopped the sandbox."""
        if self._stopped is None and time.monotonic() >= self._end:
            self._stopped = self._overtime()
        if isinstance(self._stopped, LimitError | InterferedError):
            raise self._stopped

    def ask(self, operation: str, *args: Any) -> Any:
        """Call a method of `sandbox_child.Host` in the sandbox."""
        if self._stopped is not None:
            raise self._stopped
        number = secrets.token_hex(8)
        try:
            if select.select([self._answers], [], [], 0)[0]:  # nothing was asked
                raise InterferedError if os.read(self._answers, 1) else self._died()
            self._write(json.dumps({"id": number, "op": operation, "args": args}).encode() + b"\n")
            answer = self._answer()
            if answer.get("id") != number:
                raise InterferedError
            if "error" in answer and (reason := self._exceeded()):
                raise LimitError(reason)
        except BrokenPipeError as error:
            self._stopped = self._died()
            raise self._stopped from error
        except SandboxError as error:
            self._stopped = error
            raise
        if "error" in answer:
            raise SandboxError(str(answer["error"]), str(answer.get("kind", "")))
        return answer.get("value")

    def interfered(self) -> InterferedError:
        """Return the error for an answer of the wrong form, and ask nothing more."""
        self._stopped = InterferedError()
        return self._stopped

    def opened(self) -> dict[str, int]:
        """Return which files of its folder were opened so far but for the script, and their bytes."""
        return self.snapshot.opened()

    def _start(self, way: str) -> None:
        assert self._folder is not None
        self._snapshot = Snapshot(self.script, self._folder / "submission")
        table = isolation.mounts(self._snapshot.folder, SCRATCH_BYTES)
        source, self._requests = os.pipe()
        self._answers, sink = os.pipe()
        filter_source, filter_sink = os.pipe()
        limits = {"cpu": int(self.seconds) + 5, "memory": self.limits.memory, "file": FILE_BYTES}
        script = f"{isolation.SUBMISSION}/{self._snapshot.script}" if self.script else ""
        inside = f"{isolation.INSIDE}/golf/audit/sandbox_child.py"
        command = [sys.executable, "-I", "-B", inside, str(source), str(sink), json.dumps(limits), script]
        try:
            launch = isolation.WAYS[way](table, command)
            os.write(filter_sink, launch.filter or b"")
            os.close(filter_sink)
            filter_sink = -1
            self._process = subprocess.Popen(
                [str(filter_source) if part == "{filter}" else part for part in launch.command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(source, sink, filter_source) if launch.filter else (source, sink),
                cwd="/",
                env=_environment(),
                start_new_session=True,
            )
        finally:
            for pipe in (source, sink, filter_source, filter_sink):
                if pipe >= 0:
                    os.close(pipe)
        self._end = time.monotonic() + self.seconds
        try:
            if self._answer() != {"ready": True}:
                raise InterferedError
        except SandboxError as error:
            raise RefusedError(self._last_words() or str(error)) from error
        self._watch = Watch(self._process.pid, self.limits, isolation.SCRATCH)

    def _last_words(self) -> str:
        """Return the last line of a process that could not be isolated."""
        assert self._process is not None
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        lines = (self._process.stderr.read() or b"").decode(errors="replace").splitlines()
        return lines[-1][:300] if lines else ""

    def _write(self, data: bytes) -> None:
        while data:
            if not select.select([], [self._requests], [], max(0.0, self._end - time.monotonic()))[1]:
                raise self._overtime()
            data = data[os.write(self._requests, data[:4096]) :]

    def _answer(self) -> dict[str, Any]:
        """Read one answer, which must be one line and nothing more."""
        parts, size = [b""], 0
        while b"\n" not in parts[-1]:
            left = self._end - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise self._overtime()
            part = os.read(self._answers, 1 << 16)
            if not part:
                raise self._died()
            size += len(part)
            if size > ANSWER_BYTES:
                raise SandboxError(f"its answer is larger than {ANSWER_BYTES:,} bytes")
            parts.append(part)
        line, _, rest = b"".join(parts).partition(b"\n")
        try:
            answer = parse_object(line)
        except ValueError as error:
            raise InterferedError from error
        if rest:
            raise InterferedError
        return answer

    def _exceeded(self) -> str:
        return self._watch.exceeded() if self._watch is not None else ""

    def _overtime(self) -> LimitError:
        return LimitError(f"the {self.seconds:g} s it may take are over")

    def _died(self) -> SandboxError:
        assert self._process is not None
        try:
            code = self._process.wait(2)
        except subprocess.TimeoutExpired:
            return SandboxError("it stopped answering")
        if reason := self._exceeded():
            return LimitError(reason)
        return SandboxError(f"its process ended, with code {code}: killed by a limit, or by itself")


def _remover(folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that removes a folder once its input ends: when it is closed, or this process was killed."""
    code = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
    command = [sys.executable, "-I", "-S", "-c", code, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, cwd="/", start_new_session=True)


def _environment() -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    folders = dict.fromkeys(("HOME", "TMPDIR"), isolation.SCRATCH)
    user = dict.fromkeys(("USER", "LOGNAME"), "nobody")
    return {"PATH": os.defpath, "LANG": "C.UTF-8", "CUDA_VISIBLE_DEVICES": "", **folders, **user, **threads}
