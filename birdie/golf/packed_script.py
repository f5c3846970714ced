"""birdie as one Python file: a recipe's training or scoring script, the pair, the decoder, without birdie installed.

    entry module ─► modules that it imports ─► without docstrings and comments, minified ─► one LZMA stream ─► FILE.py
                                                                                                │ python, torchrun
    entry ◄── import ◄── folder of modules in the user's cache ◄── written once ◄── start.py ◄──┘

The file counts as code by its own bytes. Of imports inside functions, a script of a recipe has those that the recipe
asks for (`_optional_modules`); the pair and the decoder have all but those of the packages that talk to people
(`_SHELL`). What is left out is a sentence where it is imported, and nothing follows it. Imports become relative, so
that the package may have a name of its own beside an installed birdie.
"""

import ast
import base64
import dataclasses
import hashlib
import inspect
import json
import lzma
import sys
import textwrap
from abc import ABC
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from birdie.compress import Scheme, parse_spec
from birdie.errors import ConfigError, DataError
from birdie.golf import start
from birdie.gpt.run.environment import DEAD
from birdie.gpt.run.recipe_loading import setting_variables
from birdie.gpt.run.recipe_settings import Recipe
from birdie.standalone import PACKAGE, behind, source_files
from birdie.system.door import for_types, offered
from birdie.system.files import read_trusted, user_cache, write_trusted
from birdie.system.provenance import versions

Kind = Literal["train", "score", "pair", "decoder"]

FIRST = "first stage"
"""Name of what a packed script runs first, among its sources."""
READ = {"SEED", "DATA_PATH", "TOKENIZER_PATH"}
"""Variables of settings that a packed script reads; RUN_ID, EVAL_ONLY_PATH, RESTORE and CAP_BYTES are no settings."""
MAX_SCRIPT, MAX_SOURCES = 500_000, 2_000_000
"""Most bytes of a script that is read, and of its sources."""

_KEPT = 2000  # texts of modules in the cache: minifying all of them takes seconds
_SHELL = tuple(f"{PACKAGE.name}.{name}" for name in ("cli", "golf", "lab"))
_EXPORT = "globals().update({name: getattr(entry, name) for name in entry.__all__})"
# Kind → entry module, and what runs with it as `entry`.
_ENTRIES: Mapping[Kind, tuple[str, str]] = {
    "train": ("golf.script_main", "entry.main(Path(__file__), folder, SETTINGS, FIXED)"),
    "score": ("golf.script_score", "entry.main()"),
    "pair": ("standalone.pair", f"entry.CODE.append(__file__)\n{_EXPORT}"),
    "decoder": ("standalone.decoder", f"{_EXPORT}\nif __name__ == '__main__': entry.main()"),
}
_ESCAPES = {"\0": "\\0", "\\": "\\\\", "\r": "\\r", "\n": "\\n"}


@dataclass(frozen=True, slots=True)
class PackedScript:
    """One Python file.

    Attributes:
        sources: path → text of each module that it unpacks, as the file has it.
        requirements: packages it needs, pinned to what is installed here, as lines of a requirements.txt.
        minified: False where python-minifier is not installed; the file is larger then.
        text: the same as ASCII text to paste into a script, larger by a quarter; it brings the names of a library.
    """

    script: bytes
    sources: dict[str, str]
    requirements: tuple[str, ...]
    minified: bool
    text: str = ""


def pack(kind: Kind, recipe: Recipe | None = None) -> PackedScript:
    """Return the file of a kind: the same birdie, recipe and packages give the same bytes.

    Args:
        kind: what the file does.
        recipe: of a script that trains or scores; its settings are the defaults of the script.
    """
    entry, run = _ENTRIES[kind]
    path = PACKAGE.joinpath(*entry.split(".")).with_suffix(".py")
    recipe = recipe or Recipe()
    optional = frozenset(_optional_modules(recipe)) if kind in ("train", "score") else None
    sources = _sources(path, optional)
    needed = _needed(path, optional, sources)
    values: dict[str, Any] = {}
    if kind == "train":
        values = {"SETTINGS": changed_settings(recipe), "FIXED": " ".join(sorted(fixed_variables()))}
    first = "\n".join(
        (
            _bare(Path(start.__file__)),
            *(f"{name} = {value!r}" for name, value in values.items()),
            f"entry, folder = start(PARTS[1:], {entry!r}, {' '.join(needed)!r})",
            run,
        )
    )
    # Tracebacks look up lines by number: these are below the last line of any script.
    parts = ["\n" * 9999 + _short(first), *(part for pair in sorted(sources.items()) for part in pair)]
    pinned = tuple(f"{name}=={metadata.version(name).partition('+')[0]}" for name in needed.values())
    return PackedScript(_script(parts), sources, pinned, _minifies(), _text(parts) if kind == "pair" else "")


