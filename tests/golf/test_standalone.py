"""The one-file decoder: without birdie it decodes every scheme and coder to the very bits that birdie does, refuses
what birdie refuses, stays within its size, and is the same bytes every time."""

import ast
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import birdie
from birdie.artifact import container, repack
from birdie.artifact.container import Entry, Stream
from birdie.artifact.files import DTYPES, SCHEMES
from birdie.entropy import coder as entropy
from birdie.errors import ConfigError
from birdie.golf.standalone import build as standalone
from birdie.golf.standalone import bundle as bundling
from birdie.golf.standalone import pack
from birdie.golf.standalone.bundle import bundle
from birdie.golf.standalone.emit import emit
from birdie.golf.standalone.minify import minify
from birdie.golf.standalone.rename import rename
from tests.artifact.test_files import every_dtype, model, same
from tests.reference.streams import FEATURES

LIMITS = {"fast": 12_000, "max": 16_000}
SPECS = (
    *("trellis:states=8,sigma=0.3", "ternary", "int4:group=48", "codebook:k=9,rows"),
    *("rotation:bits=3,residual", "lowrank:rank=2,base=int4"),
)
LARGER = {SCHEMES[name] for name in ("codebook", "rotation", "lowrank")}  # what only the max decoder carries

# Runs in a fresh interpreter: decodes each file with the decoder alone and keeps what came of it.
DRIVER = """
import sys, importlib.util, pathlib, warnings
warnings.simplefilter("error")
class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name.split(".")[0] != "birdie", "the decoder imports birdie"
sys.meta_path.insert(0, Refuse())
import torch
torch.set_num_threads(1)
import decode
found = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.birdie")):
    try:
        found[path.name] = decode.load(path), decode.load(path.read_bytes()), decode.load_object(path)
    except decode.ArtifactError as error:
        found[path.name] = f"{type(error).__name__} {error}"  # "ArtifactError 7"
assert "birdie" not in sys.modules
torch.save((decode.__version__, found), sys.argv[2])
"""


@pytest.fixture(scope="module")
def built() -> dict[str, standalone.Standalone]:
    return {"fast": standalone.build("fast"), "max": standalone.build("max")}


def streams() -> dict[str, bytes]:
    """A file for each feature of the entropy coders, as numbers of a grid or of a trellis."""
    found = {}
    for name, feature in FEATURES.items():
        values = feature.values
        if int(values.min()) < -(1 << 20) or int(values.max()) >= 1 << 20:
            continue  # beyond what a float32 grid tells apart
        symbols, steps = feature.coded(), entropy.encode(np.arange(len(values))[:, None])
        coded = tuple(Stream(each.coder, each.payload) for each in (symbols, steps))
        scheme, params = (2, ()) if feature.states == 1 else (4, (feature.states, 16, 0, 0, 0))
        entry = Entry("w", scheme, DTYPES.index(torch.float32), values.shape, params, coded)
        found[name.replace(" ", "_")] = container.to_bytes([entry])
    return found


