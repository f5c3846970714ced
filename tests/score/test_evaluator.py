"""All modes score the same targets, each once."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birdie.errors import DataError
from birdie.model.gpt import GPT, GPTConfig
from birdie.score.evaluator import prepare, score
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


@pytest.mark.parametrize("count", [2, 3, LENGTH - 1, LENGTH, LENGTH + 1])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_mode_scores_a_text_that_is_shorter_than_a_window(name: str, count: int) -> None:
    """Up to one window, modes predict from the same context, unless windows are shorter or adapters were trained."""
    torch.manual_seed(0)
    text = np.random.default_rng(count).integers(0, 4, count, dtype=np.uint16)
    text[0] = BOS
    text[1:][text[1:] == BOS] = 2  # one document
    scoring, mode = prepared(text, SETTINGS[name])
    result, _ = score(mode, scoring)
    ids = torch.from_numpy(text.astype(np.int64))[None]
    with torch.inference_mode():
        expected = float(MODEL.eval().loss(ids[:, :-1], ids[:, 1:], reduction="mean"))
    assert result.tokens == count - 1
    trains = isinstance(mode, LoRAMode | MultiPhaseMode) and count > 8
    if trains or "shorter" in name or "sliding" in name:
        assert np.isfinite(result.val_loss)
    else:
        assert result.val_loss == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("count", [0, 1])
def test_every_mode_refuses_a_text_without_a_target_by_the_same_sentence(name: str, count: int) -> None:
    with pytest.raises(DataError, match=rf"the text has {count} tokens?, and the first is not scored"):
        prepared(np.ones(count, np.uint16), SETTINGS[name])
