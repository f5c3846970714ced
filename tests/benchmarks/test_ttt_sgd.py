"""The benchmark of test-time training with SGD has a row for the model alone and for each setting."""

import pytest

from benchmarks.overrides import parse_overrides
from benchmarks.ttt_sgd import DEFAULT_SETTINGS, rows_of
from birdie.score.modes.ttt_sgd import SGDMode
from tests.benchmarks.byte_gpt import TOKENIZER, byte_gpt, byte_tokens


def test_rows_are_of_the_model_and_of_each_setting() -> None:
    model, tokens = byte_gpt(), byte_tokens("to be or not to be, that is the question; " * 12)
    sgd = "lr=0.05,epochs=1,chunk_tokens=64,batch_seqs=1"
    for stride in (0, 16):
        rows = list(rows_of("hamlet", model, tokens, TOKENIZER, 32, stride, [sgd]))
        assert [row["sgd"] for row in rows] == ["", sgd]
        assert rows[1]["bpb"] + rows[1]["saved"] == pytest.approx(rows[0]["bpb"])
        assert rows[1]["saved"] > 0.1
        assert rows[1]["cost"] > rows[0]["cost"] == 1


@pytest.mark.parametrize("sgd", DEFAULT_SETTINGS)
def test_the_default_settings_are_valid(sgd: str) -> None:
    assert parse_overrides(sgd, SGDMode()).epochs == 1
