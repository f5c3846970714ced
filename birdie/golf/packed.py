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
import json
import lzma
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from birdie.compress import registry
from birdie.compress.scheme import Scheme
from birdie.golf import first_stage, text_coder
from birdie.golf.features import features
from birdie.golf.messages import drop_sentences, number
from birdie.golf.shake import shake
from birdie.golf.standalone.minify import minify_module, pass_by_position
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
    (f"{_CALIBRATION}.sensitivity", "Recorder._convolution"),
    (f"{_CALIBRATION}.sensitivity", "Recorder._transposed_product"),
    (f"{_CALIBRATION}.symmetry_graph", "find_symmetries"),
    (f"{_SCHEMES}.spectral", "Spectral"),
    (f"{_SCHEMES}.spectral", "best_transform"),
    (f"{_SCHEMES}.tucker", "smaller_by_tucker"),
    ("birdie.artifact.kept_files", "entry_of"),
    ("birdie.artifact.lazy", "attach"),
    ("birdie.compress.rate.parts", "refit_by_parts"),
    ("birdie.artifact.load", "_load_lazily"),
    ("birdie.artifact.repack", "load_object"),
    ("birdie.score.package", "PackagedModel"),
    ("birdie.score.package", "for_scoring"),
    ("birdie.train.profile", "Profile"),
    ("birdie.train.profile", "profile"),
    ("birdie.runtime.nvtx", "_Range"),
    ("birdie.compress.rate.budget", "fit_quality"),
    ("birdie.cli.console", "print_json"),
    ("birdie.run.evaluation", "_load_export"),
    ("birdie.compress.registry", "import_scheme"),
    ("birdie.compress.device.encoding", "quantize"),
    ("birdie.entropy.static", "decode_lanes"),
    ("birdie.runtime.distributed", "share_out"),
    ("birdie.artifact.resume", "Resume"),
    ("birdie.artifact.writer", "Writer._kept"),
    ("birdie.compress.rate.allocation", "digest"),
    ("birdie.cli.challenge", "_log_checkout"),
    ("birdie.cli.challenge", "_restored"),
)

_ENCODE_EACH = """with ThreadPoolExecutor(self.workers or os.cpu_count()) as pool:
    return dict(zip(tensors, pool.map(ENCODE, tensors)))"""
_FACTORS = """names, known = allocation.matrices, allocation.sensitivities
known = assumed(known, names) | known
return dict(zip(names, pool.map(lambda name: allocation.compute_factors(name, known[name]), names)))"""
_FILLED = """weights = {name: weight.float() for name, weight in state.items()}
return fill(GPT(recipe.model), weights, "the checkpoint", "give its run or recipe")"""
_CODED = "coded = self.hooks.coded or (lambda one: one)\n" + _ENCODE_EACH

