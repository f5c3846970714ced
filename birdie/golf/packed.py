"""A recipe as one script: `train_gpt.py` with the modules of birdie that the recipe needs, without birdie installed.

    recipe ─► which features ─► shaken modules ─► minified ─► context mixing ─► train_gpt.py
                                                                                   │ python, torchrun
    train, export, decode, score ◄── import ◄── folder of modules in the user's cache ◄──┘ once for each script

The script counts as code by its own bytes. Started, it writes its modules into a folder named by their digest, where
Triton and numba find their sources, and runs the challenge's entry point with the recipe's settings as defaults.
"""

import ast
import dataclasses
import hashlib
import lzma
import sys
import typing
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from birdie.compress import registry
from birdie.compress.scheme import Scheme
from birdie.golf import first_stage, text_coder
from birdie.golf.features import features
from birdie.golf.shake import shake
from birdie.golf.standalone.pack import literal
from birdie.golf.standalone.sources import PACKAGE
from birdie.run.recipe import Recipe, to_toml
from birdie.runtime.files import read_trusted, user_cache, write_trusted
from birdie.runtime.provenance import versions

_ENTRY = "birdie.cli.challenge", "main"
_SCHEMES = "birdie.compress.schemes"
_CALIBRATION = "birdie.compress.calibration"

# Parts of birdie that no run of the challenge reaches: other models, other ways to load, reports.
_NEVER = (
    (f"{_CALIBRATION}.synthetic", "synthetic_calibration"),
    (f"{_CALIBRATION}.synthetic", "closer"),
    (f"{_CALIBRATION}.refit", "refit"),
    (f"{_CALIBRATION}.symmetry_graph", "find_symmetries"),
    (f"{_SCHEMES}.spectral", "Spectral"),
    (f"{_SCHEMES}.spectral", "best_transform"),
    (f"{_SCHEMES}.tucker", "smaller_by_tucker"),
    ("birdie.artifact.lazy", "attach"),
    ("birdie.compress.rate.parts", "refit_by_parts"),
    ("birdie.artifact.load", "_load_lazily"),
    ("birdie.artifact.repack", "load_object"),
    ("birdie.score.package", "PackagedModel"),
    ("birdie.score.package", "for_scoring"),
    ("birdie.train.profile", "Profile"),
    ("birdie.train.profile", "profile"),
    ("birdie.cli.challenge", "_log_checkout"),
    ("birdie.cli.challenge", "_restored"),
)

# Of these the result is known: no weight of a GPT is a long kernel, and no time is estimated.
_SKIPPED = (
    ("birdie.compress.rate.allocation", "Allocation._transform"),
    ("birdie.cli.challenge", "_log_cpu_cost"),
)

_NEEDED = """
import sys
from importlib.util import find_spec
if missing := [name for name in NEEDED.split() if not find_spec(name)]:
    sys.exit(f"error: {', '.join(missing)} not installed; pip install -r requirements.txt")
"""

_START = """
FOLDER, FILE = unpack(DIGEST, lambda: decode(MODULES.encode("L1"), SIZE), RECIPE.encode())
from birdie.cli.challenge import main
main(Path(__file__), FILE, FOLDER)
"""


@dataclass(frozen=True, slots=True)
class Packed:
    """A recipe as one script.

    Attributes:
        script: the file.
        sources: path → text of each file that the script unpacks.
        requirements: packages it needs, pinned to what is installed here, as lines of a requirements.txt.
        minified: False where python-minifier is not installed; the script is larger then.
    """

    script: bytes
    sources: dict[str, str]
    requirements: tuple[str, ...]
    minified: bool


