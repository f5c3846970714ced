"""The benchmark of tilting says what the model's own losses are, and what each way makes of them."""

import numpy as np
import pytest
import torch

from benchmarks.tilt import WAYS, log_probabilities, rows_of
from birdie.data.tokenizer import ByteTokenizer
from birdie.model.gpt import GPT, GPTConfig


def test_rows_are_of_the_model_and_of_each_way() -> None:
    torch.manual_seed(0)
    tokenizer = ByteTokenizer()
    config = GPTConfig(vocab_size=tokenizer.vocab_size, num_layers=2, model_dim=32, num_heads=4, num_kv_heads=2)
    model = GPT(config).eval()
    model.compute_dtype = torch.float32
    text = "to be or not to be, that is the question; " * 8
    tokens = np.concatenate(([tokenizer.bos_id], tokenizer.encode(text))).astype(np.uint16)
    found = log_probabilities(model, tokens, 32, 16)
    rows = list(rows_of("hamlet", tokens, found, tokenizer))
    assert [row["way"] for row in rows[1:-1]] == list(WAYS)
    nats = -found[np.arange(len(tokens) - 1), tokens[1:]].astype(np.float64)
    assert rows[0]["bpb"] == pytest.approx(nats.sum() / np.log(2) / len(text))
    for row in rows:
        assert row["bpb"] + row["milli-bpb saved"] / 1000 == pytest.approx(rows[0]["bpb"])
    assert all(row["milli-bpb saved"] > 100 for row in rows if row["way"] in ("fixed 2", "learned"))
