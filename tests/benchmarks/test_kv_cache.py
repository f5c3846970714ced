"""The benchmark of the quantized KV cache compares with the unquantized cache, and counts its bytes."""

import pytest
import torch

from benchmarks.kv_cache import measure
from tests.benchmarks.byte_gpt import TOKENIZER, byte_gpt, byte_tokens


def test_rows_compare_with_the_unquantized_cache() -> None:
    model = byte_gpt()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    rows = measure(model, byte_tokens("to be or not to be; " * 12), TOKENIZER, [0, 8, 2], 96, 32, 1)
    assert [row["bits"] for row in rows] == ["all", 8, 2]
    assert rows[0]["milli-bpb lost"] == 0
    assert abs(rows[1]["milli-bpb lost"]) < abs(rows[2]["milli-bpb lost"])
    for row in rows[1:]:
        assert row["bpb"] - row["milli-bpb lost"] / 1000 == pytest.approx(rows[0]["bpb"])
    assert [row["bytes a token"] for row in rows] == [2 * 2 * 2 * head_bytes for head_bytes in (32, 10, 4)]
    assert rows[0]["bytes of the cache"] == 96 * rows[0]["bytes a token"]
    assert rows[2]["bytes of the cache"] == 96 * rows[2]["bytes a token"] + 64 * rows[0]["bytes a token"]