_DECODE_ALL = """
names = [name for name in reader.names if reader.entry(name).scheme != ALIAS]
with ThreadPoolExecutor(workers) as pool:
    return dict(zip(names, pool.map(lambda name: decode_one(reader, name, decoder_of, workers), names)))
"""
# The modules of a script are in a private folder of their own, so that one folder of compiled kernels is enough.
FEWER_KERNEL_FILES = """from birdie.golf.standalone.kernels import njit as compiled
return compiled(cache=cache, **options)"""
# Scripts read files of their own, which have neither blocks of rows nor lanes, and are not larger than they say.
DECODING = {
    ("birdie.artifact.container", "Reader._require_blocks"): "pass",
    ("birdie.artifact.decoding", "blocks_of"): "return [(name, slice(None))]",
    ("birdie.artifact.decoding", "is_planes"): "return False",
    ("birdie.artifact.decoding", "_group"): "pass",
    ("birdie.artifact.decoding", "_members"): "pass",
    ("birdie.artifact.decoding", "_complete"): "return decoded",
    ("birdie.artifact.container", "Reader.holder"): "return name",
    ("birdie.artifact.container", "Reader.position"): "pass",
    ("birdie.artifact.decoding", "decode_all"): _DECODE_ALL,
    ("birdie.artifact.decoding", "require_limits"): "pass",
    ("birdie.entropy.static", "_take_lengths"): "return reader.take_all(_WORDS, chunks)[:, None]",
    ("birdie.entropy.static", "_decode_chunk"): "rans.decode(words, classes, table, precision, paths, out)",
}
# Of these the result is known, or only a person at a terminal misses it: checks before the run, which birdie makes
# before the script is packed; estimates, profiles, the compile cache; the comparison with the challenge's own export.
_REPLACED = DECODING | {
    ("birdie.artifact.load", "_allocated"): "return 0",
    ("birdie.artifact.load", "_copies"): "return ()",
    ("birdie.artifact.metadata", "copies_of"): "return None",
    ("birdie.compress.rate.copies", "merged"): "return assignment",
    ("birdie.compress.rate.groups", "grouped"): "return assignment",
    ("birdie.compress.tensors", "planes"): "return weight",
    ("birdie.compress.tensors", "count_reals"): "return weight.numel()",
    ("birdie.compress.rate.encoding", "exact_share"): "return ''",
    ("birdie.compress.schemes.lossless", "_runs"): "return None",
    ("birdie.compress.schemes.lossless", "_from_runs"): "pass",
    ("birdie.compress.schemes.lossless", "_is_whole"): "return False",
    ("birdie.compress.schemes.trellis", "is_pruned"): "return False",
    ("birdie.artifact.load", "_decode_all"): "return decode_all(reader, decoders, workers)",
    ("birdie.artifact.kept_files", "sizes_of"): "return None",
    ("birdie.compress.filling", "with_ties"): "return items",
    ("birdie.artifact.load", "_require_arguments"): "pass",
    ("birdie.compress.device.encoding", "searches"): "return False",
    ("birdie.artifact.container", "Reader.blocks"): "return (name,)",
    ("birdie.artifact.save", "_resume"): "return None",
    ("birdie.artifact.save", "_require_target"): "require_writable(path.parent)\nreturn path",
    ("birdie.artifact.container", "_opened"): (
        "with files.atomic_path(target) as path, path.open('wb') as file:\n    yield file"
    ),
    ("birdie.artifact.inspect", "inspect"): (
        "with Reader(path) as reader:\n"
        "    entries = map(reader.entry, reader.names)\n"
        "    weights = sum(math.prod(entry.shape) for entry in entries if entry.scheme != ALIAS)\n"
        "    about = file_metadata.parse(bytes(reader.metadata), reader.where).get('metadata', {})\n"
        "    return Summary(str(path), reader.size, None, weights, (), about)"
    ),
    ("birdie.artifact.save", "_require_arguments"): "pass",
    ("birdie.artifact.save", "_require_module"): "pass",
    ("birdie.artifact.calibrated", "calibrated_files"): "yield calibrated_state(state, calibration)",
    (f"{_CALIBRATION}.sensitivity", "require_finite"): "pass",
    ("birdie.compress.rate.allocation", "factors_of"): _FACTORS,
    ("birdie.artifact.writer", "Writer.collected"): "return encoded",
    ("birdie.artifact.writer", "Writer.recalled"): "pass",
    ("birdie.artifact.writer", "_parts"): "return tensors.items()",
    ("birdie.artifact.writer", "Meter.__init__"): "pass",
    ("birdie.artifact.writer", "Meter.begin"): "pass",
    ("birdie.artifact.writer", "Meter.count"): "pass",
    ("birdie.artifact.writer", "Meter.finish"): "pass",
    ("birdie.compress.row_blocks", "row_blocks"): "return [slice(None)]",
    ("birdie.compress.rate.allocation", "Allocation._encode_matrices"): (
        "return self._encode_each(names, 0, lambda name, rows: self._encode_matrix(name, rows, exponent, draft), 0)"
    ),
    ("birdie.compress.rate.allocation", "Allocation._matrix"): "return self.assignment.tensors[name]",
    ("birdie.compress.rate.allocation", "Allocation._transform"): "return None",
    ("birdie.compress.prior", "_stacked"): "return None",
    ("birdie.compress.rate.allocation", "Allocation._encode_each"): _CODED.replace(
        "ENCODE", "lambda name: coded(encode(name, slice(None)))"
    ),
    ("birdie.cli.challenge", "_int8_zlib"): "return None",
    ("birdie.cli.challenge", "_log_cpu_cost"): "return None",
    ("birdie.cli.console", "_message"): "return explain(error)",
    ("birdie.data.dataset", "DatasetInfo.write"): "pass",
    ("birdie.entropy.static", "encode_fastest"): "return encode(values, kernel, states), False",
    ("birdie.entropy.static", "_encode_chunk"): (
        "words = rans.encode(symbols, classes, frequencies, precision, odd)\nreturn words, np.array([words.size])"
    ),
    ("birdie.entropy.static", "_put_lengths"): "writer.put_all(_WORDS, lengths)",
    ("birdie.data.dataset", "_check_by_decoding"): "return []",
    ("birdie.run.environment", "remarks"): "return ()",
    ("birdie.run.evaluation", "_require_shape"): "pass",
    ("birdie.run.pipeline", "Run._changes"): "return []",
    ("birdie.run.pipeline", "Run._checked"): "return Checked(())",
    ("birdie.run.pipeline", "Run._profile"): "yield",
    ("birdie.run.pipeline", "Run.require_unchanged"): "pass",
    ("birdie.runtime.callbacks", "reporting"): "return nullcontext()",
    ("birdie.runtime.blas", "one_thread"): "from contextlib import nullcontext\nreturn nullcontext()",
    ("birdie.runtime.files", "_copy_permissions"): "pass",
    ("birdie.runtime.kernels", "njit"): FEWER_KERNEL_FILES,
    ("birdie.runtime.mapped", "release"): "pass",
    ("birdie.runtime.mapped", "require_complete"): "pass",
    ("birdie.runtime.nvtx", "next_range"): "pass",
    ("birdie.runtime.nvtx", "next_range_on_gradient"): "pass",
    ("birdie.runtime.nvtx", "nvtx_range"): "return _NULL",
    ("birdie.runtime.nvtx", "profiler_attached"): "return False",
    ("birdie.train.compilation", "compile_cache"): "return None",
    ("birdie.train.compilation", "saves_graphs"): "return False",
    ("birdie.train.profile", "Capture.before_step"): "pass",
    ("birdie.train.profile", "Capture.close"): "pass",
    ("birdie.train.profile", "layer_ranges"): "yield",
}

