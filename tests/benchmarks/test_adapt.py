"""The benchmark of learning while scoring says what the model alone scores, and each way to learn."""

import numpy as np
import pytest
import torch

from benchmarks.adapt import CHOSEN, rows_of
from benchmarks.overrides import parse_overrides
from birdie.data.tokenizer import ByteTokenizer
from birdie.model.gpt import GPT, GPTConfig
from birdie.score.ttt.sgd import SGDSettings


def test_rows_are_of_the_model_and_of_each_way() -> None:
    torch.manual_seed(0)
    tokenizer = ByteTokenizer()
    config = GPTConfig(vocab_size=tokenizer.vocab_size, num_layers=2, model_dim=32, num_heads=4, num_kv_heads=2)
    model = GPT(config).eval()
    text = "to be or not to be, that is the question; " * 12
    tokens = np.concatenate(([tokenizer.bos_id], tokenizer.encode(text))).astype(np.uint16)
    way = "lr=0.05,epochs=1,chunk_tokens=64,batch_seqs=1"
    for stride in (0, 16):
        rows = list(rows_of("hamlet", model, tokens, tokenizer, 32, stride, [way]))
        assert [row["sgd"] for row in rows] == ["", way]
        assert rows[1]["bpb"] + rows[1]["saved"] == pytest.approx(rows[0]["bpb"])
        assert rows[1]["saved"] > 0.1
        assert rows[1]["cost"] > rows[0]["cost"] == 1
    for each in CHOSEN:
        assert parse_overrides(each, SGDSettings()).epochs == 1