def checkpoint() -> dict[Any, Any]:
    weights = {name: value for name, value in model().items() if name != "steps"}
    return {"model": weights, "step": 3, "rates": [0.1, (1, None)], 7: {"a/b": torch.arange(5), "name": "x"}}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of every scheme, dtype and coder, and some that are damaged."""
    folder = tmp_path_factory.mktemp("files")
    for effort in "max", "fast":
        birdie.save(every_dtype(), folder / f"dtypes-{effort}.birdie", lossless=True, coder=effort)
        birdie.save(model(), folder / f"int8-{effort}.birdie", coder=effort)
        repack.save_object(checkpoint(), folder / f"tree-{effort}.birdie", coder=effort)
    rules = [("*emb*", "sigma:0.2"), ("*norm*", "bf16"), ("*", "int6")]
    birdie.save(model(), folder / "schemes.birdie", scheme=rules)
    for effort in "max", "fast":
        for index, spec in enumerate(SPECS):
            birdie.save(model(), folder / f"spec{index}-{effort}.birdie", scheme=[("*", spec)], coder=effort)
    for name, data in streams().items():
        (folder / f"stream-{name}.birdie").write_bytes(data)
    rng = np.random.default_rng(0)
    for effort in "max", "fast":
        sound = (folder / f"int8-{effort}.birdie").read_bytes()
        for index, at in enumerate([0, 9, 20, len(sound) - 1, *rng.integers(0, len(sound), 12)]):
            damaged = sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :]
            (folder / f"damaged-{effort}-{index}.birdie").write_bytes(damaged)
    (folder / "damaged-cut.birdie").write_bytes(sound[:-1])
    (folder / "damaged-empty.birdie").write_bytes(b"")
    return folder


@pytest.fixture(scope="module", params=["fast", "max"])
def decoded(
    request: pytest.FixtureRequest, built: dict[str, Any], files: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any], str]:
    """(version, what each file decoded to, effort) of the packed file alone in a folder, in a fresh interpreter."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "decode.py").write_bytes(built[request.param].packed)
    (folder / "driver.py").write_text(DRIVER)
    command = [sys.executable, "-E", "-s", "driver.py", str(files), "out.pt"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental
        version, found = torch.load(folder / "out.pt", weights_only=False)
    return version, found, request.param


def needs_max(path: Path) -> bool:
    """Whether a stream of the file has a coder, or a tensor a scheme, that only the max decoder carries."""
    with container.Reader(path) as reader:
        coders = {stream.coder for name in reader.names for stream in reader.entry(name).streams}
        schemes = {reader.entry(name).scheme for name in reader.names}
    return entropy.MIXED in coders or bool(schemes & LARGER)


@pytest.mark.slow
def test_every_file_decodes_to_the_bits_that_birdie_gives(
    decoded: tuple[str, dict[str, Any], str], files: Path
) -> None:
    version, found, effort = decoded
    assert version == birdie.__version__
    sound = [path for path in sorted(files.glob("*.birdie")) if not path.name.startswith("damaged")]
    assert len(sound) > 15
    assert {needs_max(path) for path in sound} == {False, True}
    for path in sound:
        if effort == "fast" and needs_max(path):
            assert found[path.name].startswith("ArtifactError this file needs the larger decoder: birdie decoder")
            continue
        assert not isinstance(found[path.name], str), f"{path.name}: {found[path.name]}"
        expected, (by_path, by_bytes, _) = birdie.load(path), found[path.name]
        for state in by_path, by_bytes:
            assert list(state) == list(expected)
            assert all(same(state[name], expected[name]) for name in expected), path.name


@pytest.mark.slow
def test_a_whole_checkpoint_comes_back_nested(decoded: tuple[str, dict[str, Any], str]) -> None:
    _, found, effort = decoded
    content, expected = found[f"tree-{effort}.birdie"][2], checkpoint()
    assert list(content) == list(expected)
    assert (content["step"], content["rates"], content[7]["name"]) == (3, [0.1, (1, None)], "x")
    assert same(content[7]["a/b"], expected[7]["a/b"])
    assert all(same(content["model"][name], expected["model"][name]) for name in expected["model"])
    assert content["model"]["lm_head.weight"] is content["model"]["tok_emb.weight"]


@pytest.mark.slow
def test_damage_is_refused_wherever_birdie_refuses_it(
    decoded: tuple[str, dict[str, Any], str], files: Path, built: dict[str, Any]
) -> None:
    _, found, effort = decoded
    damaged = sorted(files.glob("damaged*.birdie"))
    assert len(damaged) > 20
    for path in damaged:
        with pytest.raises(birdie.ArtifactError):
            birdie.load(path)
        if effort == "fast" and path.name.startswith("damaged-max"):
            assert found[path.name].startswith("ArtifactError")  # a sound stream may come first that it leaves out
            continue
        kind, number = found[path.name].split()
        assert kind == "ArtifactError"
        assert 1 <= int(number) <= len(built[effort].messages)


@pytest.mark.slow
@pytest.mark.parametrize("effort", ["fast", "max"])
def test_the_file_fits_its_size(built: dict[str, standalone.Standalone], effort: str) -> None:
    assert len(built[effort].packed) <= LIMITS[effort]
    assert sum(built[effort].bytes_by_module.values()) == len(built[effort].source)


@pytest.mark.slow
def test_the_same_birdie_gives_the_same_bytes(built: dict[str, standalone.Standalone]) -> None:
    code = "import sys;from birdie.golf.standalone.build import build;sys.stdout.buffer.write(build('max').packed)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env={"PYTHONHASHSEED": "7"})
    assert done.stdout == built["max"].packed


@pytest.mark.slow
def test_it_says_which_birdie_it_came_from(built: dict[str, standalone.Standalone]) -> None:
    first = built["max"].packed.split(b"\n")[0].decode()
    assert birdie.__version__ in first
    assert not {b"\r", b"\0"} & {bytes([byte]) for byte in built["max"].packed}  # survives text-mode transfers
    assert built["max"].packed.count(b"\n") == 2


@pytest.mark.slow
def test_nothing_of_the_encoders_is_carried(built: dict[str, standalone.Standalone]) -> None:
    modules = set(built["max"].bytes_by_module)
    context_mixing = {"birdie.entropy.mixed", "birdie.entropy.context_mixing", "birdie.entropy.mixing_tables"}
    assert modules >= context_mixing
    assert not context_mixing & set(built["fast"].bytes_by_module)
    assert "birdie.entropy.static" in modules
    assert (
        not {
            "birdie.compress.schemes.grid",
            "birdie.compress.rate.budget",
            "birdie.runtime.files",
            "birdie.artifact.checkpoints",
        }
        & modules
    )
    imports = [
        node for node in ast.walk(ast.parse(built["max"].source)) if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    named = {each.name.split(".")[0] for node in imports if isinstance(node, ast.Import) for each in node.names}
    named |= {str(node.module).split(".")[0] for node in imports if isinstance(node, ast.ImportFrom)}
    assert named - set(sys.stdlib_module_names) <= {"numpy", "numba", "torch"}


def test_an_omitted_module_leaves_dictionaries_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "birdie"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "heavy.py").write_text("def run(x):\n    return 2 * x\n")
    (package / "light.py").write_text(
        "from birdie import heavy\nTABLE = {1: heavy.run, 2: str}\ndef go(x: int) -> int:\n    return TABLE[x](x)\n"
        "def need() -> int:\n    return heavy.run(1)\n"
    )
    monkeypatch.setattr("birdie.golf.standalone.sources.PACKAGE", package)
    found = ast.unparse(bundle({"go": ("birdie.light", "go")}, ("birdie.heavy",)).tree)
    assert "heavy" not in found
    assert "2: str" in found
    with pytest.raises(ConfigError, match=r"birdie\.heavy is left out"):
        bundle({"need": ("birdie.light", "need")}, ("birdie.heavy",))
    (package / "other.py").write_text(
        "from birdie.errors import ArtifactError\ndef refuse(*_: int) -> int:\n    raise ArtifactError('not here')\n"
    )
    (package / "errors.py").write_text("class ArtifactError(Exception):\n    pass\n")
    found = ast.unparse(bundle({"go": ("birdie.light", "go")}, ("birdie.heavy",), ("birdie.other", "refuse")).tree)
    assert "1: other__refuse" in found
    assert "'not here'" in found
    with pytest.raises(ConfigError, match="no nothing"):
        bundle({"x": ("birdie.light", "nothing")})


SAMPLE = """
import math as math__
from functools import reduce as functools__reduce
A__LIMIT = 1 << 4
A__NAMES, A__OTHER = range(2)
def A__unused(): return 3
def A__damaged(what): return ValueError(A__LIMIT)
def A__check(value, dtype=int, *, limit=A__LIMIT - 1):
    values = [value for value in (value, value + 1)]
    if value > limit: raise A__damaged(f'{value} is too large')
    return dict(dtype=dtype, total=functools__reduce(lambda a, b: (a) + b, values), kind=A__OTHER)
class A__Box:
    def __init__(self, value):
        self.hidden__Box, self.value_of_it = value, value
        self.where = str(value)
    def get__Box(self, what): return self.hidden__Box if (what, (1 + 2)) else None
def main(value):
    try: found = A__check(value, limit=9)
    except ValueError as error: return str(error), A__Box(math__.floor(2.5)).get__Box('what')
    return found, tuple((each for each in (A__Box(value).value_of_it,)))
"""


@pytest.mark.parametrize("value", [1, 8, 9, 10, 11])
def test_a_minified_module_means_the_same(value: int) -> None:
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    exec(SAMPLE, before)
    text = emit(rename(minify(ast.parse(SAMPLE), ["main"]), ["main"]))
    exec(text, after)
    assert after["main"](value) == before["main"](value)
    assert len(text) < 0.6 * len(SAMPLE)
    assert not {"unused", "LIMIT", "too large", "where"} & set(text.replace("(", " ").split())
    assert "too large" not in text


TWO_WAYS = """
def A__run(values, *, decoding):
    return A__code(values, decoding, *(1, 2))
def A__code(values, decoding, one, two):
    if decoding:
        total = sum(values)
    else:
        total = A__encoded(values)
        return total
    if not decoding:
        A__encoded(total)
    return total + one * two if decoding else A__encoded(values)
def A__encoded(values): return 0
def main(values): return A__run(values, decoding=True)
"""


def test_the_half_of_a_function_that_only_encodes_is_dropped() -> None:
    module = minify(ast.parse(TWO_WAYS), ["main"])
    assert not [node for node in ast.walk(module) if isinstance(node, ast.If | ast.IfExp)]
    assert "encoded" not in ast.unparse(module)
    space: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(module), "two ways", "exec"), space)
    assert space["main"]([3, 4]) == 9
    both = ast.parse(TWO_WAYS + "def other(values): return A__run(values, decoding=False)")
    assert "encoded" in ast.unparse(minify(both, ["main", "other"]))


