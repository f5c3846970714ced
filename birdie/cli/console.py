"""Output of all commands: tables and results on stdout, progress and log lines on stderr, errors in one sentence.

With `--json` stdout carries exactly one JSON object, also after an error, and everything else goes to stderr.
"""

import atexit
import gc
import os
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

from cyclopts import App, CycloptsError, Group, Parameter
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from birdie.errors import BirdieError, ConfigError, OutputError
from birdie.gpt.run.recipe_file import HELP_ALL, CommandApp, Source, explain, read_arguments
from birdie.system import callbacks
from birdie.system.callbacks import Progress
from birdie.system.files import open_append
from birdie.system.names import shown
from birdie.system.outputs import require_file_name
from birdie.system.parsing import to_json
from birdie.system.platform import END_SIGNALS, end_this_process
from birdie.system.provenance import __version__

FLAT = Parameter(name="*")
"""Lets the fields of a dataclass be flags of the command itself."""

Json = Annotated[
    bool, Parameter(name="--json", negative=(), help="Print one JSON object on stdout, the rest on stderr.")
]

Output = Annotated[
    Path, Parameter(name=["-o", "--output"], converter=lambda _, tokens: require_file_name(tokens[0].value))
]
"""A file to write; `Annotated[Output, Parameter(help=…)]` describes it."""

Overwrite = Annotated[
    bool,
    Parameter(negative=(), help="Replace a file of another kind; in a folder, replace the files of the same names."),
]
"""Flag that lets an output be written where something else is."""


MaxOperations = Annotated[
    int | None,
    Parameter(help="Most operations, of about a nanosecond; default: 2 a decoded byte allowed, 65,536 a byte of file."),
]
MaxSize = Annotated[str | None, Parameter(help="Largest decoded size; default: 1 GiB, 64 × the file or 2 × its base.")]
ForeignSchemes = Annotated[
    tuple[str, ...],
    Parameter(negative=(), help="Schemes of other packages that the file may use. Their code is imported and run."),
]
"""Limits of whatever decodes a file."""


@contextmanager
def into_folder(folder: Path) -> Iterator[list[str]]:
    """Yield a list that has, after the body has written into `folder`, the names of the files that it left there."""
    inodes = {path: path.lstat().st_ino for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}
    left: list[str] = []
    yield left
    left += [
        path.relative_to(folder).as_posix()
        for path, number in sorted(inodes.items())
        if os.path.lexists(path) and path.lstat().st_ino == number
    ]


def print_left(folder: Path, left: Sequence[str]) -> None:
    """Print the names of files that an output left in its folder, if there are any."""
    if left:
        print_line(f"other files stay in {folder}: {listed(left)}")


def print_hidden(names: Sequence[str], *, as_json: bool) -> None:
    """Print the names of hidden files that were left out of a folder with content, if there are any."""
    if names and not as_json:
        print_line(f"left out: {listed(names)}; hidden files are written only into a new folder: -o NEW/")


def listed(names: Sequence[str]) -> str:
    """Return the first few of some names, and how many more there are."""
    text = ", ".join(plain(name).plain for name in names[:_MOST_LISTED])
    return text + (f" and {len(names) - _MOST_LISTED:,} more" * (len(names) > _MOST_LISTED))


def print_written(output: Path, text: str, facts: Mapping[str, Any], left: Sequence[str], *, as_json: bool) -> None:
    """Print a line about an output and the files left in its folder; or one JSON object with facts about it."""
    if as_json:
        print_json({"path": str(output), **facts, "left": left})
    else:
        print_left(output, left)
        print_line(f"{text}: {output}")


_MOST_LISTED = 8

_WIDEST = 100_000  # columns of a table that goes to no terminal

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


def version() -> str:
    """Return the version of birdie."""
    return __version__


def new_app(
    name: str,
    *,
    kind: type[App] = CommandApp,
    version: Callable[[], str] | None = None,
    config: Sequence[Source] = (),
    **options: Any,
) -> App:
    """Return a cyclopts application that leaves results, errors and Ctrl-C to `run`.

    Args:
        config: sources of settings below flags and environment variables, the first one first.
    """
    return kind(
        name=name,
        version=version,
        version_flags=() if version is None else ("--version",),
        group_commands=Group("Options", sort_key=100),  # --help and --version, below all other panels
        result_action="return_value",
        suppress_keyboard_interrupt=False,
        config=(*config, read_arguments),
        **options,
    )


