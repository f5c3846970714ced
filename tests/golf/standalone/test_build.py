"""The one-file decoder: without birdie it decodes every scheme and coder to the bits that birdie gives, refuses
damaged files, stays within its size, and is the same bytes every time."""

import ast
import hashlib
import json
import shutil
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
from birdie.artifact.decoding import DTYPES
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.compress import registry
from birdie.entropy import coder as entropy
from birdie.entropy import mixed, static
from birdie.errors import ConfigError
from birdie.golf.standalone import build as standalone
from birdie.golf.standalone import decode
from birdie.golf.standalone.bundle import bundle
from tests.artifact.states import every_dtype, same_bits, small_model
from tests.reference.streams import FEATURES

SCHEMES = {name: code for code, name in registry.own_names_by_code().items()}
LIMITS = {"fast": 18_600, "max": 23_500}
SPECS = (
    *("trellis:states=8,sigma=0.3", "ternary", "int4:group_size=48", "codebook:k=9,per_row"),
    *("rotation:bits=3,residual", "lowrank:rank=2,base=int4"),
)
NEITHER = ("spectral:dct,edge=8,sigma=0.3", "tucker:energy=0.99")  # schemes that neither decoder includes

# Runs in a fresh interpreter: decodes each file with the decoder alone and stores the results.
DRIVER = """
import sys, pathlib, warnings
warnings.simplefilter("error")
class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name.split(".")[0] != "birdie", "the decoder imports birdie"
sys.meta_path.insert(0, Refuse())
import torch
torch.set_num_threads(1)
import decode
results = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.birdie")):
    try:
        results[path.name] = decode.load(path), decode.load(path.read_bytes()), decode.load_object(path)
    except decode.ArtifactError as error:
        results[path.name] = f"{type(error).__name__} {error}"  # "ArtifactError 7"
assert "birdie" not in sys.modules
torch.save((decode.__version__, results), sys.argv[2])
"""


@pytest.fixture(scope="module")
def built() -> dict[str, standalone.Standalone]:
    return {"fast": standalone.build("fast"), "max": standalone.build("max")}


def streams() -> dict[str, bytes]:
    """Return a file for each feature of the entropy coders, its integers as symbols of a grid or of a trellis."""
    files = {}
    for name, feature in FEATURES.items():
        values = feature.values
        if int(values.min()) < -(1 << 20) or int(values.max()) >= 1 << 20:
            continue  # beyond what float32 represents exactly after scaling
        symbols, steps = feature.coded(), entropy.encode(np.arange(len(values))[:, None])
        coded = tuple(Stream(stream.coder, stream.payload) for stream in (symbols, steps))
        scheme, params = ("grid", ()) if feature.states == 1 else ("trellis", (feature.states, 16, 0, 0, 0))
        entry = Entry("w", SCHEMES[scheme], DTYPES.index(torch.float32), values.shape, params, coded)
        files[name.replace(" ", "_")] = container.to_bytes([entry])
    return files


