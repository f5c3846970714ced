"""What a submission really ships, code and model; what minifying would save stands apart, as it does not count.

    train_gpt.py ──imports, file names in strings──► helper files of the folder ─┐
    model.birdie, final_model.int8.ptz, … or what the log weighs ────────────────┴──► bytes, held against 16,000,000

The challenge counts bytes of code and of the compressed model as they lie in the folder. Tokenizers, logs and data
preparation were never counted.
"""

import ast
import itertools
import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from birdie.golf.audit.logged import against_cap_bytes
from birdie.golf.audit.logs import TrainingLog
from birdie.golf.audit.rules import SIZE, Finding
from birdie.golf.audit.source import MOST, Source, read_source
from birdie.golf.code_size import PACKAGE, code_bytes

SCRIPT, CLAIM = "train_gpt.py", "submission.json"
MODELS = (".birdie", ".ptz", ".pt", ".pth", ".safetensors", ".xz", ".lzma", ".br", ".zst", ".bz2", ".npz", ".pkl")
"""Ends of files that may be the model."""

CODE = (".py", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".so", ".ptx", ".sh", ".js", ".rs")
"""Ends of files that count as code where evaluation reads them."""

MOST_TOGETHER = 4 * MOST
"""Bytes of a script and its helper files that are parsed; all are counted."""


@dataclass(frozen=True, slots=True)
class Shipped:
    """What is in the folder.

    Attributes:
        script: the entry point.
        code: it and the helper files it reads, sorted.
        ours: bytes of birdie's own sources that it loads besides; 0: it does not.
        model: the model's file; None: there is none.
        models: all files that may be one.
        sources: of the code that is Python.
        alone: whether a script was given, not its folder: no model is looked for.
    """

    script: Path | None
    code: tuple[Path, ...]
    ours: int
    model: Path | None
    models: tuple[Path, ...]
    sources: Mapping[Path, Source]
    alone: bool = False

    @property
    def code_bytes(self) -> int:
        """Of all code."""
        return self.ours + sum(path.stat().st_size for path in self.code)


def look(folder: Path) -> Shipped:
    """What `folder` ships."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    script = _script(files)
    models = tuple(path for path in files if path.suffix in MODELS)
    if script is None:
        return Shipped(None, (), 0, _model(models), models, {})
    code, sources = _reached(script, files)
    return Shipped(script, code, _ours(script, sources[script]), _model(models), models, sources)


def of_script(script: Path) -> Shipped:
    """What `script` is by itself: it and the helper files beside it that it reads."""
    files = sorted(path for path in script.parent.iterdir() if path.is_file())
    code, sources = _reached(script, files)
    return Shipped(script, code, _ours(script, sources[script]), None, (), sources, alone=True)


def _script(files: Sequence[Path]) -> Path | None:
    scripts = [path for path in files if path.suffix == ".py"]
    named = [path for path in scripts if path.name == SCRIPT]
    trains = [path for path in scripts if "train" in path.name]
    claimed = any(path.name == CLAIM for path in files)
    return next(iter(named or trains or (scripts if len(scripts) == 1 and claimed else [])), None)


def _model(models: Sequence[Path]) -> Path | None:
    """The .birdie file, else the smallest: beside an export may lie the float model it was made of."""
    ours = [path for path in models if path.suffix == ".birdie"]
    return min(ours or models, key=lambda path: path.stat().st_size, default=None)


def _reached(script: Path, files: Sequence[Path]) -> tuple[tuple[Path, ...], dict[Path, Source]]:
    """The script and the files of its folder that it imports or names, and those that they do; those in Python read."""
    by_name = {path.name: path for path in files if path.suffix in CODE}
    found, queue, left = {script}, [script], MOST_TOGETHER
    sources: dict[Path, Source] = {}
    while queue:
        path = queue.pop()
        if path.suffix != ".py":
            continue
        source = sources[path] = read_source(path, min(MOST, left))
        left -= len(source.data)
        for name in _mentioned(source):
            named = by_name.get(name)
            if named is not None and named not in found:
                found.add(named)
                queue.append(named)
    return tuple(sorted(found)), sources


def _mentioned(source: Source) -> Iterator[str]:
    """File names that a source imports or has in a string."""
    if source.tree is None:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (f"{alias.name.split('.')[0]}.py" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield f"{(node.module or '').split('.')[0]}.py"
            yield from (f"{alias.name}.py" for alias in node.names if node.level and not node.module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 4096:
            yield Path(node.value).name if "\0" not in node.value else ""


def _ours(script: Path, source: Source) -> int:
    """Bytes of birdie's own sources that a script imports."""
    named = [
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(source.tree or ast.Module([], []))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    if not any(name.split(".")[0] == PACKAGE.name for name in named):
        return 0
    return code_bytes(script) - script.stat().st_size


def minified(source: Source) -> int | None:
    """Bytes of `source` without comments, docstrings and blank lines; None: it is not Python."""
    program = source.program
    return None if program is None else len(program.encode("utf-8", "replace"))


def packed(source: Source) -> int:
    """Bytes of `source` by LZMA, as one-file submissions carry it."""
    enough = {"id": lzma.FILTER_LZMA1, "preset": 9, "dict_size": max(4096, len(source.data))}  # 64 MiB unless said
    return len(lzma.compress(source.data, format=lzma.FORMAT_ALONE, filters=[enough]))


def is_packed(source: Source) -> bool:
    """Whether a script is a wrapper around compressed code: nearly all of it is one string or one run of bytes."""
    if source.tree is None:
        return False
    begins = [0, *itertools.accumulate(map(len, source.data.splitlines(keepends=True)))]
    lengths = (
        begins[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0) - begins[node.lineno - 1] - node.col_offset
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )
    return max(lengths, default=0) > source.size // 2


def findings(shipped: Shipped, logs: Sequence[TrainingLog], shown: str) -> tuple[Finding, ...]:
    """SIZE of what lies in the folder; the model's bytes are the logs' where its file is not there."""
    if shipped.script is None:
        return ()
    source = shipped.sources[shipped.script]
    code = shipped.code_bytes
    helpers = len(shipped.code) - 1
    files = f"{shipped.script.name}{f' and {helpers} helper file' + 's' * (helpers > 1) if helpers else ''}"
    files += f", {shipped.ours:,} of birdie's sources with it" if shipped.ours else ""
    without = minified(source)
    apart = ""
    if without is not None and not is_packed(source):
        apart = f"; without comments the script has {without:,} and packed {packed(source):,}, which counts for nothing"
    model, of_model = _model_bytes(shipped, logs)
    if model is None:
        verdict, said = against_cap_bytes(code, f"code as shipped ({files})")
        said = f"{said}{apart}; how large the model is cannot be told"
        return (Finding(SIZE, "fail" if verdict == "fail" else "unknown", said, "files", shown),)
    what = f"code as shipped ({files}) {code:,} and {of_model} {model:,}"
    verdict, said = against_cap_bytes(code + model, what)
    return (Finding(SIZE, verdict, said + apart, "files", shown),)


def _model_bytes(shipped: Shipped, logs: Sequence[TrainingLog]) -> tuple[int | None, str]:
    if shipped.model is not None:
        return shipped.model.stat().st_size, f"model ({shipped.model.name})"
    weighed = [round(log.model.value) for log in logs if log.model is not None]
    return (max(weighed), "the largest model logged") if weighed else (None, "")
