"""Bytes that a submission ships: the script, the helper files it reads, and the model, against 16,000,000.

    train_gpt.py ──imports, file names in its text──► helper files of the folder ─┐
    model.birdie, final_model.int8.ptz, … or the size in the logs ────────────────┼──► bytes
    names and targets of links in the folder, if there are many ──────────────────┘

The challenge counts code and compressed model as they lie in the folder. Tokenizers, logs and data preparation were
never counted. Of a script that birdie packed the text of its modules is read, and its own bytes count.
"""

import contextlib
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from birdie.errors import DataError
from birdie.golf.audit.rules import SIZE, Finding, size_result
from birdie.golf.packed_script import is_packed, sources_of
from birdie.lab.logs import TrainingLog
from birdie.standalone import PACKAGE, code_bytes
from birdie.system.regular import open_regular

SCRIPT = "train_gpt.py"
MODELS = (".birdie", ".ptz", ".pt", ".pth", ".safetensors", ".xz", ".lzma", ".br", ".zst", ".bz2", ".npz", ".pkl")
"""Suffixes of files that may be the model."""
CODE = (".py", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".so", ".ptx", ".sh", ".js", ".rs")
"""Suffixes of files that count as code where the script names them."""
MAX_READ = 2_000_000
"""Bytes of a file of code in which other files are searched; all of its bytes count."""
STAT_BYTES = 4
"""Bytes of what a file tells beside its name and its content: its size, whether it can be executed."""


@dataclass(frozen=True, slots=True)
class Shipped:
    """The code and the model of a submission.

    Attributes:
        script: the entry point.
        code: the script and the helper files it reads, sorted.
        package_bytes: bytes of birdie's own sources that the script loads.
        model: the model's file; None if there is none.
    """

    script: Path
    code: tuple[Path, ...]
    package_bytes: int = 0
    model: Path | None = None

    @property
    def code_bytes(self) -> int:
        """Bytes of all code."""
        return self.package_bytes + sum(path.stat().st_size for path in self.code)


def script_and_model(folder: Path) -> tuple[Path | None, Path | None]:
    """Return the script and the model of a submission folder; None for what it has not."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    models = [path for path in files if path.suffix in MODELS]
    artifacts = [path for path in models if path.suffix == ".birdie"]
    # the smallest: beside an export may be the float model it was made of
    model = min(artifacts or models, key=lambda path: path.stat().st_size, default=None)
    scripts = [path for path in files if path.suffix == ".py"]
    named = [path for path in scripts if path.name == SCRIPT] or [path for path in scripts if "train" in path.name]
    return next(iter(named), None), model


def shipped(script: Path, model: Path | None = None) -> Shipped:
    """Return what a script ships: its code, with the helper files beside it that the code names, and a model."""
    others = {path for path in script.parent.iterdir() if path.is_file() and path.suffix in CODE} - {script}
    code, queue, package_bytes = {script}, [script], 0
    while queue:
        text = _text(path := queue.pop())
        if path == script and re.search(rf"^\s*(?:import|from)\s+{PACKAGE.name}\b", text, re.MULTILINE):
            package_bytes = code_bytes(script) - script.stat().st_size
        named = {other for other in others - code if _names(text, other)}
        code |= named
        queue += named
    return Shipped(script, tuple(sorted(code)), package_bytes, model)


def _text(path: Path) -> str:
    with open_regular(path) as file:
        data = file.read(MAX_READ)
    with contextlib.suppress(DataError):  # damaged: it is read as any other file
        if is_packed(data):
            return "\n".join(sources_of(data).values())
    return data.decode("utf-8", "replace")


def _names(text: str, path: Path) -> bool:
    """Return whether a text has the name of a file, or imports it."""
    imported = rf"\b(?:import|from)\s+(?:[\w., ]*[\s,.])?{re.escape(path.stem)}\b"
    return path.name in text or (path.suffix == ".py" and re.search(imported, text) is not None)


def check_size(files: Shipped, logs: Sequence[TrainingLog], folder: Path | None = None) -> Finding:
    """Return the size of what ships; the model's bytes are the logs' where its file is missing.

    Args:
        files: that ship.
        logs: of the same submission.
        folder: the submission folder; None for a script by itself.
    """
    listed, helpers, code = listed_bytes(folder) if folder else 0, len(files.code) - 1, files.code_bytes
    names = f"{files.script.name}{f' and {helpers} helper file' + 's' * (helpers > 1) if helpers else ''}"
    names += f", with {files.package_bytes:,} of birdie's sources" if files.package_bytes else ""
    model = max((round(log.model.value) for log in logs if log.model is not None), default=None)
    name = "the largest model logged"
    if files.model is not None:
        model, name = files.model.stat().st_size, f"model ({files.model.name})"
    if model is None:
        what = f"code as shipped ({names}), without the model, whose size is not known"
        result, evidence = size_result(code, what, listed)
        result = "unknown" if result == "pass" else result
    else:
        what = f"code as shipped ({names}) {code:,} and {name} {model:,}"
        result, evidence = size_result(code + model, what, listed)
    return Finding(SIZE, result, evidence, "files", str(files.script))


def listed_bytes(folder: Path) -> int:
    """Return the bytes that can be read in a folder without opening a file: names, sizes, and targets of links.

    Hidden folders, `__pycache__` and virtual environments are left out, and links are not followed.
    """
    size = 0
    for parent, folders, files, descriptor in os.fwalk(folder.resolve()):
        folders[:] = [name for name in folders if not _is_left_out(Path(parent, name))]
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):  # it has just gone
                status = os.lstat(name, dir_fd=descriptor)
                # POSIX: the size of a link is that of its target's name
                size += len(os.fsencode(name)) + (status.st_size if stat.S_ISLNK(status.st_mode) else STAT_BYTES)
    return size


def _is_left_out(folder: Path) -> bool:
    """Return whether a folder is hidden, of compiled code (which may be of another source), or Python's own."""
    return folder.name.startswith(".") or folder.name == "__pycache__" or (folder / "pyvenv.cfg").is_file()
