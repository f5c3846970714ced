"""The one-file decoder: without birdie it decodes every scheme and coder to the bits that birdie gives, and refuses
damaged files in the same words."""

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import birdie
from birdie.artifact import container, repack
from birdie.artifact.codes import SCHEMES as NAMES
from birdie.artifact.container import Entry, Stream
from birdie.artifact.file import DTYPES
from birdie.entropy import coder as entropy
from birdie.standalone import decoder
from tests.artifact.states import every_dtype, same_bits, small_model
from tests.golf.scripts import INTERPRETED, script, start
from tests.reference.streams import FEATURES, stream

SCHEMES = {name: code for code, name in NAMES.items()}
SPECS = (
    *("trellis:states=8,sigma=0.3", "ternary", "int4:group_size=48", "codebook:k=9,per_row"),
    *("rotation:bits=3", "lowrank:rank=2,base=int4"),
    *("spectral:dct,edge=8,sigma=0.3", "tucker:energy=0.99"),
)

# Runs in a fresh interpreter: decodes each file with the decoder alone and stores the results.
DRIVER = """
import sys, pathlib, warnings
warnings.simplefilter("error")
warnings.simplefilter("ignore", RuntimeWarning)  # integers of kernels that Python runs wrap around
class Refuse:
    def find_spec(self, name, path=None, target=None):
        absent = {"birdie", "cyclopts", "rich", "safetensors", "sentencepiece", "threadpoolctl", "matplotlib"}
        assert name.split(".")[0] not in absent, f"the decoder imports {name}"
sys.meta_path.insert(0, Refuse())
import torch
torch.set_num_threads(1)
import decode
results = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.birdie")):
    try:
        results[path.name] = decode.load(path), decode.load(path.read_bytes()), decode.load_object(path)
    except decode.ArtifactError as error:
        results[path.name] = f"{type(error).__name__} {error}"
assert "birdie" not in sys.modules
torch.save((decode.__version__, results), sys.argv[2])
"""


def streams() -> dict[str, bytes]:
    """Return a file for each feature of the entropy coders, its integers as symbols of a grid or of a trellis."""
    files = {}
    for name, feature in FEATURES.items():
        values = feature.values
        if int(values.min()) < -(1 << 20) or int(values.max()) >= 1 << 20:
            continue  # beyond what float32 represents exactly after scaling
        symbols, steps = stream(name), entropy.encode(np.arange(len(values))[:, None] % 2000)
        coded = tuple(Stream(one.coder, one.payload) for one in (symbols, steps))
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
        birdie.save(every_dtype(), folder / f"dtypes-{effort}.birdie", lossless=True, effort=effort)
        birdie.save(small_model(), folder / f"int8-{effort}.birdie", effort=effort)
        repack.save_object(checkpoint(), folder / f"tree-{effort}.birdie", effort=effort)
    for index, spec in enumerate(SPECS):
        file = folder / f"spec{index}.birdie"
        birdie.save(small_model(), file, scheme=[("*", spec)], effort="fast" if index % 2 else "max")
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


