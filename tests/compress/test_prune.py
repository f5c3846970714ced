"""Pruning zeroes so many symbols of magnitude one, the cheapest first, over all tensors, and touches nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.compress.log_scales import scales_of
from birdie.compress.prune import prune
from birdie.compress.registry import decode
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.schemes.codebook import Codebook
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.ternary import Ternary
from birdie.entropy import coder
from birdie.errors import ConfigError
from tests.compress.matrices import random_weight


def model() -> dict[str, Encoded]:
    return {
        "b": Grid(sigma=0.7).encode("b", random_weight(12, 20)),
        "a": Grid(bits=3, group_size=6).encode("a", random_weight(9, 15, seed=1)),
        "t": Ternary(10).encode("t", random_weight(5, 20, seed=2)),
        "c": Codebook(4).encode("c", random_weight(5, 20, seed=3)),
    }


def ones(encoded: dict[str, Encoded]) -> int:
    return sum(int((np.abs(tensor.streams[0]) == 1).sum()) for name, tensor in encoded.items() if name != "c")


@settings(deadline=None)
@given(count=st.integers(0, 700))
def test_exactly_so_many_ones_become_zero_and_nothing_else_changes(count: int) -> None:
    original = model()
    after = prune(original, count)
    total = ones(original)
    assert ones(after) == max(0, total - count)
    assert original["c"] is after["c"]
    gone, left = [], []
    for name in ("b", "a", "t"):
        old, new = original[name], after[name]
        changed = old.streams[0] != new.streams[0]
        assert (np.abs(old.streams[0])[changed] == 1).all()
        assert not new.streams[0][changed].any()
        np.testing.assert_array_equal(old.streams[1], new.streams[1])
        group = old.params[0] if old.params else old.streams[0].shape[1]
        step = np.repeat(scales_of(old.streams[1]), group, axis=1)[:, : changed.shape[1]]
        gone.append(step[changed])
        left.append(step[np.abs(new.streams[0]) == 1])
    if 0 < count < total:
        assert np.concatenate(gone).max() <= np.concatenate(left).min()


def test_a_sensitivity_says_what_is_cheap() -> None:
    unpruned = {"w": Grid(sigma=1.0).encode("w", torch.randn(8, 32, generator=torch.Generator().manual_seed(0)))}
    mass = torch.ones(32)
    mass[:16] = 1e-4
    sensitivities = {"w": Sensitivity(hessian=torch.diag(mass))}
    count = int((np.abs(unpruned["w"].streams[0][:, :16]) == 1).sum())
    after = prune(unpruned, count, sensitivities=sensitivities)["w"].streams[0]
    assert not (np.abs(after[:, :16]) == 1).any()
    np.testing.assert_array_equal(after[:, 16:], unpruned["w"].streams[0][:, 16:])


def test_a_pruned_model_is_smaller_and_decodes() -> None:
    unpruned = {"w": Grid(sigma=0.7).encode("w", torch.randn(64, 256, generator=torch.Generator().manual_seed(0)))}
    after = prune(unpruned, 1000)
    sizes = [len(coder.encode(encoded["w"].streams[0]).payload) for encoded in (unpruned, after)]
    assert sizes[1] < 0.99 * sizes[0]
    assert decode(after["w"]).shape == (64, 256)


def test_nothing_to_prune_is_fine_and_less_than_nothing_is_not() -> None:
    assert prune({}, 5) == {}
    assert prune({"c": model()["c"]}, 5).keys() == {"c"}
    with pytest.raises(ConfigError, match="-1 symbols"):
        prune(model(), -1)