# The same for recipes whose export is calibrated: every matrix that counts has feedback, and what a trellis leaves of a
# GPT's rows cannot be predicted from other rows (at most 0.003 % of the bytes).
_REPLACED_IF_CALIBRATED = {
    ("birdie.entropy.prediction", "candidates"): "return []",
    (f"{_SCHEMES}.trellis", "Trellis._side_by_side"): "return None",
    ("birdie.compress.rate.allocation", "Allocation._encode_each"): _ENCODE_EACH.replace(
        "ENCODE", "lambda name: encode(name, slice(None))"
    ),
    ("birdie.artifact.writer", "Writer.coded"): "pass",
    ("birdie.run.calibration", "_model"): _FILLED,
    ("birdie.run.calibration", "_result"): "return CalibrationResult.of(dict(state), calibration, progress=progress)",
    ("birdie.artifact.writer", "Writer.estimated"): "pass",
}

# Features that are off leave out these definitions.
_SAMPLERS = {
    "SequentialSampler": ("sequential", "packed"),
    "ShuffledSampler": ("shuffled",),
    "CoprimeSampler": ("coprime",),
}
_MODES = {  # a multi-phase evaluation has the modes of its parts
    "StreamingMode": ("streaming",),
    "SGDMode": ("ttt-sgd", "ttt-multi-phase"),
    "LoRAMode": ("ttt-lora", "ttt-multi-phase"),
    "MultiPhaseMode": ("ttt-multi-phase",),
}
_AVERAGE = [f"Average.{method}" for method in ("_update", "mean", "_copies", "_apply", "_wide_weights")]

# Errors that a person may cause who runs a script as it was meant keep their sentences.
_WORDED = ("birdie.golf.features", "birdie.run.recipe_file")

_NEEDED = """
import sys
from importlib.util import find_spec
if missing := [name for name in NEEDED.split() if not find_spec(name)]:
    sys.exit(f"error: {', '.join(missing)} not installed; pip install -r requirements.txt")
"""

_UNPACK = """
FOLDER, FILE = unpack(DIGEST, lambda: decode(read_letters(MODULES), SIZE), RECIPE.encode())
"""
_START = """
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
        messages: the sentences that the numbers of its errors stand for, from E1, as birdie's source has them.
    """

    script: bytes
    sources: dict[str, str]
    requirements: tuple[str, ...]
    minified: bool
    messages: tuple[str, ...] = ()