def sources_of(script: bytes) -> dict[str, str]:
    """Return the source texts in a packed script by path, and what runs first as `FIRST`, without running anything."""
    if len(script) > MAX_SCRIPT:
        raise DataError(f"the packed script has {len(script):,} bytes, more than {MAX_SCRIPT:,}: it was not unpacked")
    try:
        strings = [node.value for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Constant)]
        packed = max((text for text in strings if isinstance(text, str)), key=len)
        decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=1 << 28)
        data = decompressor.decompress(packed.encode("latin-1"), MAX_SOURCES)
        if not decompressor.eof:
            raise ValueError(f"it is damaged, or has more than {MAX_SOURCES:,} bytes")
        first, *parts = data.decode().split("\0")
        return {FIRST: first.lstrip("\n"), **dict(zip(parts[::2], parts[1::2], strict=True))}
    except (ValueError, SyntaxError, RecursionError, MemoryError, lzma.LZMAError) as error:
        raise DataError(f"the packed script cannot be unpacked: {str(error)[:100] or type(error).__name__}") from error


def is_packed(script: bytes) -> bool:
    """Return whether a script says in its first line that birdie packed it."""
    return script.startswith(b"#birdie ")


def changed_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that are not the defaults of this birdie, which the script has, too."""
    return _different(recipe.to_dict(), Recipe().to_dict())


def _different(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _different(value, defaults[key]) if isinstance(value, dict) else value
        for key, value in values.items()
        if value != defaults.get(key)
    }


def _optional_modules(recipe: Recipe) -> Iterator[str]:
    """Yield the modules that a recipe asks for, of those that are imported inside functions or listed."""
    export, qat, mode = recipe.export, recipe.qat, recipe.evaluation.scoring_mode
    yield from ("birdie.gpt.model.loss_kernels", "birdie.compress.registry")
    yield "birdie.compress.schemes.cast"  # of small tensors
    if export.budget is not None:
        yield "birdie.compress.schemes.trellis"  # of matrices that a search may coarsen
    specs = (spec for _, spec in export.schemes())
    for spec in (*specs, *([qat.spec] if qat.enabled else [])):
        scheme: Scheme | None = parse_spec(spec)
        while scheme is not None:
            yield type(scheme).__module__
            parts = (getattr(scheme, setting.name) for setting in dataclasses.fields(scheme))  # type: ignore[arg-type]
            scheme = next((part for part in parts if isinstance(part, Scheme)), None)
    if qat.enabled:
        yield "birdie.small.qat.fake_quantization"
    if qat.budget:
        yield "birdie.small.stored_training"
    features = {
        "birdie.gpt.train.bandit": recipe.bandit.every > 0,
        "birdie.gpt.train.fp8": recipe.train.fp8,
        "birdie.gpt.train.measured_batches": recipe.train.micro_batch_tokens == "auto",
        "birdie.gpt.model.mlp_kernels": recipe.train.fused_mlp,
    }
    yield from (name for name, is_on in features.items() if is_on)
    if recipe.calibration.data == "own":
        yield "birdie.gpt.model.sampling"
    if recipe.evaluation.ngram.enabled:
        yield "birdie.gpt.score.ngram"
    for kind in type(mode).__mro__[:-1]:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind)))) if kind is not ABC else ():
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from _modules_of(node.module, node.names)


def fixed_variables() -> set[str]:
    """Return the environment variables that set recipes, but for those that a packed script reads."""
    return (setting_variables() - READ) - {name for row in DEAD for name in row.names}


def _sources(entry: Path, optional: Collection[str] | None) -> dict[str, str]:
    """Return path → short text of `entry` and the modules that it imports.

    Args:
        entry: where the program begins.
        optional: modules that count where they are imported inside functions; None: all but those of the shell.
    """
    if optional is None:
        files = source_files(entry, follow=lambda name: not name.startswith(_SHELL))
    else:
        files = source_files(entry, follow=optional.__contains__, listed=optional.__contains__)
    names = [path.relative_to(PACKAGE.parent).as_posix() for path in files]
    return dict(zip(names, _short_texts(files), strict=True))


def _short_texts(files: Sequence[Path]) -> list[str]:
    """Return the short text of each module, those that were made before from a file in the user's cache."""
    how = hashlib.sha256(Path(__file__).read_bytes())
    how.update(repr((sys.version, _minifies() and metadata.version("python_minifier"))).encode())
    absent = {file: _absent(file, files) for file in files}
    names = [f"{file.relative_to(PACKAGE)}\0{absent[file]}\0".encode() for file in files]
    keys = [hashlib.sha256(name + file.read_bytes()).hexdigest() for name, file in zip(names, files, strict=True)]
    path = user_cache() / "packed" / f"{how.hexdigest()[:16]}.json"
    texts: dict[str, str] = {}
    try:
        check, _, content = read_trusted(path).partition(b"\n")
        if check == hashlib.sha256(how.digest() + content).hexdigest().encode():  # else damaged, or another's
            texts = json.loads(content)
    except (OSError, ValueError):
        pass
    new = {key: _short(_bare(file, absent[file])) for key, file in zip(keys, files, strict=True) if key not in texts}
    if new:
        texts = dict([*texts.items(), *new.items()][-_KEPT:])
        content = json.dumps(texts).encode()
        with suppress(OSError):
            write_trusted(path, hashlib.sha256(how.digest() + content).hexdigest().encode() + b"\n" + content)
    return [texts[key] for key in keys]


