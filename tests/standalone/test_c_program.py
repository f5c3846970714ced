"""The decoder in C as others use it: written by `birdie script`, compiled, in a program, under attack."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from birdie.cli import build_app
from birdie.cli.console import run
from birdie.standalone import C_DECODER
from tests.hostile import native
from tests.standalone.c_decoder import FLAGS, compiler
from tests.standalone.test_web_decoder import RELEASED, saved

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "c" / "tensors.c"

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C compiler, cc")


def test_the_script_is_the_decoder_and_its_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "birdie.c"
    assert run(build_app, ["script", "--kind", "decoder", "--language", "c", "-o", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [Path(answer["path"]), Path(answer["header"])] == [path, tmp_path / "birdie.h"]
    assert [path.read_bytes(), (tmp_path / "birdie.h").read_bytes()] == [file.read_bytes() for file in C_DECODER]
    assert answer["bytes"] == sum(file.stat().st_size for file in C_DECODER)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--kind", "pair"], "pair"),
        (["--kind", "decoder", "--requirements", "packages.txt"], "--requirements"),
        (["--kind", "decoder", "-o", "birdie.h"], "birdie.h"),
    ],
)
def test_what_c_has_not_is_refused(
    arguments: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(build_app, ["script", *arguments, "--language", "c", "--json"]) == 1
    assert named in json.loads(capsys.readouterr().out)["error"]["message"]
    assert not [*tmp_path.iterdir()]


def test_a_file_of_somebody_else_stays(tmp_path: Path) -> None:
    (tmp_path / "birdie.h").write_text("mine", encoding="utf-8")
    path = tmp_path / "birdie.c"
    assert run(build_app, ["script", "--kind", "decoder", "--language", "c", "-o", str(path)]) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["birdie.h"]


@pytest.mark.parametrize("flags", [["-O1"], ["-O1", "-DBIRDIE_NO_MALLOC", "-ffreestanding"]], ids=["hosted", "bare"])
@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_no_compiler_has_a_warning_and_there_is_no_state(name: str, flags: list[str], tmp_path: Path) -> None:
    """No symbol of the object file is of data that can be written."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    path = tmp_path / "birdie.o"
    command = [name, *FLAGS, *flags, "-fno-pic", "-c", str(C_DECODER[0]), "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    listed = subprocess.run(["nm", str(path)], capture_output=True, text=True, check=True).stdout
    kinds = re.findall(r"^\w* +([A-Za-z]) \S+$", listed, re.MULTILINE)
    assert {"T", "t", "U"} <= {*kinds}
    assert not {*"bBdDC"} & {*kinds}


def test_the_header_is_also_one_of_cpp(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("c++ is not installed")
    program = tmp_path / "program.cpp"
    program.write_text('#include "birdie.h"\nint main() { return birdie_error_text(0) == nullptr; }\n')
    command = ["c++", "-Wall", "-Wextra", "-pedantic", "-Werror", f"-I{C_DECODER[1].parent}", "-c", str(program)]
    subprocess.run([*command, "-o", str(tmp_path / "program.o")], check=True)


def test_the_example_prints_the_tensors_of_a_file(tmp_path: Path) -> None:
    program, model = tmp_path / "tensors", tmp_path / "model.birdie"
    include = f"-I{C_DECODER[0].parent}"
    command = [compiler() or "cc", *FLAGS, include, str(EXAMPLE), str(C_DECODER[0]), "-o", str(program)]
    subprocess.run(command, check=True)
    model.write_bytes(saved({"a": torch.full((2, 3), 0.5).bfloat16(), "b": torch.arange(4)}, lossless=True))
    done = subprocess.run([str(program), str(model)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["a: bfloat16 (2, 3), mean 0.5", "b: int64 (4)"]
    model.write_bytes(model.read_bytes()[:-1])
    done = subprocess.run([str(program), str(model)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "cut" in done.stderr


@pytest.mark.parametrize("count", [20, pytest.param(native.EACH, marks=pytest.mark.nightly)])
def test_mutants_end_without_a_report(count: int, tmp_path: Path) -> None:
    """`python -m tests.hostile.native` does this a million times, of more files."""
    cc = native.compiler()
    if cc is None:
        pytest.skip("cc has no sanitizers")
    files = {path.name: path.read_bytes() for path in sorted(RELEASED.glob("*.birdie")) if path.is_file()}
    counted = native.attack(native.build(cc, tmp_path, short=False), 0, files["base.birdie"], [*files.values()], count)
    assert counted["mutants"] == (1 + count) * len(files)
    assert 0 < counted["refused"] < counted["mutants"]
