"""The benchmark of LoRA adapters compares each setting with the model alone in the same windows."""

import pytest

from benchmarks.overrides import parse_overrides
from benchmarks.ttt_lora import DEFAULT_SETTINGS, rows_of
from birdie.score.modes.ttt_lora import LoRAMode
from birdie.score.modes.ttt_multi_phase import MultiPhaseMode
from tests.benchmarks.byte_gpt import TOKENIZER, byte_gpt, byte_tokens


def test_rows_are_of_the_model_of_adapters_and_of_phases() -> None:
    text = "to be or not to be, that is the question; "
    tokens = byte_tokens(*[text] * 5, text * 5)
    learning = "rank=4,lr=0.01,chunk=16,batch_docs=2"
    constant = "rank=1,lr=0,chunk=16"
    phased = MultiPhaseMode(prefix_docs=4, phases=1, lr=0.1, chunk_tokens=64, batch_seqs=1)
    rows = list(rows_of("hamlet", byte_gpt(), tokens, TOKENIZER, 32, [learning, constant], phased))
    assert [row["adapt"] for row in rows] == ["", "lora", "phased"] * 2
    assert rows[1]["saved"] > 0.01
    assert rows[2]["saved"] > rows[1]["saved"] + 0.01
    assert rows[0]["cost"] == 1
    assert rows[4]["saved"] == pytest.approx(0, abs=1e-5)
    assert rows[1]["bpb"] + rows[1]["saved"] == pytest.approx(rows[0]["bpb"])


@pytest.mark.parametrize("lora", DEFAULT_SETTINGS)
def test_the_default_settings_are_valid(lora: str) -> None:
    assert parse_overrides(lora, LoRAMode()).batch_docs == 8
