"""The benchmark of adapters says what the model alone scores in the same windows, and each way to learn."""

import numpy as np
import pytest
import torch

from benchmarks.lora import CHOSEN, rows_of
from benchmarks.overrides import parse_overrides
from birdie.data.tokenizer import ByteTokenizer
from birdie.model.gpt import GPT, GPTConfig
from birdie.score.ttt.lora import LoRAMode
from birdie.score.ttt.multi_phase import MultiPhaseMode


def test_rows_are_of_the_model_and_of_each_way() -> None:
    torch.manual_seed(0)
    tokenizer = ByteTokenizer()
    config = GPTConfig(vocab_size=tokenizer.vocab_size, num_layers=2, model_dim=32, num_heads=4, num_kv_heads=2)
    model = GPT(config).eval()
    text = [tokenizer.bos_id, *tokenizer.encode("to be or not to be, that is the question; ")]
    tokens = np.array(text * 6 + text[1:] * 4, np.uint16)
    way = "rank=4,lr=0.01,chunk=16,batch_docs=2"
    phased = MultiPhaseMode(prefix_docs=4, phases=1, lr=0.1, chunk_tokens=64, batch_seqs=1)
    still = "rank=1,lr=0,chunk=16"
    rows = list(rows_of("hamlet", model, tokens, tokenizer, 32, [way, still], phased))
    assert [row["adapt"] for row in rows] == ["", "lora", "phased"] * 2
    assert rows[1]["saved"] > 0.01
    assert rows[2]["saved"] > rows[1]["saved"] + 0.01
    assert rows[0]["cost"] == 1
    assert rows[4]["saved"] == pytest.approx(0, abs=1e-5)
    assert rows[1]["bpb"] + rows[1]["saved"] == pytest.approx(rows[0]["bpb"])
    for each in CHOSEN:
        assert parse_overrides(each, LoRAMode()).batch_docs == 8
