"""The benchmark of kept bits compares with what is kept whole, and says what a cache takes."""

import numpy as np
import pytest
import torch

from benchmarks.cache import measure
from birdie.data.tokenizer import ByteTokenizer
from birdie.model.gpt import GPT, GPTConfig


def test_rows_compare_with_the_first() -> None:
    torch.manual_seed(0)
    tokenizer = ByteTokenizer()
    config = GPTConfig(vocab_size=tokenizer.vocab_size, num_layers=2, model_dim=32, num_heads=4, num_kv_heads=2)
    model = GPT(config).eval()
    model.compute_dtype = torch.float32
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    tokens = np.concatenate(([tokenizer.bos_id], tokenizer.encode("to be or not to be; " * 12))).astype(np.uint16)
    rows = measure(model, tokens, tokenizer, [0, 8, 2], 96, 32, 1)
    assert [row["bits"] for row in rows] == ["all", 8, 2]
    assert rows[0]["milli-bpb lost"] == 0
    assert abs(rows[1]["milli-bpb lost"]) < abs(rows[2]["milli-bpb lost"])
    for row in rows[1:]:
        assert row["bpb"] - row["milli-bpb lost"] / 1000 == pytest.approx(rows[0]["bpb"])
    assert [row["bytes a token"] for row in rows] == [2 * 2 * 2 * each for each in (32, 10, 4)]
    assert rows[0]["bytes of the cache"] == 96 * rows[0]["bytes a token"]
    assert rows[2]["bytes of the cache"] == 96 * rows[2]["bytes a token"] + 64 * rows[0]["bytes a token"]