def pack(recipe: Recipe) -> Packed:
    """Return the script that runs `recipe`: the same birdie and recipe give the same bytes.

    Modules are kept, coded, in the user's cache folder, for the next recipe that needs the same ones.

    Raises:
        ConfigError: a scheme of the recipe is not one of birdie's.
    """
    cut, schemes = sorted({*_NEVER, *unused(recipe)}), sorted(schemes_of(recipe))
    replaced = _REPLACED | ({} if features(recipe)["calibration.data"] == "none" else _REPLACED_IF_CALIBRATED)
    key = _key(cut, replaced, schemes)
    kept = user_cache() / "packed" / f"{key}.modules"
    try:
        digest, _, content = read_trusted(kept).partition(b"\n")
        if digest != _digest(key, content):  # damaged, or under another's name
            raise ValueError
        line, _, content = content.partition(b"\n")
        size, *messages = json.loads(line)
        modules = Modules(content[:size], content[size:], tuple(messages))
    except (OSError, ValueError):
        rewrite = partial(drop_sentences, worded=_WORDED)
        modules = compressed(
            shake([_ENTRY], complete=schemes, cut=cut, replaced=replaced, typed=read_types(), rewrite=rewrite)
        )
        with suppress(OSError):
            line = json.dumps([len(modules.data), *modules.messages]).encode()
            content = b"\n".join((line, modules.data + modules.coded))
            write_trusted(kept, b"\n".join((_digest(key, content), content)))
    return assemble(modules, _START, to_toml(changed_settings(recipe)))


@dataclass(frozen=True, slots=True)
class Modules:
    """Modules as a script carries them.

    Attributes:
        data: names and texts of their files, as `first_stage.unpack` takes them apart.
        coded: the same by `text_coder`.
        messages: as `Packed` has them.
    """

    data: bytes
    coded: bytes
    messages: tuple[str, ...] = ()


def compressed(trees: Mapping[str, ast.Module]) -> Modules:
    """Return shaken modules, minified if python-minifier is installed, and coded."""
    messages = number(trees.values())
    pass_by_position(trees.values())
    shorten = minify_module if _minifies() else ast.unparse
    data = _joined({name: shorten(tree) for name, tree in trees.items()})
    return Modules(data, text_coder.encode(data), messages)


def assemble(modules: Modules, start: str, recipe: str = "") -> Packed:
    """Return the script that unpacks `modules` and the text of a recipe, and then runs `start`."""
    parts = modules.data.decode().split("\0")
    sources = dict(zip(parts[::2], parts[1::2], strict=True))
    needed = packages(map(ast.parse, sources.values()))
    script = _script(modules, recipe, needed, _UNPACK + start)
    return Packed(script, sources, tuple(pinned(needed)), _minifies(), modules.messages)


def _minifies() -> bool:
    return find_spec("python_minifier") is not None


