"""Rival coders: every coder restores its input, and only exact forms can be the smallest."""

from collections.abc import Iterator

import pytest

from benchmarks import rivals
from tests.benchmarks.small_checkpoint import symbol_set


@pytest.mark.parametrize("integers", [True, False], ids=["symbols", "floats"])
@pytest.mark.parametrize("key", [key for key in rivals.MEASURES if key not in ("nncodec", "zipnn", "lrzip")])
def test_rivals_are_lossless(key: str, integers: bool) -> None:
    symbols = symbol_set(integers=integers)
    try:
        measured = rivals.MEASURES[key][1](symbols)
    except rivals.NotInstalledError as error:
        pytest.skip(f"{key}: {error}")
    except rivals.NotApplicableError:
        assert key == "row-class"
        assert not integers
        return
    assert measured.exact
    assert 0 < measured.bytes < 2 * symbols.bytes + 2000
    assert measured.encode_s > 0
    assert measured.decode_s > 0


@pytest.mark.slow  # processes that import torch, and a program that takes seconds to start
@pytest.mark.parametrize("key", ["nncodec", "zipnn", "lrzip"])
def test_rivals_in_other_processes_are_lossless(key: str) -> None:
    symbols = symbol_set(integers=key != "zipnn")
    try:
        measured = rivals.MEASURES[key][1](symbols)
    except rivals.NotInstalledError as error:
        pytest.skip(f"{key}: {error}")
    assert measured.exact
    assert 0 < measured.bytes < 2 * symbols.bytes + 2000


def test_the_smallest_form_counts_and_one_wrong_form_is_not_hidden() -> None:
    def forms(*exact: bool) -> Iterator[rivals.Measured]:
        for size, right in enumerate(exact, start=10):
            yield rivals.Measured(size, 1.0, 1.0, right, "")

    assert rivals.smallest(list(forms(True, True))).bytes == 10
    assert not rivals.smallest(list(forms(True, False))).exact
