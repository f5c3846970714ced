"""The benchmark of evaluation modes: all modes score the same targets, and rows compare with the plain loop."""

import numpy as np
import pytest
import torch

from benchmarks.evaluate import measure
from tests.benchmarks.byte_gpt import byte_gpt, byte_tokens


def test_rows_compare_with_the_plain_loop() -> None:
    model = byte_gpt()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    tokens = byte_tokens("to be or not to be, that is the question; " * 3)
    rows = measure(model, tokens, np.ones(len(tokens), np.uint16), 1, 32, 8, [16], 1)
    assert [row["way"] for row in rows] == [
        "plain loop, stride 8",
        "windows",
        "windows, bfloat16",
        "stream, chunks of 16",
        "stream, chunks of 16, bfloat16",
    ]
    assert list(rows[0])[:4] == ["way", "dtype", "seconds", "faster"]
    assert (rows[0]["bpb_off"], rows[0]["nats_off"], rows[0]["faster"]) == (0, 0, 1)
    assert rows[1]["nats_off"] < 1e-4 < rows[2]["nats_off"]
    assert rows[1]["bpb"] == pytest.approx(rows[0]["bpb"], abs=1e-5)
