"""The package as people install it: complete archives, and a wheel that works where nothing can be written.

The wheel is installed without network into an environment of its own that has, of the packages of the running one,
those alone that it requires: it fails where a requirement is missing. At night the README's Python runs there in an
empty folder, on a file system that is read-only: a process that writes anywhere but into its working folder gets an
error of the operating system.
"""

import email
import email.message
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path
from shutil import copy2, copytree, ignore_patterns

import numba
import pytest
import torch
from numba.core.caching import _CacheLocator
from packaging.requirements import Requirement

import birdie
from tests.artifact.states import small_model

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("birdie", "recipes", "tests")  # tests, too: they must be left out
FILES = ("LICENSE", "MANIFEST.in", "Makefile", "README.md", "constraints.txt", "pyproject.toml")
WITHOUT_FOLDERS = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "NUMBA_CACHE_DIR")}

READ_ONLY = '''
import errno, json, os, sys
from pathlib import Path

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate"}
refused = []

def check(event, arguments):
    """Refuse what a read-only file system refuses, outside the working folder."""
    if event == "open":
        changes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    else:
        changes = event in CHANGES
    if changes and isinstance(arguments[0], (str, bytes, os.PathLike)):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if path != os.devnull and not (path + os.sep).startswith(FOLDER):
            refused.append(path)
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

FOLDER = os.path.realpath(".") + os.sep
sys.addaudithook(check)
try:
    Path(sys.prefix, "written").write_text("")
except OSError:
    assert refused.pop()  # else this proves nothing
else:
    raise AssertionError
'''
PRINT_PATH = "print(json.dumps(birdie.__file__))\n"


def run(command: list[str | Path], folder: Path) -> str:
    """Run a command in `folder`, without the checkout on any path; return its stdout."""
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=WITHOUT_FOLDERS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel of `make wheel`, in a copy of the checkout."""
    folder = tmp_path_factory.mktemp("distribution")
    for name in SOURCES:
        copytree(ROOT / name, folder / name, ignore=ignore_patterns("__pycache__"))
    for name in FILES:
        copy2(ROOT / name, folder)
    run(["make", "--old-file=.venv/installed", f"BIN={Path(sys.executable).parent}", "wheel"], folder)
    (sdist,) = folder.glob("dist/*.tar.gz")
    (wheel,) = folder.glob("dist/*.whl")
    return sdist, wheel


def test_archives_have_the_package_and_no_tests(archives: tuple[Path, Path]) -> None:
    sdist, wheel = archives
    stem = f"birdie_compress-{birdie.__version__}"
    assert sdist.name == f"{stem}.tar.gz"
    assert wheel.name == f"{stem}-py3-none-any.whl"
    kinds = "*.py", "*.js", "*.html", "*.css", "*.wasm", "*.c", "*.h", "package.json"
    modules = {path.relative_to(ROOT).as_posix() for kind in kinds for path in (ROOT / "birdie").rglob(kind)}
    recipes = {path.name for path in (ROOT / "recipes").glob("*.toml")}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        commands = archive.read(f"{stem}.dist-info/entry_points.txt").decode()
    assert modules | {"birdie/py.typed", f"{stem}.dist-info/licenses/LICENSE"} <= names
    assert {f"{stem}.data/data/share/birdie/recipes/{name}" for name in recipes} <= names
    assert {name.split("/")[0] for name in names} == {"birdie", f"{stem}.data", f"{stem}.dist-info"}
    about = metadata(wheel)
    assert (about["Name"], about["Version"]) == ("birdie-compress", birdie.__version__)
    assert "birdie = birdie.cli:main" in commands
    with tarfile.open(sdist) as archive_of_sources:
        sources = {name.partition("/")[2] for name in archive_of_sources.getnames()}
    assert modules | {f"recipes/{name}" for name in recipes} | {*FILES} - {"Makefile"} | {"birdie/py.typed"} <= sources
    assert not [name for name in sources if name.split("/")[0] == "tests"]


def metadata(wheel: Path) -> email.message.Message:
    """Return the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def required(lines: Iterable[str]) -> set[str]:
    """Return the names of all distributions that are required, extras left out, and what they require in turn."""
    names, waiting = set[str](), list(lines)
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name not in names and (requirement.marker is None or requirement.marker.evaluate()):
            names.add(requirement.name)
            waiting += importlib.metadata.requires(requirement.name) or ()
    return names