def run(build: Callable[[Sequence[str]], tuple[App, list[str]]], tokens: Sequence[str]) -> int:
    """Run the command that `tokens` name; return the exit code."""

    def command() -> None:
        if any(not token and not flag.startswith("-") for flag, token in pairwise(("", *tokens))):
            raise ConfigError("an argument is empty; is a variable of the shell not set?")
        app, arguments = build(tokens)
        if isinstance(app, CommandApp) and HELP_ALL in arguments:
            app.shows_all = True
            arguments = ["--help" if token == HELP_ALL else token for token in arguments]
        app(arguments, exit_on_error=False, print_error=False)

    return exit_code_of(command, as_json=any(token.partition("=")[0] == "--json" for token in tokens))


def exit_code_of(command: Callable[[], None], *, as_json: bool = False) -> int:
    """Call `command`; return 0, 1 after an error (printed in one sentence), or 128 + the signal that ended it.

    SIGTERM and SIGHUP end it as Ctrl-C does: temporary files are removed, and one sentence is printed.

    Under torchrun every rank raises the same error: each prints it on stderr, and only rank 0 prints JSON.
    """
    as_json = as_json and os.environ.get("RANK", "0") == "0"
    _received[:] = [signal.SIGINT]
    try:
        with _on_signals(_end), _repeated_interrupts():
            command()
    except KeyboardInterrupt:
        number = _received[-1]
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if as_json:
            print_json({"error": {"type": "KeyboardInterrupt", "message": f"stopped by {name}"}})
        stderr.print(f"Stopped by {name}.")
        return 128 + number
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 0
    except CycloptsError as error:
        return _fail(ConfigError(explain(error)), as_json)
    except Exception as error:
        expected = isinstance(error, BirdieError | OSError | MemoryError) or _out_of_memory(error)
        if not expected:  # a bug in birdie: the report needs the traceback
            traceback.print_exc(file=sys.stderr)
        return _fail(error, as_json)
    return 0


def leave_imports_out(phase: str, _facts: Mapping[str, int]) -> None:
    """Leave what is there out of all searches for garbage, at the first one after torch was imported.

    An entry of `gc.callbacks`. Imports make 250,000 objects, which are no garbage, and Python would look at each twice.
    """
    if phase == "start" and "torch" in sys.modules:
        gc.callbacks.remove(leave_imports_out)
        gc.freeze()


def leave(code: int) -> NoReturn:
    """End the process with an exit code of `exit_code_of`."""
    if code <= 128 and not _is_rank():
        atexit.register(gc.freeze)  # else Python looks for garbage among all that torch made, to free what ends anyway
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    # Python that was interrupted below C code ends by SIGINT whatever sys.exit says, and sys.exit waits for threads. Of
    # a rank it would wait for NCCL, which waits for the other ranks, which wait for this one; and one rank in a dozen
    # aborts after Python has ended ("terminate called without an active exception"), which fails all of them.
    os._exit(code)


def _is_rank() -> bool:
    """Return whether this is one of several ranks; without torch it has not joined the others."""
    return os.environ.get("WORLD_SIZE", "1") != "1" and "torch" in sys.modules


def _out_of_memory(error: Exception) -> bool:
    # By name and message: importing torch for its class would slow down `birdie --help`, and on a CPU torch raises a
    # plain RuntimeError.
    in_torch = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and in_torch)


def _fail(error: Exception, as_json: bool) -> int:
    if _out_of_memory(error):
        message = "out of memory; use a smaller model, batch or file"
    elif isinstance(error, OSError) and not isinstance(error, BirdieError):
        message = f"{error.filename or 'a file'}: {(error.strerror or str(error)).lower()}"
    else:
        message = " ".join(str(error).split())
    if as_json:
        print_json({"error": {"type": type(error).__name__, "message": message}})
    else:
        stderr.print(Text.assemble(("error: ", "bold red"), shown(message)), soft_wrap=True)
    return 1


_log_files: list[Path] = []


