"""Bytes that a submission ships: the script, the helper files it reads, and the model, against 16,000,000.

    train_gpt.py ──imports, file names in strings──► helper files of the folder ─┐
    model.birdie, final_model.int8.ptz, … or the size in the logs ───────────────┼──► bytes
    names and targets of links in the folder, if there are many ─────────────────┘

The challenge counts code and compressed model as they lie in the folder. Tokenizers, logs and data preparation were
never counted; what minifying would save does not count either, and is reported apart. Modules inside a packed script
are read as sources, and count with the script's own bytes.
"""

import ast
import contextlib
import itertools
import lzma
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from birdie.errors import DataError
from birdie.golf.audit.rules import SIZE, Finding, size_result
from birdie.golf.audit.source import MAX_BYTES, Source, parse_source, read_source
from birdie.lab.logs import TrainingLog
from birdie.standalone.code_size import PACKAGE, code_bytes

SCRIPT, CLAIM = "train_gpt.py", "submission.json"
MODELS = (".birdie", ".ptz", ".pt", ".pth", ".safetensors", ".xz", ".lzma", ".br", ".zst", ".bz2", ".npz", ".pkl")
"""Suffixes of files that may be the model."""
CODE = (".py", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".so", ".ptx", ".sh", ".js", ".rs")
"""Suffixes of files that count as code where evaluation reads them."""
MAX_PARSED = 4 * MAX_BYTES
"""Bytes of a script and its helper files that are parsed; all are counted."""
MAX_DEPTH = 64
"""Folders within folders that are looked into."""
STAT_BYTES = 4
"""Bytes of what a file tells beside its name and its content: its size, whether it can be executed."""


@dataclass(frozen=True, slots=True)
class Shipped:
    """The code and the model of a submission.

    Attributes:
        script: the entry point; None if there is none.
        sources: the Python files among the code, and the modules in a packed script, as paths below it.
        code: the script and the helper files it reads, sorted.
        package_bytes: bytes of birdie's own sources that the script loads.
        model: the model's file; None if there is none.
        folder: the submission folder; None for a script by itself.
    """

    script: Path | None
    sources: Mapping[Path, Source]
    code: tuple[Path, ...] = ()
    package_bytes: int = 0
    model: Path | None = None
    folder: Path | None = None

    @property
    def code_bytes(self) -> int:
        """Bytes of all code."""
        return self.package_bytes + sum(path.stat().st_size for path in self.code)