@pytest.fixture(scope="module")
def environment(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment with the wheel, what it requires and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in required(
        metadata(archives[1]).get_all("Requires-Dist", ())
    ):  # links: copies of torch alone would take a minute
        for file in importlib.metadata.files(name) or ():
            entry = packages / file.parts[0]
            if file.parts[0] not in ("..", "__pycache__") and not entry.is_symlink():
                entry.symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / file.parts[0])
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    run([*pip, "install", "--no-deps", "--no-index", "--quiet", archives[1]], folder)
    run([*pip, "check"], folder)
    for path in (ROOT / "birdie").rglob("*"):  # kernels of the same sources are not compiled again
        if path.is_dir():
            for kernel in kept_kernels(path).glob("*.nb[ci]"):
                target = packages / path.relative_to(ROOT) / "__pycache__"
                target.mkdir(exist_ok=True)
                copy2(kernel, target)
    return folder / "bin"


def kept_kernels(modules: Path) -> Path:
    """Return the folder where numba keeps the kernels of the modules in a folder."""
    folder = vars(numba.config)["CACHE_DIR"]
    if not folder:
        return modules / "__pycache__"
    return Path(folder, _CacheLocator.get_suitable_cache_subpath(str(modules / "module.py")))


def readme_code() -> str:
    """Return the Python of the README."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.M)
    assert blocks
    return "".join(blocks)


def test_an_installed_wheel_compresses_and_decompresses(environment: Path, tmp_path: Path) -> None:
    command = environment / "birdie"
    assert run([command, "--version"], tmp_path) == f"{birdie.__version__}\n"
    torch.save({"weight": torch.randn(64, 96), "bias": torch.randn(96)}, tmp_path / "model.pt")
    run([command, "compress", "model.pt", "--bits", "4", "-o", "model.birdie"], tmp_path)
    run([command, "decompress", "model.birdie", "-o", "back.pt"], tmp_path)
    state, back = birdie.load(tmp_path / "model.birdie"), torch.load(tmp_path / "back.pt")
    assert list(state) == ["weight", "bias"]
    assert (tmp_path / "model.birdie").stat().st_size <= 4 * (64 * 96 + 96) / 8
    assert state.keys() == back.keys()
    assert all(torch.equal(state[name], back[name]) for name in state)


@pytest.mark.nightly
def test_an_installed_wheel_runs_the_readme_and_reads_files(environment: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    where = run([environment / "python", "-c", readme_code() + "print(birdie.__file__)"], folder)
    assert Path(where.strip()).is_relative_to(environment.parent)
    assert [path.name for path in folder.iterdir()] == ["model.birdie"]
    assert (folder / "model.birdie").stat().st_size <= 100_000
    assert json.loads(run([environment / "birdie", "inspect", "model.birdie", "--json"], folder))["weights"] > 0
    assert "sota" in run([environment / "birdie", "recipe", "list"], folder)


@pytest.mark.nightly
@pytest.mark.timeout(900)  # kernels are compiled and not kept: a minute or two of a core
def test_an_installed_wheel_runs_on_a_read_only_file_system(environment: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    command = environment / "birdie"
    assert run([command, "--version"], folder) == f"{birdie.__version__}\n"
    state = {name: tensor.tolist() for name, tensor in small_model().items() if tensor.is_floating_point()}
    (folder / "state.json").write_text(json.dumps(state))
    same = """
state = {name: torch.tensor(values) for name, values in json.loads(Path("state.json").read_text()).items()}
birdie.save(state, "max.birdie", bits=4)
birdie.save(state, "fast.birdie", lossless=True, effort="fast")
birdie.load("fast.birdie")
"""
    code = READ_ONLY + readme_code() + same + PRINT_PATH
    path = json.loads(run([environment / "python", "-c", code], folder))
    assert Path(path).is_relative_to(environment.parent)
    assert json.loads(run([command, "inspect", "model.birdie", "--json"], folder))["bytes"] <= 100_000
    assert "sota" in run([command, "recipe", "list"], folder)

    tensors = {name: torch.tensor(values) for name, values in state.items()}
    birdie.save(tensors, tmp_path / "max.birdie", bits=4)
    birdie.save(tensors, tmp_path / "fast.birdie", lossless=True, effort="fast")
    for name in ("max.birdie", "fast.birdie"):
        files = (tmp_path / name).read_bytes(), (folder / name).read_bytes()
        assert hashlib.sha256(files[0]).digest() == hashlib.sha256(files[1]).digest(), name
