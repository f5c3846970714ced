"""A summary names dtypes and schemes as torch and the registry do, and needs neither."""

import subprocess
import sys
from pathlib import Path

import torch

import birdie
from birdie.artifact.container import Entry
from birdie.artifact.file import DTYPES, dtype_of
from birdie.artifact.inspect import CASTS
from birdie.compress.schemes.cast import CAST_DTYPES, SIXTEEN_BIT


def test_names_of_casts_are_those_of_the_scheme() -> None:
    assert {name: CAST_DTYPES[code] for (code,), name in CASTS.items()} == SIXTEEN_BIT


def test_names_of_dtypes_are_those_of_torch() -> None:
    for code, dtype in enumerate(DTYPES):
        assert dtype_of(Entry("w", 1, code, ())) is dtype


def test_torch_is_not_imported(tmp_path: Path) -> None:
    birdie.save({"w": torch.ones(64, 64), "bias": torch.ones(3)}, tmp_path / "x.birdie")
    code = (
        "import sys, birdie; print(birdie.inspect(sys.argv[1]).tensors[0].scheme);"
        "assert not {'torch', 'numba'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x.birdie")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "fp16\n"