def _key(cut: Sequence[tuple[str, str]], replaced: Mapping[tuple[str, str], str], schemes: Sequence[str]) -> str:
    """Return what changes with every source of birdie and with everything that decides about the modules."""
    minifier = metadata.version("python_minifier") if _minifies() else None
    digest = hashlib.sha256(repr((cut, sorted(replaced.items()), schemes, minifier)).encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _digest(key: str, content: bytes) -> bytes:
    """Return what a kept file begins with: a digest of its content and of whose it is."""
    return hashlib.sha256(key.encode() + content).hexdigest().encode()


def schemes_of(recipe: Recipe) -> set[str]:
    """Return the modules of the schemes that a run of `recipe` writes or reads."""
    used = features(recipe)
    specs = [
        used[name]
        for name in ("export.scheme", "export.embedding", "export.attention", "export.mlp", "qat")
        if used[name] is not None
    ]
    kinds = {type(registry.parse_spec(spec)).__module__ for spec in specs}
    return kinds | {f"{_SCHEMES}.{name}" for name in ("lossless", "cast", "grid", "trellis")}


def unused(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of what a script packed for `recipe` leaves out (`birdie.golf.features`)."""
    used = features(recipe)
    mode, data = used["evaluation.mode"], used["calibration.data"]
    off = {
        "birdie.score.ngram": [] if used["evaluation.ngram.enabled"] else ["NgramBias", "NgramScorer"],
        "birdie.score.modes": [*_mode_parts(*(kind for kind, modes in _MODES.items() if mode not in modes))],
        "birdie.run.temperature": [] if used["export.fit_temperature"] else ["store_temperature", "stored_evaluation"],
        "birdie.train.bandit": [] if used["bandit.every"] else ["Bandit"],
        "birdie.train.step_graph": [] if used["train.step_graphs"] else ["StepGraphs", "CudaGraphs"],
        "birdie.train.fp8": [] if used["train.fp8"] else ["Float8"],
        "birdie.run.pipeline": [] if used["train.fp8"] else ["Run._report_fp8"],
        "birdie.data.sampler": [name for name, orders in _SAMPLERS.items() if used["data.order"] not in orders],
        "birdie.train.average": [] if used["average.kind"] != "none" else _AVERAGE,
        "birdie.model.sample": [] if data == "own" else ["sample_sequences"],
        "birdie.run.calibration_budget": [] if data == "own" else ["_sampling_seconds"],
    }
    if used["qat"] is None or used["qat.budget"]:
        off["birdie.compress.qat"] = ["Qat.prepare"]
    if not used["qat.budget"]:
        off["birdie.run.budget_training"] = ["BudgetTraining"]
    if data == "none":
        off[f"{_CALIBRATION}.sensitivity"] = ["calibrate"]
        off[f"{_CALIBRATION}.result"] = ["CalibrationResult"]
        off["birdie.run.calibration"] = ["calibrate_gpt"]
        off["birdie.run.calibration_budget"] = ["time_calibration"]
    for module, names in off.items():
        yield from ((module, name) for name in names)


def _mode_parts(*kinds: str) -> Iterator[str]:
    """Yield what scoring modes do besides keeping their settings."""
    for kind in kinds:
        yield from (f"{kind}.score", f"{kind}.describe")


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


def pinned(needed: Mapping[str, str]) -> Iterator[str]:
    """Yield lines of a requirements.txt for `packages`: distributions of the versions that are installed."""
    for distribution in needed.values():
        yield f"{distribution}=={metadata.version(distribution).partition('+')[0]}"


def _joined(sources: dict[str, str]) -> bytes:
    """Return names and texts of the modules' files, as `first_stage.unpack` takes them apart."""
    files = {}
    for name, source in sources.items():
        is_package = any(other.startswith(f"{name}.") for other in sources)
        files[name.replace(".", "/") + ("/__init__.py" if is_package else ".py")] = source
    return "\0".join(part for pair in sorted(files.items()) for part in pair).encode()


def _script(modules: Modules, recipe: str, needed: Iterable[str], start: str) -> bytes:
    """Return the script: what runs first is compressed by LZMA, the modules are coded already."""
    values = {
        "NEEDED": " ".join(needed),
        "SIZE": len(modules.data),
        "DIGEST": hashlib.sha256(modules.data).hexdigest(),
        "RECIPE": recipe,
    }
    first = "\n".join(
        (
            *(f"{name} = {value!r}" for name, value in values.items()),
            _NEEDED,
            _plain(text_coder.__file__),
            _plain(first_stage.__file__),
            start,
        )
    )
    if _minifies():
        first = minify_module(ast.parse(first))
    filters = [{"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "pb": 0}]
    packed = lzma.compress(first.encode(), lzma.FORMAT_ALONE, filters=filters)
    lines = (
        f"#birdie {versions()['birdie']} coding:L1",
        f"import lzma;MODULES='{letters(modules.coded)}';FIRST={literal(packed)}",
        "exec(compile(lzma.decompress(FIRST.encode('L1')),__file__,'exec'))",
    )
    return "\n".join(lines).encode("latin-1")


def letters(data: bytes) -> str:
    """Return `data` as text of 251 letters, 281 for 280 bytes: escapes would take four times as many more."""
    text: list[str] = []
    for start in range(0, len(data), 280):
        number, block = int.from_bytes(data[start : start + 280].ljust(280, b"\0"), "big"), []
        for _ in range(281):
            number, digit = divmod(number, 251)
            block.append(first_stage.LETTERS[digit])
        text += reversed(block)
    return "".join(text)


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