def _absent(path: Path, files: Collection[Path]) -> list[str]:
    """Return the dotted names of the modules that functions of a module import and `files` leave out."""
    late = [
        node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.ImportFrom) and node.col_offset
    ]
    names = {
        name
        for node in late
        if node.module and node.module.partition(".")[0] == PACKAGE.name
        for module in _modules_of(node.module, node.names)
        for name in (module, *(f"{module}.{alias.name}" for alias in node.names))
    }
    modules = {name: PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py") for name in names}
    return sorted(name for name, file in modules.items() if file.is_file() and file not in files)


def _modules_of(module: str, names: Sequence[ast.alias]) -> list[str]:
    """Return the modules that an import asks for: those behind the door of a package, else the one it names."""
    homes = behind(module)
    return list(dict.fromkeys(homes[alias.name][0] if alias.name in homes else module for alias in names))


def _bare(path: Path, absent: Collection[str] = ()) -> str:
    """Return the source of a module without comments, docstrings, what only type checkers read and what cannot run.

    Args:
        absent: modules that the script leaves out: importing one raises an error, so nothing after it runs.
    """
    level = len(path.relative_to(PACKAGE).parts)
    source = path.read_bytes()
    if path.name == "__init__.py" and offered(source.decode()):  # a door: what is packed imports from behind it
        return ""
    tree = ast.fix_missing_locations(_Bare(level, absent).visit(ast.parse(source)))
    return ast.unparse(_without_unused(tree))


def _without_unused(tree: ast.Module) -> ast.Module:
    """Remove imports of other packages that nothing uses any more, such as those of annotations."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in list(tree.body):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module != "__future__":
            node.names = [alias for alias in node.names if (alias.asname or alias.name) in used]
            if not node.names:
                tree.body.remove(node)
    return tree


class _Bare(ast.NodeTransformer):
    """Removes docstrings, `if TYPE_CHECKING:` and help texts, and makes imports of birdie relative.

    Args:
        level: folders between the module and the package.
        absent: modules after whose import a block ends.
    """

    def __init__(self, level: int, absent: Collection[str]) -> None:
        self.level, self.absent = level, absent

    def generic_visit(self, node: ast.AST) -> ast.AST:
        lines = getattr(node, "body", None)
        for i, line in enumerate(lines if isinstance(lines, list) else ()):
            if isinstance(line, ast.ImportFrom) and self._asks(line) & {*self.absent}:
                del node.body[i + 1 :]  # type: ignore[attr-defined]
                break
        super().generic_visit(node)
        if not isinstance(node, ast.Module) and getattr(node, "body", None) == []:
            node.body = [ast.Pass()]  # type: ignore[attr-defined]
        return node

    def _asks(self, line: ast.ImportFrom) -> set[str]:
        modules = _modules_of(str(line.module), line.names)
        return {name for module in modules for name in (module, *(f"{module}.{alias.name}" for alias in line.names))}

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        return [self.visit(part) for part in node.orelse] if for_types(node) else self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        is_help = (
            isinstance(node.value, ast.Name) and node.value.id == "Annotated" and isinstance(node.slice, ast.Tuple)
        )
        return self.visit(node.slice.elts[0]) if is_help else self.generic_visit(node)  # type: ignore[attr-defined]

    def visit_Import(self, node: ast.Import) -> ast.AST:
        if any(alias.name.partition(".")[0] == PACKAGE.name for alias in node.names):
            raise ConfigError(f"`{ast.unparse(node)}` cannot become relative; write `from birdie… import …`")
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.stmt]:
        first, _, rest = (node.module or "").partition(".")
        if first != PACKAGE.name:
            return node
        homes = behind(str(node.module))  # doors are empty in a script: each name comes from where it is defined
        if any(alias.name in homes for alias in node.names):
            return [self._from(*homes.get(alias.name, (str(node.module), alias.name)), alias) for alias in node.names]
        node.module, node.level = rest or None, self.level
        return node

    def _from(self, module: str, name: str, alias: ast.alias) -> ast.ImportFrom:
        local = alias.asname or alias.name
        names = [ast.alias(name, None if local == name else local)]
        return ast.ImportFrom(module.partition(".")[2] or None, names, self.level)


def _minifies() -> bool:
    return find_spec("python_minifier") is not None


def _short(source: str) -> str:
    """Return shorter source text, if python-minifier is installed: `pip install 'birdie-compress[submit]'`."""
    if not _minifies():
        return source
    from python_minifier import RemoveAnnotationsOptions, minify

    # Annotations of fields are what settings are read by; nothing reads those of functions and variables.
    unread = RemoveAnnotationsOptions(
        remove_variable_annotations=True,
        remove_return_annotations=True,
        remove_argument_annotations=True,
        remove_class_attribute_annotations=False,
    )
    return minify(source, rename_globals=False, hoist_literals=False, remove_annotations=unread)


def _needed(entry: Path, optional: Collection[str] | None, sources: Mapping[str, str]) -> dict[str, str]:
    """Return the packages that `entry` cannot be imported without: name → distribution, sorted."""
    imported: set[str] = set()
    for path in source_files(entry, follow=lambda _: False, listed=lambda name: optional is None or name in optional):
        imported |= _imported_at_once(sources[path.relative_to(PACKAGE.parent).as_posix()])
    builtin = {PACKAGE.name, "llvmlite", *sys.stdlib_module_names}  # numba brings the llvmlite that it works with
    installed = _distributions()
    return {name: installed[name][0] for name in sorted(imported - builtin) if name in installed}


@lru_cache(maxsize=1024)
def _imported_at_once(source: str) -> set[str]:
    """Return the names of the packages that a module imports outside functions."""
    packages: set[str] = set()
    for node in ast.parse(source).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
        packages |= {name.partition(".")[0] for name in names}
    return packages


_distributions = cache(metadata.packages_distributions)  # it reads the list of files of each package, a second


def _script(parts: list[str]) -> bytes:
    """Return the file: in Latin-1 every byte is a letter, so a literal holds compressed bytes but for a few escapes."""
    lines = (
        f"#birdie {versions()['birdie']} coding:L1",
        "import lzma",
        f"PARTS={_literal(_compressed(parts))}",
        "try:PARTS=lzma.decompress(PARTS.encode('L1')).decode().split('\\0')",
        "except lzma.LZMAError as error:raise ImportError(f'this file is damaged ({error}); pack it again')",
        "exec(compile(PARTS[0],__file__,'exec'))",
    )
    return "\n".join(lines).encode("latin-1")


def _text(parts: list[str]) -> str:
    """Return lines that define `export` and `load` in whichever script they stand, and one more name, `birdie_pair`.

    The code has a namespace of its own, and does not inherit the script's future imports.
    """
    lines = (
        f"# birdie {versions()['birdie']}: export(state, budget, path), load(path); errors: birdie_pair['BirdieError']",
        "import base64, lzma",
        f"birdie_pair = base64.b85decode('{base64.b85encode(_compressed(parts)).decode()}')",
        "birdie_pair = {'PARTS': lzma.decompress(birdie_pair).decode().split('\\0'), '__name__': 'birdie_pair'}",
        "birdie_pair['__file__'] = __file__",
        "exec(compile(birdie_pair['PARTS'][0], __file__, 'exec', dont_inherit=True), birdie_pair)",
        "export, load = birdie_pair['export'], birdie_pair['load']",
    )
    return "\n".join(lines) + "\n"


def _compressed(parts: list[str]) -> bytes:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 21, "pb": 0}]
    return lzma.compress("\0".join(parts).encode(), lzma.FORMAT_XZ, lzma.CHECK_SHA256, filters=filters)


def _literal(data: bytes) -> str:
    """Return a string literal whose characters are the bytes `data`, for source in Latin-1."""
    text = data.decode("latin-1")
    parts = []
    for letter, following in zip(text, [*text[1:], ""], strict=True):
        if letter == "\0" and following in "01234567":  # a digit after \0 would become part of the escape
            parts.append("\\x00")
        elif letter == "'" and following in "'":  # two quotes in a row, or one at the end
            parts.append("\\'")
        else:
            parts.append(_ESCAPES.get(letter, letter))
    return f"'''{''.join(parts)}'''"
