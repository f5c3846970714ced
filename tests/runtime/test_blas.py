"""BLAS has one thread while tensors are compressed, and what it had before afterwards."""

from contextlib import suppress

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

import birdie
from birdie.compress.schemes.trellis import Trellis
from birdie.runtime.blas import one_thread


def blas_threads() -> set[int]:
    """Return the threads of NumPy's BLAS; SciPy may bring another."""
    return {library["num_threads"] for library in threadpool_info() if "numpy" in library["filepath"]}


def test_an_error_lifts_the_limit() -> None:
    with threadpool_limits(2, user_api="blas"):
        with suppress(ZeroDivisionError), one_thread():
            assert blas_threads() == {1}
            raise ZeroDivisionError
        assert blas_threads() == {2}


def test_tensors_are_encoded_with_one_thread(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[int]] = []
    encode = Trellis.encode_with

    def watched(self: Trellis, *arguments: object, **settings: object) -> object:
        seen.append(blas_threads())
        return encode(self, *arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(Trellis, "encode_with", watched)
    with threadpool_limits(2, user_api="blas"):
        birdie.save({"w": torch.randn(64, 64)}, f"{tmp_path}/model.birdie", bits=4.0)
        assert blas_threads() == {2}
    assert seen
    assert set.union(*seen) == {1}