def pack(recipe: Recipe) -> Packed:
    """Return the script that runs `recipe`: the same birdie and recipe give the same bytes.

    Modules are kept, coded, in the user's cache folder, for the next recipe that needs the same ones.

    Raises:
        ConfigError: a scheme of the recipe is not one of birdie's.
    """
    cut, schemes = sorted({*_NEVER, *unused(recipe)}), sorted(schemes_of(recipe))
    minified = find_spec("python_minifier") is not None
    kept = user_cache() / "packed" / f"{_key(cut, schemes, minified)}.modules"
    try:
        size, _, content = read_trusted(kept).partition(b"\n")
        data, coded = content[: int(size)], content[int(size) :]
    except (OSError, ValueError):
        trees = shake([_ENTRY], complete=schemes, cut=cut, skipped=_SKIPPED, typed=read_types())
        texts = {name: ast.unparse(tree) for name, tree in trees.items()}
        data = _joined({name: _minified(text) for name, text in texts.items()} if minified else texts)
        coded = text_coder.encode(data)
        with suppress(OSError):
            write_trusted(kept, b"%d\n" % len(data) + data + coded)
    parts = data.decode().split("\0")
    sources = dict(zip(parts[::2], parts[1::2], strict=True))
    needed = packages(map(ast.parse, sources.values()))
    lines = tuple(f"{name}=={metadata.version(name).partition('+')[0]}" for name in needed.values())
    return Packed(_script(data, coded, recipe, needed, minified), sources, lines, minified)


