"""All modes score the same targets, each once."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from birdie.model.gpt import GPT, GPTConfig
from birdie.score.evaluator import prepare
from birdie.score.mode import Scoring
from birdie.score.modes import LoRAMode, MultiPhaseMode, StreamingMode
from birdie.score.request import EvaluationRequest
from birdie.score.settings import EvaluationSettings
from birdie.score.streaming import segments_of
from birdie.score.ttt.lora import document_queue
from birdie.score.windows import windows_of
from tests.device import DEVICE

BOS, LENGTH = 1, 32
MODEL = GPT(GPTConfig(vocab_size=4, num_layers=1, model_dim=4, num_heads=1, num_kv_heads=1))
SETTINGS: dict[str, dict[str, Any]] = {
    "windows": {},
    "shorter windows": {"seq_len": 12},
    "sliding": {"stride": 5},
    "shorter, sliding": {"seq_len": 12, "stride": 5},
    "documents": {"documents": True},
    "stream": {"mode": "streaming", "streaming": {"chunk": 8}},
    "stream in documents": {"mode": "streaming", "streaming": {"chunk": 8}, "documents": True},
    "exact stream": {"mode": "streaming", "streaming": {"exact": True}},
    "exact, shorter": {"mode": "streaming", "streaming": {"exact": True}, "seq_len": 12},
    "segments": {"mode": "streaming", "streaming": {"segments": 3}},
    "SGD": {"mode": "ttt-sgd"},
    "LoRA": {"mode": "ttt-lora", "ttt_lora": {"chunk": 8}},
    "phases": {"mode": "ttt-multi-phase", "ttt_lora": {"chunk": 8}},
}


def prepared(tokens: np.ndarray, changes: dict[str, Any]) -> tuple[Scoring, Any]:
    settings, mode = EvaluationRequest(settings=changes).resolve(EvaluationSettings())
    return (
        prepare(
            MODEL,
            tokens,
            np.ones(len(tokens), np.uint16),
            settings,
            mode,
            train_seq_len=LENGTH,
            bos_id=BOS,
            device=DEVICE,
            batch_tokens=64,
        ),
        mode,
    )


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
@given(tokens=st.integers(LENGTH + 1, 300), bos=st.lists(st.integers(0, 299), max_size=4))
def test_all_modes_score_the_same_targets(tokens: int, bos: list[int], changes: dict[str, Any]) -> None:
    text = np.zeros(300, np.uint16)
    text[bos] = BOS
    scoring, mode = prepared(text[:tokens], changes)
    targets = len(scoring.tokens) - 1
    assert targets == (tokens - 1) // LENGTH * LENGTH
    if isinstance(mode, LoRAMode | MultiPhaseMode):
        queue = document_queue(scoring.tokens, BOS, 2)
        ranges = zip(queue.begins, queue.stops, strict=True)
    else:
        windows = segments_of(scoring, mode) if isinstance(mode, StreamingMode) else windows_of(scoring)
        ranges = zip(windows.firsts, windows.stops, strict=True)
    times = np.zeros(targets, int)
    for first, stop in ranges:
        times[first:stop] += 1
    assert (times == 1).all()
