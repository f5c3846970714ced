"""A summary names dtypes and schemes as torch and the registry do, and needs neither."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import birdie
from birdie.artifact.container import DELTA, TENSOR, Entry, Stream, to_bytes
from birdie.artifact.file import DTYPES, dtype_of
from birdie.artifact.inspection import CASTS, SPEEDS, stored_as
from birdie.compress.schemes.cast import CAST_DTYPES, SIXTEEN_BIT
from birdie.entropy import coder, hints
from birdie.entropy.hints import EffortOption


def test_names_of_casts_are_those_of_the_scheme() -> None:
    assert {name: CAST_DTYPES[code] for (code,), name in CASTS.items()} == SIXTEEN_BIT


def test_names_of_dtypes_are_those_of_torch() -> None:
    for code, dtype in enumerate(DTYPES):
        assert dtype_of(Entry("w", 1, code, ())) is dtype


def test_torch_is_not_imported(tmp_path: Path) -> None:
    birdie.save({"bias": torch.ones(3), "w": torch.ones(64, 64)}, tmp_path / "x.birdie")
    code = (
        "import sys, birdie; print(birdie.inspect(sys.argv[1]).tensors[0].scheme);"
        "assert not {'torch', 'numba'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x.birdie")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "fp16\n"


@pytest.mark.parametrize(("option", "effort"), [("auto", "fast"), ("max", "max"), ("fast", "fast")])
def test_large_models_are_coded_to_load_fast_unless_asked(
    option: EffortOption, effort: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "LARGE", 4096)
    weights = {"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}
    saved = birdie.save(weights, tmp_path / "x.birdie", scheme="int4", effort=option)
    assert saved.effort == birdie.inspect(tmp_path / "x.birdie").effort == effort
    few = birdie.save({"w": weights["w"][:63]}, tmp_path / "x.birdie", scheme="int4", effort=option)
    assert few.effort == ("fast" if option == "fast" else "max")


@pytest.mark.parametrize(
    ("shape", "params", "text"),
    [
        ((8, 64), (7, 1, 64, 16, 0), "int4 by row, exact"),
        ((8, 64), (7, 1, 32, 257, 1), "int8 by 32, exact"),
        ((8, 64), (7, 8, 1, 9, 2), "int3 by column, exact"),
        ((8, 64), (7, 4, 1, 16, 3), "16 levels by 4 in a column, exact"),
        ((8, 64), (7, 4, 4, 21, 0), "21 levels by 4 × 4, exact"),
        ((64,), (7, 1, 64, 3, 0), "3 levels by row, exact"),
        ((8, 64), (8, 5), "5 levels by row, exact"),
        ((8, 64), (4, 5), "lossless"),
        ((8, 64), (), "lossless"),
    ],
)
def test_levels_of_quantized_weights_are_named(shape: tuple[int, ...], params: tuple[int, ...], text: str) -> None:
    assert stored_as(Entry("w", 1, 11, shape, params), {}) == text


@given(st.sampled_from((TENSOR, DELTA)), st.integers(1, 10), st.lists(st.integers(-9, 9), max_size=6))
def test_a_header_is_listed_whatever_parameters_it_has(kind: int, scheme: int, params: list[int]) -> None:
    """They are read when the tensor is decoded; a short list was once an IndexError."""
    entry = Entry("w", scheme if kind == TENSOR else 0, 11, (4, 6), tuple(params), (Stream(0, b""),), kind=kind)
    (row,) = birdie.inspect(io.BytesIO(to_bytes([entry]))).tensors
    assert (row.name, row.shape) == ("w", (4, 6))


def test_speeds_are_known_of_every_coder() -> None:
    """The numbers stand here without the coders, which import numba."""
    assert SPEEDS.keys() == coder.NAMES.keys()


def test_a_summary_is_a_table_in_a_terminal_and_in_a_notebook_and_a_line_in_a_list(tmp_path: Path) -> None:
    state = {f"{index}.<w>": torch.randn(8, 8) for index in range(3)}
    summary = birdie.save(state, tmp_path / "x.birdie", scheme="fp16")
    text, page, line = str(summary), summary._repr_html_(), repr(summary)
    assert all(name in text for name in state)
    assert "stored as" in text
    assert text.endswith("rounded to 16 bits: 3 of 3 tensors")
    assert page.count("<tr>") == 5
    assert "0.&lt;w&gt;" in page
    assert "<w>" not in page
    assert "\n" not in line
    assert f"{summary.bytes:,} B" in line
    many = birdie.save({f"{index}.weight": torch.ones(2, 2) for index in range(99)}, tmp_path / "y.birdie")
    assert "1.weight" not in str(many)  # a row for all that are stored in the same way
    assert "99" in str(many)
