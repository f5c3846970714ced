"""The benchmark of scoring: rows are modes with settings, and differences are to the first row."""

import numpy as np
import pytest
import torch

from benchmarks.command import Row
from benchmarks.scoring import QUESTIONS, measure, parse_row, random_gpt
from birdie.gpt.data.tokenizer import ByteTokenizer
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.score.accumulator import Text

TOKENIZER = ByteTokenizer()
TEXT = "to be or not to be, that is the question; "


def small_gpt(std: float = 0.0) -> GPT:
    """Return a GPT of two layers over raw bytes."""
    config = GPTConfig(vocab_size=TOKENIZER.vocab_size, num_layers=2, model_dim=32, num_heads=4, num_kv_heads=2)
    model = random_gpt(config=config)
    for weight in model.parameters():
        if std:
            torch.nn.init.normal_(weight, std=std)
    return model


def rows_of(rows: list[str], *texts: str, model: GPT | None = None, context: int = 32) -> list[Row]:
    tokens = np.concatenate([[TOKENIZER.bos_id, *TOKENIZER.encode(text)] for text in texts]).astype(np.uint16)
    text = Text(tokens, TOKENIZER.byte_table(TOKENIZER.vocab_size), TOKENIZER.bos_id)
    return list(measure(model or small_gpt(), text, rows, context=context))


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_rows_of_every_question_are_modes_with_settings(question: str) -> None:
    parsed = [parse_row(row) for row in QUESTIONS[question][2]]
    assert len({repr(row) for row in parsed}) == len(parsed)


def test_every_mode_scores_the_same_targets_as_the_plain_loop() -> None:
    rows = rows_of(
        ["plain stride=8", "windows stride=8", "windows stride=8 dtype=bfloat16", "streaming chunk=16"],
        *(TEXT * 3,),
        model=small_gpt(0.2),
    )
    assert len({row["tokens"] for row in rows}) == 1
    assert (rows[0]["saved"], rows[0]["nats off"], rows[0]["cost"]) == (0, 0, 1)
    assert rows[1]["nats off"] < 1e-4 < rows[2]["nats off"]
    for row in rows:
        assert row["bpb"] + row["saved"] == pytest.approx(rows[0]["bpb"])


def test_what_learns_saves_bits() -> None:
    sgd = "ttt-sgd lr=0.05 epochs=1 chunk_tokens=64 batch_seqs=1"
    plain, hinted, trained = rows_of(["windows", "windows ngram.enabled=true ngram.beta=2", sgd], TEXT * 12)
    assert min(hinted["saved"], trained["saved"]) > 0.1
    assert trained["cost"] > plain["cost"] == 1
    lora = "ttt-lora rank=4 chunk=16 batch_docs=2"
    _, learned, constant = rows_of(
        ["windows documents=true stride=16", f"{lora} lr=0.01", f"{lora} lr=0"], *[TEXT] * 5, TEXT * 5
    )
    assert learned["saved"] > 0.01
    assert constant["saved"] == pytest.approx(0, abs=1e-5)