def checkpoint() -> dict[Any, Any]:
    weights = {name: value for name, value in small_model().items() if name != "steps"}
    return {"model": weights, "step": 3, "rates": [0.1, (1, None)], 7: {"a/b": torch.arange(5), "name": "x"}}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of every scheme, dtype and coder, and some that are damaged."""
    folder = tmp_path_factory.mktemp("files")
    rules = [("*emb*", "sigma:0.2"), ("*norm*", "bf16"), ("*", "int6")]
    birdie.save(small_model(), folder / "schemes.birdie", scheme=rules)
    for effort in "max", "fast":
        birdie.save(every_dtype(), folder / f"dtypes-{effort}.birdie", lossless=True, coder=effort)
        birdie.save(small_model(), folder / f"int8-{effort}.birdie", coder=effort)
        repack.save_object(checkpoint(), folder / f"tree-{effort}.birdie", coder=effort)
        for index, spec in enumerate(SPECS):
            birdie.save(small_model(), folder / f"spec{index}-{effort}.birdie", scheme=[("*", spec)], coder=effort)
    for index, spec in enumerate(NEITHER):
        birdie.save(small_model(), folder / f"neither{index}.birdie", scheme=[("*", spec)], coder="fast")
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
    """(version, results by file name, effort) of the packed file alone in a folder, in a fresh interpreter.

    numba compiles the decoder's kernels for 10 to 20 s and keeps them beside the file. So the folder is one of
    pytest's cache, and the next run compiles only decoders that are other bytes.
    """
    names = {effort: hashlib.sha256(decoder.packed).hexdigest()[:16] for effort, decoder in built.items()}
    cache = request.config.cache.mkdir("birdie-decoders")
    for old in cache.iterdir():
        if old.name not in names.values():
            shutil.rmtree(old, ignore_errors=True)
    folder = cache / names[request.param]
    folder.mkdir(exist_ok=True)
    for name, data in ("decode.py", built[request.param].packed), ("driver.py", DRIVER.encode()):
        if not (folder / name).exists() or (folder / name).read_bytes() != data:
            (folder / name).write_bytes(data)
    out = tmp_path_factory.mktemp("out") / "out.pt"
    command = [sys.executable, "-E", "-s", "driver.py", str(files), str(out)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental
        version, results = torch.load(out, weights_only=False)
    return version, results, request.param


def refusal(path: Path, effort: str) -> str:
    """Return what the decoder for `effort` says of a sound file that it refuses; "" of one that it decodes."""
    with container.Reader(path) as reader:
        coders = {stream.coder for name in reader.names for stream in reader.entry(name).streams}
        codes = {reader.entry(name).scheme for name in reader.names} - {container.ALIAS}
    schemes = {name for name, code in SCHEMES.items() if code in codes}
    if not schemes <= set(standalone.SCHEMES["max"]):
        return "use birdie"
    if effort == "fast" and (entropy.MIXED in coders or not schemes <= set(standalone.SCHEMES["fast"])):
        return "use the decoder that birdie decoder --coder max writes"
    return ""


@pytest.mark.slow
def test_every_file_decodes_to_the_bits_that_birdie_gives(
    decoded: tuple[str, dict[str, Any], str], files: Path
) -> None:
    version, results, effort = decoded
    assert version == birdie.__version__
    sound = [path for path in sorted(files.glob("*.birdie")) if not path.name.startswith("damaged")]
    assert len(sound) > 15
    for path in sound:
        if refusal(path, effort):
            continue
        assert not isinstance(results[path.name], str), f"{path.name}: {results[path.name]}"
        expected, (by_path, by_bytes, _) = birdie.load(path), results[path.name]
        for state in by_path, by_bytes:
            assert list(state) == list(expected)
            assert all(same_bits(state[name], expected[name]) for name in expected), path.name


@pytest.mark.slow
def test_coders_and_schemes_that_are_left_out_are_refused_in_words(
    decoded: tuple[str, dict[str, Any], str], files: Path
) -> None:
    _, results, effort = decoded
    sound = [path for path in sorted(files.glob("*.birdie")) if not path.name.startswith("damaged")]
    refused = {path.name: refusal(path, effort) for path in sound if refusal(path, effort)}
    for name, remedy in refused.items():
        missing, says = results[name].removeprefix("ArtifactError this file needs ").split("; ")
        assert says == remedy
        assert missing in {*SCHEMES, "context mixing"} - set(standalone.SCHEMES["max" if effort == "max" else "fast"])
    assert len(set(refused.values())) == {"fast": 2, "max": 1}[effort]


@pytest.mark.slow
def test_a_whole_checkpoint_comes_back_nested(decoded: tuple[str, dict[str, Any], str]) -> None:
    _, results, effort = decoded
    content, expected = results[f"tree-{effort}.birdie"][2], checkpoint()
    assert list(content) == list(expected)
    assert (content["step"], content["rates"], content[7]["name"]) == (3, [0.1, (1, None)], "x")
    assert same_bits(content[7]["a/b"], expected[7]["a/b"])
    assert all(same_bits(content["model"][name], expected["model"][name]) for name in expected["model"])
    assert content["model"]["lm_head.weight"] is content["model"]["tok_emb.weight"]


@pytest.mark.slow
def test_damage_is_refused_wherever_birdie_refuses_it(
    decoded: tuple[str, dict[str, Any], str], files: Path, built: dict[str, Any]
) -> None:
    _, results, effort = decoded
    damaged = sorted(files.glob("damaged*.birdie"))
    assert len(damaged) > 20
    for path in damaged:
        with pytest.raises(birdie.ArtifactError):
            birdie.load(path)
        if effort == "fast" and path.name.startswith("damaged-max"):
            assert results[path.name].startswith("ArtifactError")  # a sound stream may come first that it leaves out
            continue
        kind, number = results[path.name].split()
        assert kind == "ArtifactError"
        assert 1 <= int(number) <= len(built[effort].messages)


def test_the_number_of_an_error_stands_for_its_sentence(built: dict[str, standalone.Standalone]) -> None:
    space: dict[str, Any] = {"__name__": "decode", "__file__": "decode.py"}
    exec(built["fast"].source, space)
    data = container.to_bytes([Entry("w", SCHEMES["lossless"], DTYPES.index(torch.uint8), (0,), (), ())])
    assert space["load"](data)["w"].shape == (0,)
    with pytest.raises(space["ArtifactError"]) as error:
        space["load"](data[:-1])
    with pytest.raises(birdie.ArtifactError) as sentence, container.Reader(data[:-1]):
        pass
    last = str(sentence.value).split()[-3:]
    assert " ".join(last) in built["fast"].messages[int(str(error.value)) - 1]


def test_the_size_that_may_be_decoded_is_named_in_the_call(built: dict[str, standalone.Standalone]) -> None:
    space: dict[str, Any] = {"__name__": "decode", "__file__": "decode.py"}
    exec(built["max"].source, space)
    data = container.to_bytes([Entry("w", SCHEMES["lossless"], DTYPES.index(torch.uint8), (0,), (), ())])
    for load in space["load"], space["load_object"]:
        assert load(source=data, max_bytes=0)["w"].shape == (0,)
        with pytest.raises(space["ArtifactError"]):
            load(data, max_bytes=-1)


@pytest.mark.parametrize("effort", ["fast", "max"])
def test_the_file_fits_its_size(built: dict[str, standalone.Standalone], effort: str) -> None:
    assert built[effort].minified
    assert len(built[effort].packed) <= LIMITS[effort]
    assert sum(built[effort].bytes_by_module.values()) == len(built[effort].source)
    assert min(built[effort].bytes_by_module.values()) > 0


@pytest.mark.slow
def test_the_same_birdie_gives_the_same_bytes(built: dict[str, standalone.Standalone]) -> None:
    code = "import sys;from birdie.golf.standalone.build import build;sys.stdout.buffer.write(build('max').packed)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env={"PYTHONHASHSEED": "7"})
    assert done.stdout == built["max"].packed


def test_the_first_line_says_which_birdie_it_is_from(built: dict[str, standalone.Standalone]) -> None:
    first = built["max"].packed.split(b"\n")[0].decode()
    assert birdie.__version__ in first
    assert not {b"\r", b"\0"} & {bytes([byte]) for byte in built["max"].packed}  # survives text-mode transfers
    assert built["max"].packed.count(b"\n") == 2


def test_encoders_are_not_included(built: dict[str, standalone.Standalone]) -> None:
    modules = set(built["max"].bytes_by_module)
    assert modules >= {static.__name__, mixed.__name__}
    assert mixed.__name__ not in built["fast"].bytes_by_module
    encoding = (
        "birdie.compress.registry",
        "birdie.compress.rate.",
        "birdie.compress.kmeans",
        "birdie.compress.viterbi",
        "birdie.runtime.files",
        "birdie.train",
    )
    assert not [module for module in modules if module.startswith(encoding)]
    encoders = ("encode", "save", "fit", "allocate", "calibrate")
    for effort in "fast", "max":
        names = {node.name for node in ast.walk(bundled(effort)) if isinstance(node, ast.FunctionDef)}
        # `raw.encode_constant` is how its decoder checks that a constant is written in the shortest way.
        assert {name for name in names if name.split("__")[-1].startswith(encoders)} <= {
            "entropy__raw__encode_constant"
        }


def bundled(effort: Any) -> ast.Module:
    exports = standalone.EXPORTS | {"main": (standalone.ENTRY, "main")}
    return bundle(exports, standalone.refusals(effort), standalone.REFUSAL, standalone.SUBSTITUTES).tree


# Imports the decoder as many programs do, without an entry in sys.modules: numba cannot name such a module in a cache.
BY_PATH = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
for name in "first", "second":
    spec = spec_from_file_location(name, "decode.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    print(float(module.load("model.birdie")["w"].sum()))
"""