@pytest.mark.parametrize("seed", range(4))
def test_packing_keeps_every_byte_of_a_source(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 10**9, 400 << seed)
    source = f"X={noise.tolist()}\ndef fail():\n raise ValueError('here')\n"
    path = tmp_path / "packed.py"
    path.write_bytes(pack.pack(source, "noise"))
    space: dict[str, Any] = {"__file__": str(path)}
    exec(compile(path.read_bytes(), str(path), "exec"), space)
    assert space["X"] == noise.tolist()
    assert path.read_bytes().count(b"\n") == 2
    with pytest.raises(ValueError, match="here") as caught:
        space["fail"]()
    assert caught.traceback[-1].lineno > 2  # beyond the packed file's lines: no traceback prints one of them


@pytest.mark.slow
def test_the_command_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "decode.py"
    command = [sys.executable, "-m", "birdie", "decoder", "-o", str(path), "--coder", "fast", "--json"]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert answer["bytes"] == path.stat().st_size <= LIMITS["fast"]
    assert answer["bytes"] == min(answer["forms"].values())
    assert len(answer["messages"]) > 30
    assert bundling.ERRORS == "birdie.errors"


def test_an_unknown_coder_is_refused() -> None:
    with pytest.raises(ConfigError, match="slow"):
        standalone.build("slow")  # type: ignore[arg-type]
