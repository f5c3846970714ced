"""A scheme is one file: whatever birdie does with its own schemes, it does with one that is put beside them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import birdie
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.compress import schemes
from birdie.errors import ConfigError
from birdie.standalone import decoder
from tests.golf.scripts import INTERPRETED, start

ROOT = Path(__file__).resolve().parents[2]
INSIDE = """
import sys
from pathlib import Path
import torch, birdie
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.compress import registry
from birdie.compress.spec_examples import spec_examples
from birdie.standalone import decoder
from birdie.golf.packed_script import pack
from birdie.web.support import unsupported

assert Path(birdie.__file__).parents[1] == Path.cwd()
def same(state, other):
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)

state = {"w": torch.randn(12, 16), "norm": torch.ones(24)}
torch.save(state, "model.pt")
birdie.save(state, "model.birdie", scheme=[("w", "nf4:group_size=8")], effort="fast")
command = ["compress", "model.pt", "-o", "same.birdie", "--scheme", "w=nf4:group_size=8", "--effort", "fast"]
assert run(build_app, command) == 0
loaded = birdie.load("model.birdie")
assert 0 < float((loaded["w"] - state["w"]).std()) < 0.2
assert same(birdie.load("same.birdie"), loaded)
assert {tensor.name: tensor.scheme for tensor in birdie.inspect("model.birdie").tensors}["w"] == "nf4"
assert same(decoder.load("model.birdie"), loaded)
for outer in ("rotation:base=nf4", "lowrank:rank=1,base=nf4", "tucker:ranks=4x4,base=nf4"):
    birdie.save(state, "inner.birdie", scheme=[("w", outer)], effort="fast")
    assert {tensor.scheme for tensor in birdie.inspect("inner.birdie").tensors} >= {outer.partition(":")[0]}
    assert same(decoder.load("inner.birdie"), birdie.load("inner.birdie"))
assert "has the scheme nf4" in unsupported("model.birdie")
assert birdie.schemes.Nf4(group_size=8) == registry.parse_spec("nf4:group_size=8")
assert "nf4" in spec_examples() and "| `nf4:group_size=64` |" in registry.markdown_table()
Path("decode.py").write_bytes(pack("decoder").script)
torch.save(loaded, "loaded.pt")
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with birdie, among whose schemes is tests/compress/nf4.py."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT / "birdie", folder / "birdie")
    shutil.copy(ROOT / "tests" / "compress" / "nf4.py", folder / "birdie" / "compress" / "schemes" / "nf4.py")
    return folder


def python(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `python ARGUMENTS` with the birdie in a folder, kernels interpreted."""
    variables = {**os.environ, **INTERPRETED, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_file_beside_the_others_is_a_scheme_everywhere(package: Path) -> None:
    done = python(package, "-c", INSIDE)
    assert done.returncode == 0, done.stderr[-3000:]
    shutil.move(package / "birdie", package / "birdie_inside")  # the decoder works without it
    done = start(package, "decode.py", "model.birdie", "out.pt", variables=INTERPRETED)
    shutil.move(package / "birdie_inside", package / "birdie")
    assert done.returncode == 0, done.stderr[-3000:]
    state, expected = torch.load(package / "out.pt"), torch.load(package / "loaded.pt")
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.nightly
def test_a_file_beside_the_others_is_put_to_the_laws_of_schemes(package: Path) -> None:
    laws, paths = str(ROOT / "tests" / "compress" / "test_conformance.py"), f"pythonpath={package} {ROOT}"
    options = ("-p", "no:cacheprovider", "-o", paths, "-W", "ignore::RuntimeWarning")  # integers wrap around
    done = python(package, "-m", "pytest", *options, laws, "-k", "nf4")
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.fixture
def _numbers_read_anew() -> Iterator[None]:
    schemes.numbers.cache_clear()
    yield
    schemes.numbers.cache_clear()


@pytest.mark.usefixtures("_numbers_read_anew")
@pytest.mark.parametrize(
    ("name", "number", "named"),
    [("other", 5, "'other'.*'ternary'.*5"), ("other", 64, "64"), ("another", 60, "another")],
)
def test_a_file_of_another_owners_number_or_name_is_refused(
    name: str, number: int, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.py").write_text(f'DECODER = Decoder("{name}", {number}, layout, decode)\n')
    monkeypatch.setattr(schemes, "__path__", [str(tmp_path), *schemes.__path__])
    with pytest.raises(ConfigError, match=named):
        schemes.numbers()


@pytest.mark.usefixtures("squares")
def test_a_scheme_of_another_package_goes_through_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.randn(24, 40)}
    torch.save(state, "model.pt")
    assert run(build_app, ["compress", "model.pt", "-o", "model.birdie", "--scheme", "w=squares:0.2"]) == 0
    assert run(build_app, ["inspect", "model.birdie"]) == 0
    assert "squares" in capsys.readouterr().out
    birdie.save(state, "same.birdie", scheme=[("w", "squares:0.2")])
    assert torch.equal(birdie.load("model.birdie")["w"], birdie.load("same.birdie")["w"])
    assert run(build_app, ["decompress", "model.birdie", "-o", "decoded.pt"]) == 0
    with pytest.raises(birdie.ArtifactError, match="'squares'"):
        decoder.load("model.birdie")
