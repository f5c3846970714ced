"""Every way of scoring says what its scorer under the contract says, and streams equal windows where they should."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.errors import ConfigError, RuleError
from birdie.model.gpt import GPT, GPTConfig
from birdie.runtime.distributed import World
from birdie.score.forward import score_windows
from birdie.score.lean import Lean
from birdie.score.ngram import TiltSettings
from birdie.score.plan import plan
from birdie.score.scorer import referee
from birdie.score.scorers import StreamScorer, WindowScorer
from birdie.score.settings import EvaluationSettings
from birdie.score.stream import restarts, score_stream, segments
from birdie.score.tally import Tally
from birdie.score.tilt import Tilted
from birdie.score.windows import Windows, blocks, documents, sliding

BOS, CPU = 1, torch.device("cpu")
TINY = {"vocab_size": 30, "num_layers": 3, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2, "bos_id": BOS}


def model(**changes: Any) -> GPT:
    torch.manual_seed(0)
    made = GPT(GPTConfig(**(TINY | changes))).eval()
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return made


def text(length: int, begins: tuple[int, ...] = (), seed: int = 0) -> np.ndarray:
    tokens = np.random.default_rng(seed).integers(2, 30, length).astype(np.uint16)
    tokens[list(begins)] = BOS
    return tokens


def tally(tokens: np.ndarray) -> Tally:
    return Tally(tokens, np.ones(len(tokens), dtype=np.uint16), BOS, keep=True)


def by_windows(made: GPT, tokens: np.ndarray, windows: Windows, **more: Any) -> np.ndarray:
    found = tally(tokens)
    score_windows(made, tokens, windows, found, **({"batch_tokens": 64, "device": CPU} | more))
    assert found.nats is not None
    return found.nats


def by_stream(made: GPT, tokens: np.ndarray, parts: Windows, **more: Any) -> np.ndarray:
    found = tally(tokens)
    score_stream(made, tokens, parts, found, **({"device": CPU, "context": 12, "chunk": 5} | more))
    assert found.nats is not None
    return found.nats


def close(one: np.ndarray, two: np.ndarray) -> None:
    np.testing.assert_allclose(one, two, rtol=0, atol=2e-5)


KINDS: dict[str, dict[str, Any]] = {
    "smeared": {"smear": "gated", "bigram_vocab_size": 17},
    "longer than trained": {"rope_dims": 4, "rope_train_seq_len": 5},
}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("length", "stride"), [(12, 12), (12, 5), (12, 1), (80, 3)])
def test_windows_equal_the_contract(length: int, stride: int, temperature: float, kind: str) -> None:
    made, tokens = model(**KINDS[kind]), text(60)
    scorer = WindowScorer(made, length, stride, temperature=temperature)
    close(
        by_windows(made, tokens, sliding(59, length, stride), temperature=temperature),
        referee(scorer, tokens),
    )


@kinds
def test_windows_in_documents_equal_the_contract(kind: str) -> None:
    made, tokens = model(**KINDS[kind]), text(60, (0, 9, 10, 31))
    windows = documents(np.flatnonzero(tokens == BOS), 59, 12, 4)
    close(by_windows(made, tokens, windows), referee(WindowScorer(made, 12, 4, bos_id=BOS), tokens))


@kinds
def test_a_stream_in_documents_equals_the_contract(kind: str) -> None:
    made, tokens = model(**KINDS[kind]), text(60, (0, 9, 10, 31))
    made_plan = plan(EvaluationSettings(stream=True, chunk=5, documents=True), tokens, 12, BOS, isolated=False)
    scorer = StreamScorer(made, 12, 5, bos_id=BOS)
    close(by_stream(made, made_plan.tokens, made_plan.windows)[:48], referee(scorer, tokens)[:48])


@kinds
@pytest.mark.parametrize("exact", [False, True])
def test_where_a_document_ends_is_not_known_before(kind: str, exact: bool) -> None:
    """Not even by how the rotary base grows with a window that is short because its document is."""
    made, tokens = model(**KINDS[kind]), text(40, (0,))
    ended = tokens.copy()
    ended[20] = BOS

    def losses(text: np.ndarray) -> np.ndarray:
        begins = np.flatnonzero(text == BOS)
        if exact:
            return by_stream(made, text, restarts(text, BOS, 32), context=32)
        return by_windows(made, text, documents(begins, 39, 32, 32))

    close(losses(tokens)[:19], losses(ended)[:19])
    assert abs(losses(tokens)[25] - losses(ended)[25]) > 1e-3


@kinds
@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("chunk", [1, 5, 12])
def test_a_stream_equals_the_contract(chunk: int, sinks: int, kind: str) -> None:
    made, tokens = model(**KINDS[kind]), text(60)
    sinks = min(sinks, 12 - chunk)
    scorer = StreamScorer(made, 12, chunk, sinks=sinks, temperature=0.8)
    found = by_stream(made, tokens, segments(59, 1, 12), chunk=chunk, sinks=sinks, temperature=0.8)
    close(found, referee(scorer, tokens))


def test_a_stream_in_few_bits_equals_the_contract() -> None:
    made, tokens = model(), text(120)
    found = by_stream(made, tokens, segments(119, 1, 40), context=40, chunk=16, kv_bits=3)
    expected = referee(StreamScorer(made, 40, 16, kv_bits=3), tokens)
    assert float(np.median(np.abs(found - expected))) < 1e-4  # a rounding may now and then choose another level
    assert float(np.abs(found - expected).mean()) < 1e-3
    plain = by_stream(made, tokens, segments(119, 1, 40), context=40, chunk=16)
    assert float(np.abs(found - plain)[64:].mean()) > 0.01


@settings(max_examples=10, deadline=None)
@given(st.integers(2, 50), st.integers(1, 12), st.integers(1, 6))
def test_an_exact_stream_equals_windows_end_to_end(length: int, chunk: int, seed: int) -> None:
    tokens = text(length, seed=seed)
    close(
        by_stream(model(), tokens, restarts(tokens, None, 12), chunk=chunk),
        by_windows(model(), tokens, sliding(length - 1, 12, 12)),
    )
    tokens[:: seed + 2] = BOS
    close(
        by_stream(model(), tokens, restarts(tokens, BOS, 12), chunk=chunk),
        by_windows(model(), tokens, documents(np.flatnonzero(tokens == BOS), length - 1, 12, 12)),
    )


def test_documents_that_fit_the_context_equal_windows_in_documents() -> None:
    made, tokens = model(isolate_documents=True), text(90, (0, 7, 14, 20, 27, 33, 40, 46, 52, 59, 66, 73, 80, 86))
    windows = documents(np.flatnonzero(tokens == BOS), 89, 12, 4)
    close(by_stream(made, tokens, segments(89, 1, 12), chunk=4), by_windows(made, tokens, windows))


@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_layers_with_short_windows_equal_sliding_windows(chunk: int) -> None:
    made, tokens = model(attn_window=3, num_layers=4), text(90)
    close(by_stream(made, tokens, segments(89, 1, 12), chunk=chunk), by_windows(made, tokens, sliding(89, 12, chunk)))


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 40))
def test_segments_score_each_target_once_after_a_context(targets: int, count: int, context: int) -> None:
    parts = segments(targets, count, context)
    times = np.zeros(targets, dtype=int)
    for first, stop in zip(parts.firsts, parts.stops, strict=True):
        times[first:stop] += 1
    assert (times == 1).all()
    assert len(parts) <= count
    assert (parts.firsts[1:] - parts.begins[1:] == min(context, targets - 1)).all()


def test_segments_pass_side_by_side_and_ranks_do_not_matter() -> None:
    made, tokens = model(num_layers=1), text(90)
    one = by_stream(made, tokens, segments(89, 1, 12))
    assert not np.isnan(one).any()
    found = tally(tokens)
    parts = segments(89, 6, 17)
    for rank in range(3):
        share = parts.share(rank, 3)
        score_stream(made, tokens, share, found, context=12, chunk=5, device=CPU)
    assert found.nats is not None
    # a part begins elsewhere, so its chunks do: with one layer and chunks of one place nothing else differs
    whole = by_stream(made, tokens, parts, chunk=5)
    close(found.nats, whole)
    close(by_stream(made, tokens, parts, chunk=1), by_stream(made, tokens, segments(89, 1, 12), chunk=1))


TILT = TiltSettings(enabled=True, table_bits=8, orders=(3, 2, 1))


@pytest.mark.parametrize("beta", [None, 2.0])
def test_leaning_equals_the_contract_whatever_the_way(beta: float | None) -> None:
    made, tokens = model(), np.tile(text(17), 3)
    tilt = dataclasses.replace(TILT, beta=beta)
    windows, parts = Lean(tokens, tilt), Lean(tokens, tilt)
    score_windows(made, tokens, sliding(50, 12, 5), windows, batch_tokens=64, device=CPU)
    score_stream(made, tokens, segments(50, 1, 12), parts, context=12, chunk=5, device=CPU)
    scorers = WindowScorer(made, 12, 5), StreamScorer(made, 12, 5)
    for kept, scorer in zip((windows, parts), scorers, strict=True):
        found = tally(tokens)
        kept.close(found, World(), CPU)
        expected = referee(Tilted(scorer, tilt), tokens)
        assert found.nats is not None
        close(found.nats, expected)
        assert np.abs(expected - referee(WindowScorer(made, 12, 5), tokens)).max() > 0.1
    with pytest.raises(RuleError, match="target 0 was scored 0 times"):
        Lean(tokens, tilt).close(tally(tokens), World(), CPU)


def test_no_way_of_scoring_scores_twice() -> None:
    made, tokens = model(), text(40)
    twice = tally(tokens)
    score_windows(made, tokens, blocks(39, 12), twice, batch_tokens=64, device=CPU)
    with pytest.raises(RuleError, match="scored a second time"):
        score_stream(made, tokens, segments(39, 1, 12), twice, context=12, chunk=4, device=CPU)
    with pytest.raises(RuleError, match="36 targets were scored of 39"):
        twice.score(39, 0.0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stride": -1}, "stride is -1"),
        ({"stride": 65, "seq_len": 64}, "longer than windows of 64"),
        ({"temperature": 0.0}, "above 0"),
        ({"temperature": float("nan")}, "above 0"),
        ({"stream": True, "stride": 64}, "stride or stream"),
        ({"sinks": 4}, "set stream"),
        ({"exact": True}, "set stream"),
        ({"segments": 2}, "set stream"),
        ({"stream": True, "exact": True, "sinks": 4}, "leave these out"),
        ({"stream": True, "chunk": 0}, "at least 1"),
        ({"budget_seconds": float("inf")}, "budget_seconds"),
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EvaluationSettings(**change)