def log(text: str) -> None:
    """Print one line on stderr, and append it to the file of `log_file`, if any."""
    text = shown(text, keep="\n\t")
    stderr.print(text, soft_wrap=True, markup=False)
    for path in _log_files:
        with suppress(OSError, OutputError), open_append(path) as file:  # a full disk must not end a run
            file.write(f"{text}\n".encode(errors="replace"))


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Also append to `path` what `log` prints in the body of the context."""
    open_append(path).close()
    _log_files.append(path)
    try:
        yield
    finally:
        _log_files.remove(path)


def print_json(answer: Mapping[str, Any]) -> None:
    """Print the one JSON object of a `--json` run; NaN and infinity, which JSON lacks, become null."""
    sys.stdout.write(to_json(answer, default=str) + "\n")  # ASCII only: safe in every encoding
    sys.stdout.flush()


def print_table(table: Table) -> None:
    """Print a table on stdout; where that is no terminal as wide as its cells, so that no name is wrapped."""
    if stdout.is_terminal:
        stdout.print(table)
        return
    room = Measurement.get(stdout, stdout.options.update(max_width=_WIDEST), table).maximum
    Console(file=stdout.file, highlight=False, width=max(room, stdout.width)).print(table)


def print_line(text: str) -> None:
    """Print a line on stdout without wrapping it, so that paths can be copied."""
    stdout.print(shown(text, keep="\n\t"), soft_wrap=True, markup=False)


def progress_bar(description: str, unit: str) -> AbstractContextManager[Progress]:
    """Show a progress bar on stderr, or lines where that is no terminal, and yield `update(done, total)`."""
    if not stderr.is_terminal and os.environ.get("RANK", "0") == "0":
        return nullcontext(callbacks.in_lines(log, description, unit))
    return callbacks.bar(description, unit, stderr)


def plain(name: str) -> Text:
    """Return a name from a file as text without markup, control characters escaped: they could steer the terminal."""
    return Text(shown(name))


def folder_of(files: int) -> str:
    """Return what an output is that is a folder of so many files."""
    return f"a folder of {files:,} file{'' if files == 1 else 's'}"


def size(value: int) -> str:
    """Return a number of bytes with thousands separators and unit."""
    return f"{value:,} B"


_received: list[int] = []
"""Signals that the command received; each becomes a KeyboardInterrupt, and the last one decides the exit code."""
_REPEAT_AFTER = 0.01  # seconds: when the code that cannot be interrupted has ended


def seconds(value: float) -> str:
    """Return a duration in seconds or minutes."""
    return f"{value:.2g} s" if value < 100 else f"{value / 60:.0f} min"


@contextmanager
def stop_on_signal(*, shown: bool = True) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after a first Ctrl-C, SIGTERM or SIGHUP; the second ends the command.

    Args:
        shown: whether to print what the signal does.
    """
    stopping = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        if stopping:
            _end(number, frame)
        stopping = True
        _receive(number)
        if shown:
            again = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            text = f"Stopping after this step ({again} again stops at once and saves nothing)\n"
            with suppress(OSError):  # past `stderr`, which may be in the middle of a line that would appear twice
                os.write(2, ("\n" * stderr.is_terminal + text).encode())

    with _on_signals(handle):
        yield lambda: stopping


def _end(number: int, _frame: FrameType | None) -> None:
    """End the command by a KeyboardInterrupt, which removes its temporary files; a further signal kills the process."""
    _receive(number)
    for name in END_SIGNALS:
        if signal.getsignal(name) is not signal.SIG_IGN:
            signal.signal(name, signal.SIG_DFL)
    raise KeyboardInterrupt


@contextmanager
def _repeated_interrupts() -> Iterator[None]:
    """Repeat a signal whose KeyboardInterrupt Python drops, as it does in `__del__` and below a callback of C code."""
    previous, repeats = sys.unraisablehook, list[threading.Timer]()

    def hook(dropped: "sys.UnraisableHookArgs") -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            previous(dropped)
            return
        signal.signal(_received[-1], _end)
        repeats.append(threading.Timer(_REPEAT_AFTER, end_this_process, [_received[-1]]))
        repeats[-1].start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = previous
        for repeat in repeats:
            repeat.cancel()
            repeat.join()


def _receive(number: int) -> None:
    _received.append(number)
    for output in (1, 2):  # the terminal whose end SIGHUP tells can no longer be written to, which must not end the run
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(output).st_mode) and not os.isatty(output):
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)


@contextmanager
def _on_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handle` at each signal that ends a process; only the main thread can, and nohup's SIGHUP stays ignored."""
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in END_SIGNALS:
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, action in previous.items():
            ended = signal.getsignal(number) is signal.SIG_DFL
            if not (ended and action is _end):  # the outer context is being left as well
                signal.signal(number, action or signal.SIG_DFL)