@pytest.mark.nightly
def test_the_unpacked_decoder_is_imported_again_whatever_its_cache_holds(
    built: dict[str, standalone.Standalone], tmp_path: Path
) -> None:
    (tmp_path / "decode.py").write_text(built["fast"].source)
    state = {"w": torch.arange(400.0).reshape(20, 20)}
    birdie.save(state, tmp_path / "model.birdie", lossless=True, coder="fast")

    def run(*arguments: str) -> str:
        command = [sys.executable, "-E", "-s", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    expected = f"{float(state['w'].sum())}\n" * 2
    assert run("-c", BY_PATH) == expected
    cache = [path for path in (tmp_path / "__pycache__").iterdir() if path.suffix != ".pyc"]
    assert cache  # else the rest proves nothing
    assert run("-c", BY_PATH) == expected
    for index, path in enumerate(cache):
        path.write_bytes([b"", b"x" * 50, path.read_bytes()[:-7]][index % 3])
    run("decode.py", "model.birdie", "out.pt")
    assert same_bits(torch.load(tmp_path / "out.pt")["w"], state["w"])


def test_the_script_fails_in_one_line(
    built: dict[str, standalone.Standalone], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space: dict[str, Any] = {"__name__": "decode", "__file__": "decode.py"}
    exec(built["fast"].source, space)
    (tmp_path / "damaged").write_bytes(b"birdie?")
    main = [value for name, value in space.items() if name not in standalone.EXPORTS and _calls_exit(value)]
    for arguments in ([], ["missing", "out.pt"], [str(tmp_path / "damaged"), "out.pt"]):
        monkeypatch.setattr(sys, "argv", ["decode.py", *arguments])
        with pytest.raises(SystemExit, match=r"decode\.py MODEL") as error:
            main[0]()
        assert "\n" not in str(error.value)


def _calls_exit(value: Any) -> bool:
    return callable(value) and "exit" in getattr(getattr(value, "__code__", None), "co_names", ())


def test_the_help_names_the_schemes_of_each_decoder(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build_app, ["decoder", "--help"]) == 0
    words = set(capsys.readouterr().out.replace(",", " ").split())
    assert set(standalone.SCHEMES["max"]) <= words
    assert not {"spectral", "tucker"} & words


def test_a_decoder_needs_python_numpy_numba_and_torch_alone(built: dict[str, standalone.Standalone]) -> None:
    for decoder in built.values():
        nodes = list(ast.walk(ast.parse(decoder.source)))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        packages = {name.split(".")[0] for name in names}
        assert packages - set(sys.stdlib_module_names) == {"numpy", "numba", "torch"}


def test_the_entry_module_has_the_schemes_of_birdie_in_the_order_of_their_codes() -> None:
    assert {name: code for code, name in enumerate(decode.DECODERS, 1)} == SCHEMES
    assert all(registry.decoder(name) is decoder for name, decoder in decode.DECODERS.items())
    assert set(standalone.SCHEMES["fast"]) < set(standalone.SCHEMES["max"]) < set(decode.DECODERS)


def test_one_word_removes_a_scheme(monkeypatch: pytest.MonkeyPatch, built: dict[str, standalone.Standalone]) -> None:
    fewer = tuple(name for name in standalone.SCHEMES["fast"] if name != "trellis")
    monkeypatch.setattr(standalone, "SCHEMES", {"fast": fewer, "max": standalone.SCHEMES["max"]})
    smaller = standalone.build("fast")
    gone = set(built["fast"].bytes_by_module) - set(smaller.bytes_by_module)
    assert any("trellis" in module for module in gone)
    assert len(smaller.packed) < len(built["fast"].packed)


def test_without_python_minifier_the_file_is_larger_and_stderr_says_so(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    built: dict[str, standalone.Standalone],
) -> None:
    monkeypatch.setitem(sys.modules, "python_minifier", None)
    path = tmp_path / "decode.py"
    assert run(build_app, ["decoder", "-o", str(path), "--coder", "fast"]) == 0
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert path.stat().st_size > len(built["fast"].packed)
    space: dict[str, Any] = {"__name__": "decode", "__file__": str(path)}
    exec(compile(path.read_bytes(), str(path), "exec"), space)
    birdie.save({"w": torch.zeros(3, 4)}, tmp_path / "zeros.birdie", lossless=True)
    assert same_bits(space["load"](tmp_path / "zeros.birdie")["w"], torch.zeros(3, 4))


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "decode.py"
    assert run(build_app, ["decoder", "-o", str(path), "--coder", "fast", "--json"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert err == ""
    assert answer["bytes"] == path.stat().st_size <= LIMITS["fast"]
    assert answer["bytes"] == min(answer["forms"].values())
    assert answer["minified"]
    assert len(answer["messages"]) > 30


def test_an_unknown_coder_is_refused() -> None:
    with pytest.raises(ConfigError, match="slow"):
        standalone.build("slow")  # type: ignore[arg-type]
