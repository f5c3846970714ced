"""Processes that die, as by kill -9, before a chosen call of the operating system.

They are forked from the server of tests/ranks.py, and the kernel releases their locks, as it does for any dead process.
"""

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Any

import torch

import tests.ranks  # noqa: F401  it says what the server imports

CALLS = ("open", "mkdir", "rename", "replace", "chmod", "chown", "unlink", "rmdir", "write")
"""System calls that change files; between two of them a death leaves the same files."""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def kill_at_each_call(work: Callable[..., None], *arguments: object) -> Iterator[int]:
    """Call `work` in one process after another; the n-th dies before its n-th call. Yield n after each death.

    Whoever iterates checks what is left and prepares the next attempt. The last process ends by itself.

    Args:
        work: function of a module.
        arguments: of `work`.
    """
    context = get_context("forkserver")
    for number in itertools.count():
        process = context.Process(target=_die, args=(number, work, arguments))
        process.start()
        process.join()
        code = process.exitcode
        process.close()
        yield number
        if code != -signal.SIGKILL:
            assert code == 0
            return


def _die(number: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    calls, opened = itertools.count(), os.open

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            reads = function is opened and not (args[1] if len(args) > 1 else options["flags"]) & WRITING
            if not reads and next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return call

    torch.set_num_threads(1)
    for name in CALLS:
        setattr(os, name, deadly(getattr(os, name)))
    work(*arguments)
    os._exit(0)  # the ends of threads and caches are not the subject