def _key(cut: Sequence[tuple[str, str]], schemes: Sequence[str], minified: bool) -> str:
    """Return what changes with every source of birdie and with everything that decides about the modules."""
    digest = hashlib.sha256(repr((cut, _SKIPPED, schemes, minified and metadata.version("python_minifier"))).encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def schemes_of(recipe: Recipe) -> set[str]:
    """Return the modules of the schemes that a run of `recipe` writes or reads."""
    used = features(recipe)
    specs = [used[name] for name in ("export.scheme", "export.embedding", "qat") if used[name] is not None]
    kinds = {type(registry.parse_spec(spec)).__module__ for spec in specs}
    return kinds | {f"{_SCHEMES}.{name}" for name in ("lossless", "cast", "grid", "trellis")}


def unused(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of what a script packed for `recipe` leaves out (`birdie.golf.features`)."""
    used = features(recipe)
    mode, data = used["evaluation.mode"], used["calibration.data"]
    off = {
        "birdie.score.ngram": [] if used["evaluation.ngram.enabled"] else ["NgramBias", "NgramScorer"],
        "birdie.score.streaming": [] if mode == "streaming" else _mode_parts("StreamingMode"),
        "birdie.score.ttt.multi_phase": [] if mode == "ttt-multi-phase" else _mode_parts("MultiPhaseMode"),
        "birdie.train.bandit": [] if used["bandit.every"] else ["Bandit"],
        "birdie.train.step_graph": [] if used["train.step_graphs"] else ["StepGraphs", "CudaGraphs"],
        "birdie.train.fp8": [] if used["train.fp8"] else ["Float8"],
        "birdie.model.sample": [] if data == "own" else ["sample_sequences"],
        "birdie.run.calibration_budget": [] if data == "own" else ["_sampling_seconds"],
    }
    if mode not in ("ttt-sgd", "ttt-multi-phase"):
        off["birdie.score.ttt.sgd"] = [*_mode_parts("SGDMode"), "train_on_ranges"]
    if mode not in ("ttt-lora", "ttt-multi-phase"):
        off["birdie.score.ttt.lora"] = [*_mode_parts("LoRAMode"), "DocumentTrainer", "score_documents"]
    if used["qat"] is None:
        methods = ("prepare", "scale", "quantized", "bits_of", "_quantize_to_levels", "_exact_scale")
        off["birdie.compress.qat"] = ["FakeQuantization", *(f"Qat.{method}" for method in methods)]
    if data == "none":
        off[f"{_CALIBRATION}.sensitivity"] = ["calibrate"]
        off[f"{_CALIBRATION}.result"] = ["CalibrationResult"]
        off["birdie.run.calibration"] = ["calibrate_gpt"]
        off["birdie.run.calibration_budget"] = ["time_calibration"]
    for module, names in off.items():
        yield from ((module, name) for name in names)


def _mode_parts(mode: str) -> list[str]:
    """Return what a scoring mode does besides keeping its settings."""
    return [f"{mode}.score", f"{mode}.describe"]


def read_types() -> set[tuple[str, str]]:
    """Return (module, class) of the dataclasses whose annotations birdie reads: settings and options of schemes."""
    registry.names()
    kinds: list[type] = [Recipe, *Scheme.__subclasses__()]
    classes: set[tuple[str, str]] = set()
    while kinds:
        kind = kinds.pop()
        classes |= {
            (base.__module__, base.__name__) for base in kind.__mro__ if base.__module__.startswith(PACKAGE.name)
        }
        hints = [hint for hint in typing.get_type_hints(kind).values() if dataclasses.is_dataclass(hint)]
        kinds += [hint for hint in hints if isinstance(hint, type) and (hint.__module__, hint.__name__) not in classes]
    return classes


def packages(trees: Iterable[ast.Module]) -> dict[str, str]:
    """Return the installed packages outside the standard library that modules import: name → distribution, sorted."""
    imported: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    names = metadata.packages_distributions()
    return {
        name: names[name][0] for name in sorted(imported - sys.stdlib_module_names - {PACKAGE.name}) if name in names
    }


def _minified(source: str) -> str:
    from python_minifier import minify

    return minify(source, rename_globals=False, hoist_literals=False, remove_annotations=False)


def _joined(sources: dict[str, str]) -> bytes:
    """Return names and texts of the modules' files, as `first_stage.unpack` takes them apart."""
    files = {}
    for name, source in sources.items():
        is_package = any(other.startswith(f"{name}.") for other in sources)
        files[name.replace(".", "/") + ("/__init__.py" if is_package else ".py")] = source
    return "\0".join(part for pair in sorted(files.items()) for part in pair).encode()


def _script(data: bytes, coded: bytes, recipe: Recipe, needed: Iterable[str], minified: bool) -> bytes:
    """Return the script: what runs first is compressed by LZMA, the modules `data` are `coded`."""
    values = {
        "NEEDED": " ".join(needed),
        "SIZE": len(data),
        "DIGEST": hashlib.sha256(data).hexdigest(),
        "RECIPE": to_toml(changed_settings(recipe)),
    }
    first = "\n".join(
        (
            *(f"{name} = {value!r}" for name, value in values.items()),
            _NEEDED,
            _plain(text_coder.__file__),
            _plain(first_stage.__file__),
            _START,
        )
    )
    if minified:
        first = _minified(first)
    filters = [{"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "pb": 0}]
    start = lzma.compress(first.encode(), lzma.FORMAT_ALONE, filters=filters)
    lines = (
        f"#birdie {versions()['birdie']} coding:L1",
        f"import lzma;MODULES={literal(coded)};FIRST={literal(start)}",
        "exec(compile(lzma.decompress(FIRST.encode('L1')),__file__,'exec'))",
    )
    return "\n".join(lines).encode("latin-1")


def changed_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that are not the defaults of this birdie, which the script has, too."""
    return _different(recipe.to_dict(), Recipe().to_dict())


def _different(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _different(value, defaults[key]) if isinstance(value, dict) else value
        for key, value in values.items()
        if value != defaults.get(key)
    }


def _plain(path: str) -> str:
    """Return the source of a module without docstrings and annotations, and with numba's own decorator."""
    tree = ast.parse(Path(path).read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = [ast.parse("numba.njit", mode="eval").body for _ in node.decorator_list]
            node.returns = None
            node.body = node.body[isinstance(node.body[0], ast.Expr) :]
            for argument in node.args.args:
                argument.annotation = None
    body = [node for node in tree.body if not _is_dropped(node)]
    return "import numba\n" + ast.unparse(ast.Module(body, []))


def _is_dropped(node: ast.stmt) -> bool:
    """Return whether a statement of the first stage's modules is a docstring, a type, or an import from birdie."""
    of_birdie = isinstance(node, ast.ImportFrom) and str(node.module).startswith(PACKAGE.name)
    return of_birdie or isinstance(node, ast.Expr) or (isinstance(node, ast.Assign) and "NDArray" in ast.unparse(node))