def shipped_folder(folder: Path) -> Shipped:
    """Return the code and the model that `folder` ships."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    models = [path for path in files if path.suffix in MODELS]
    artifacts = [path for path in models if path.suffix == ".birdie"]
    # the smallest: beside an export may be the float model it was made of
    model = min(artifacts or models, key=lambda path: path.stat().st_size, default=None)
    scripts = [path for path in files if path.suffix == ".py"]
    named = [path for path in scripts if path.name == SCRIPT] or [path for path in scripts if "train" in path.name]
    only = scripts if len(scripts) == 1 and any(path.name == CLAIM for path in files) else []
    script = next(iter(named or only), None)
    return Shipped(None, {}, model=model) if script is None else _shipped(script, files, model, folder)


def shipped_script(script: Path) -> Shipped:
    """Return the code of a script by itself: it and the helper files beside it that it reads."""
    return _shipped(script, sorted(path for path in script.parent.iterdir() if path.is_file()))


def _shipped(script: Path, files: Sequence[Path], model: Path | None = None, folder: Path | None = None) -> Shipped:
    by_name = {path.name: path for path in files if path.suffix in CODE}
    code, queue, left = {script}, [script], MAX_PARSED
    sources: dict[Path, Source] = {}
    while queue:
        path = queue.pop()
        if path.suffix == ".py":
            source = sources[path] = read_source(path, min(MAX_BYTES, left))
            left -= len(source.data)
            inner = {path / name: parse_source(text.encode()) for name, text in source.modules.items()}
            sources |= inner
            names = {name for part in (source, *inner.values()) for name in _mentioned(part)}
            new = {by_name[name] for name in names if name in by_name} - code
            code |= new
            queue += new
    package = PACKAGE.name in {name.split(".")[0] for name in _imported(sources[script])}
    package_bytes = code_bytes(script) - script.stat().st_size if package else 0
    return Shipped(script, sources, tuple(sorted(code)), package_bytes, model, folder)


def _imported(source: Source) -> Iterator[str]:
    """Yield the modules that a source imports; of `from . import name`, the name."""
    for node in ast.walk(source.tree) if source.tree is not None else ():
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from [node.module] if node.module else [alias.name for alias in node.names]


def _mentioned(source: Source) -> Iterator[str]:
    """Yield file names that a source imports or has in a string."""
    yield from (f"{name.split('.')[0]}.py" for name in _imported(source))
    for node in ast.walk(source.tree) if source.tree is not None else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 4096:
            yield Path(node.value).name if "\0" not in node.value else ""


def packed_bytes(source: Source) -> int:
    """Return the bytes of `source` under LZMA, as one-file submissions carry it."""
    filters = [{"id": lzma.FILTER_LZMA1, "preset": 9, "dict_size": max(4096, len(source.data))}]  # 64 MiB otherwise
    return len(lzma.compress(source.data, format=lzma.FORMAT_ALONE, filters=filters))


def is_packed(source: Source) -> bool:
    """Return whether a script is a wrapper around compressed code: one constant is more than half of it."""
    if source.tree is None:
        return False
    begins = [0, *itertools.accumulate(map(len, source.data.splitlines(keepends=True)))]
    lengths = (
        begins[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0) - begins[node.lineno - 1] - node.col_offset
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )
    return max(lengths, default=0) > source.size // 2


def check_size(shipped: Shipped, logs: Sequence[TrainingLog], shown: str) -> tuple[Finding, ...]:
    """Return the size of what lies in the folder; the model's bytes are the logs' where its file is missing."""
    if shipped.script is None:
        return ()
    listed = listed_bytes(shipped.folder) if shipped.folder is not None else 0
    helpers, code = len(shipped.code) - 1, shipped.code_bytes
    files = f"{shipped.script.name}{f' and {helpers} helper file' + 's' * (helpers > 1) if helpers else ''}"
    files += f", with {shipped.package_bytes:,} of birdie's sources" if shipped.package_bytes else ""
    logged = [round(log.model.value) for log in logs if log.model is not None]
    model, name = max(logged, default=None), "the largest model logged"
    if shipped.model is not None:
        model, name = shipped.model.stat().st_size, f"model ({shipped.model.name})"
    if model is None:
        name = f"code as shipped ({files}), without the model, whose size is not known"
        result, evidence = size_result(code, name, listed)
        result = "unknown" if result == "pass" else result
    else:
        result, evidence = size_result(code + model, f"code as shipped ({files}) {code:,} and {name} {model:,}", listed)
    source = shipped.sources[shipped.script]
    if source.program is not None and not is_packed(source):
        minified = len(source.program.encode("utf-8", "replace"))
        evidence += f"; without comments the script would have {minified:,} and packed {packed_bytes(source):,}"
    return (Finding(SIZE, result, evidence, "files", shown),)


def listed_bytes(folder: Path) -> int:
    """Return the bytes that can be read in a folder without opening a file: names, sizes, and targets of links.

    Hidden folders, `__pycache__` and virtual environments are left out, and links are not followed.
    """
    size, folder = 0, folder.resolve()
    for parent, folders, files, descriptor in os.fwalk(folder):
        folders[:] = [name for name in folders if not _is_left_out(name, descriptor)]
        inner = False
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):  # it has just gone
                status = os.lstat(name, dir_fd=descriptor)
                # POSIX: the size of a link is that of its target's name
                size += len(os.fsencode(name)) + (status.st_size if stat.S_ISLNK(status.st_mode) else STAT_BYTES)
                inner |= stat.S_ISDIR(status.st_mode)
        if inner and len(Path(parent).relative_to(folder).parts) == MAX_DEPTH:
            raise DataError(f"{folder} has folders nested more than {MAX_DEPTH} deep; move them out of it")
    return size


def _is_left_out(name: str, parent: int) -> bool:
    """Return whether a folder is hidden, of compiled code (which may be of another source), or Python's own."""
    if name.startswith(".") or name == "__pycache__":
        return True
    try:
        os.stat(f"{name}/pyvenv.cfg", dir_fd=parent, follow_symlinks=False)
    except OSError:
        return False
    return True