def decode_alone(files: Path, folder: Path, **variables: str) -> tuple[str, dict[str, Any]]:
    """Return the version and the results by file name of the packed file alone in `folder`, in a fresh interpreter."""
    (folder / "decode.py").write_bytes(script("decoder").script)
    (folder / "driver.py").write_text(DRIVER)
    variables["PYTHONPATH"] = str(folder)
    done = start(folder, "driver.py", str(files), "out.pt", variables=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental
        version, results = torch.load(folder / "out.pt", weights_only=False)
    return version, results


def decode_here(path: Path) -> Any:
    """Return what DRIVER stores for a file, by the modules that are packed."""
    try:
        return decoder.load(path), decoder.load(path.read_bytes()), decoder.load_object(path)
    except birdie.ArtifactError as error:
        return f"ArtifactError {error}"


@pytest.fixture(scope="module", params=["modules", pytest.param("file", marks=pytest.mark.nightly)])
def decoded(request: pytest.FixtureRequest, files: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """File name → results of the decoder, by its modules or by the packed file, whose kernels take a minute."""
    if request.param == "modules":
        return {path.name: decode_here(path) for path in files.iterdir()}
    version, results = decode_alone(files, tmp_path_factory.mktemp("decoder"))
    assert version == birdie.__version__
    return results


@pytest.mark.nightly
def test_the_packed_file_decodes_without_birdie(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    state = {"w": torch.randn(6, 4), "norm": torch.ones(4)}
    birdie.save(state, tmp_path / "files" / "max.birdie")
    birdie.save(state, tmp_path / "files" / "fast.birdie", lossless=True, effort="fast")
    (tmp_path / "files" / "cut.birdie").write_bytes((tmp_path / "files" / "max.birdie").read_bytes()[:-1])
    version, results = decode_alone(tmp_path / "files", tmp_path, **INTERPRETED)
    assert version == birdie.__version__
    assert results["cut.birdie"] == decode_here(tmp_path / "files" / "cut.birdie")
    for name in ("max.birdie", "fast.birdie"):
        expected = birdie.load(tmp_path / "files" / name)
        for tensors in results[name]:
            assert tensors.keys() == expected.keys()
            assert all(same_bits(tensors[key], expected[key]) for key in expected)


def test_every_file_decodes_to_the_bits_that_birdie_gives(decoded: dict[str, Any], files: Path) -> None:
    sound = [path for path in sorted(files.glob("*.birdie")) if not path.name.startswith("damaged")]
    assert len(sound) > 15
    for path in sound:
        assert not isinstance(decoded[path.name], str), f"{path.name}: {decoded[path.name]}"
        expected, (by_path, by_bytes, _) = birdie.load(path), decoded[path.name]
        for state in by_path, by_bytes:
            assert list(state) == list(expected)
            assert all(same_bits(state[name], expected[name]) for name in expected), path.name


@pytest.mark.parametrize("effort", ["fast", "max"])
def test_a_whole_checkpoint_comes_back_nested(decoded: dict[str, Any], effort: str) -> None:
    content, expected = decoded[f"tree-{effort}.birdie"][2], checkpoint()
    assert list(content) == list(expected)
    assert (content["step"], content["rates"], content[7]["name"]) == (3, [0.1, (1, None)], "x")
    assert same_bits(content[7]["a/b"], expected[7]["a/b"])
    assert all(same_bits(content["model"][name], expected["model"][name]) for name in expected["model"])
    assert content["model"]["lm_head.weight"] is content["model"]["tok_emb.weight"]


def test_damage_is_refused_in_the_words_of_birdie(decoded: dict[str, Any], files: Path) -> None:
    damaged = sorted(files.glob("damaged*.birdie"))
    assert len(damaged) > 20
    for path in damaged:
        with pytest.raises(birdie.ArtifactError):
            birdie.load(path)
        assert decoded[path.name] == decode_here(path)


def test_the_size_that_may_be_decoded_is_named_in_the_call() -> None:
    data = container.to_bytes([Entry("w", SCHEMES["lossless"], DTYPES.index(torch.uint8), (0,), (), ())])
    for load in decoder.load, decoder.load_object:
        assert load(source=data, max_bytes=0)["w"].shape == (0,)
        with pytest.raises(birdie.ArtifactError):
            load(data, max_bytes=-1)


# Imports the decoder as many programs do, without an entry in sys.modules.
BY_PATH = """
from importlib.util import module_from_spec, spec_from_file_location
for name in "first", "second":
    spec = spec_from_file_location(name, "decode.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    print(float(module.load("model.birdie")["w"].sum()))
"""


@pytest.mark.nightly
def test_the_decoder_is_imported_again_whatever_its_cache_holds(tmp_path: Path) -> None:
    (tmp_path / "decode.py").write_bytes(script("decoder").script)
    state = {"w": torch.arange(400.0).reshape(20, 20)}
    birdie.save(state, tmp_path / "model.birdie", lossless=True, effort="fast")

    def run(*arguments: str) -> str:
        done = start(tmp_path, *arguments, variables={"NUMBA_CACHE_DIR": str(tmp_path / "kernels")})
        assert done.returncode == 0, done.stderr
        return done.stdout

    expected = f"{float(state['w'].sum())}\n" * 2
    assert run("-c", BY_PATH) == expected
    cache = [*(tmp_path / "kernels").rglob("*.nbc")]
    assert cache  # else the rest proves nothing
    assert run("-c", BY_PATH) == expected
    for index, path in enumerate(cache):
        path.write_bytes([b"", b"x" * 50, path.read_bytes()[:-7]][index % 3])
    run("decode.py", "model.birdie", "-o", "out.pt")
    assert same_bits(torch.load(tmp_path / "out.pt")["w"], state["w"])


def test_the_script_takes_its_output_with_or_without_a_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    birdie.save({"w": torch.arange(400.0).reshape(20, 20)}, tmp_path / "model.birdie", lossless=True)
    for flags in ([], ["-o"], ["--output"]):
        monkeypatch.setattr(sys, "argv", ["decode.py", str(tmp_path / "model.birdie"), *flags, str(tmp_path / "o.pt")])
        decoder.main()
        assert torch.load(tmp_path / "o.pt")["w"][19, 19] == 399
        (tmp_path / "o.pt").unlink()


def test_the_script_fails_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "damaged").write_bytes(b"birdie?")
    for arguments in ([], ["missing", "out.pt"], [str(tmp_path / "damaged"), "out.pt"]):
        monkeypatch.setattr(sys, "argv", ["decode.py", *arguments])
        with pytest.raises(SystemExit, match=r"decode\.py MODEL") as error:
            decoder.main()
        assert "\n" not in str(error.value)
