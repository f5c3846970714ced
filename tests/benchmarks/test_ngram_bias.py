"""The benchmark of the n-gram bias has a row for the model alone and for each setting, and its savings are exact."""

import numpy as np
import pytest

from benchmarks.ngram_bias import SETTINGS, log_probabilities, rows_of
from tests.benchmarks.byte_gpt import TOKENIZER, byte_gpt, byte_tokens


def test_rows_are_of_the_model_and_of_each_setting() -> None:
    text = "to be or not to be, that is the question; " * 8
    tokens = byte_tokens(text)
    logp = log_probabilities(byte_gpt(), tokens, 32, 16)
    rows = list(rows_of("hamlet", tokens, logp, TOKENIZER))
    assert [row["way"] for row in rows[1:-1]] == list(SETTINGS)
    nats = -logp[np.arange(len(tokens) - 1), tokens[1:]].astype(np.float64)
    assert rows[0]["bpb"] == pytest.approx(nats.sum() / np.log(2) / len(text))
    for row in rows:
        assert row["bpb"] + row["milli-bpb saved"] / 1000 == pytest.approx(rows[0]["bpb"])
    assert all(row["milli-bpb saved"] > 100 for row in rows if row["way"] in ("fixed 2", "learned"))
