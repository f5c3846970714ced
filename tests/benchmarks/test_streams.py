"""Tensors as one byte string: nothing is lost, and the length is that of the values and escapes."""

import pytest
import torch

from benchmarks import streams, symbols
from tests.benchmarks.small_checkpoint import MIXED, state


@pytest.mark.parametrize("order", streams.ORDERS)
@pytest.mark.parametrize("name", ["mixed", "bf16", "fp32"])
def test_byte_strings_are_lossless(order: streams.Order, name: str) -> None:
    tensors = MIXED if name == "mixed" else symbols.FLOAT_SETS[name](state()).tensors
    data = streams.join(tensors, order)
    parts = streams.part(data, tensors, order)
    for key, tensor in tensors.items():
        assert parts[key].dtype == tensor.dtype
        assert torch.equal(parts[key], tensor)
    escaped = sum(int(((t < -127) | (t > 127)).sum()) for t in tensors.values() if t.dtype == torch.int16)
    width = {"mixed": 1, "bf16": 2, "fp32": 4}[name]
    assert len(data) == width * sum(tensor.numel() for tensor in tensors.values()) + 2 * escaped
