"""Scoring an artifact from Python: what is given goes before the recipe, all ways score the same text, and what would
be in vain, or lose a file, is refused before the work."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birdie.artifact.save import save
from birdie.data.corpus import file_corpus
from birdie.data.prepare import prepare
from birdie.errors import BirdieError, ConfigError, DataError, OutputError
from birdie.golf.audit import rules
from birdie.golf.audit.scoring import batched_losses, check_adaptation, scorer_of
from birdie.model.gpt import GPT, GPTConfig
from birdie.model.rotary import Rotary
from birdie.run.evaluation import changed, evaluate
from birdie.run.recipe import DataSettings, Recipe, TrainSettings, ValidationSettings
from birdie.score import stream
from birdie.score.chunks import Keeping
from birdie.score.plan import plan
from birdie.score.scorer import referee
from birdie.score.settings import EvaluationSettings

BOS = 1
LENGTH = 32


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    list(prepare(file_corpus([Path(__file__)]), tokenizer="bytes", root=root))
    return next((root / "datasets").iterdir())


def recipe_of(data: Path, **model: Any) -> Recipe:
    tiny = {"vocab_size": 260, "num_layers": 2, "model_dim": 32, "num_heads": 2, "num_kv_heads": 1, "bos_id": BOS}
    return Recipe(
        data=DataSettings(path=str(data), tokenizer="bytes"),
        model=GPTConfig(**(tiny | model)),
        train=TrainSettings(train_batch_tokens=256, train_seq_len=LENGTH, accumulation=1, compute_dtype="float32"),
        validation=ValidationSettings(max_tokens=400),
    )


def model_of(recipe: Recipe) -> GPT:
    torch.manual_seed(0)
    model = GPT(recipe.model).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


@pytest.fixture(scope="module")
def file(data: Path) -> Path:
    """A tiny GPT over bytes."""
    recipe = recipe_of(data)
    about = {"model": "gpt", "recipe": recipe.to_dict(), "tokenizer": None}
    save(model_of(recipe), data.parent / "model.birdie", lossless=True, coder="fast", metadata=about)
    return data.parent / "model.birdie"


WAYS: dict[str, dict[str, Any]] = {
    "end to end": {},
    "shorter": {"seq_len": 12},
    "sliding": {"stride": 5},
    "shorter, sliding": {"seq_len": 12, "stride": 5},
    "documents": {"documents": True},
    "stream": {"stream": True, "chunk": 8},
    "stream of documents": {"stream": True, "chunk": 8, "documents": True},
    "exact": {"stream": True, "exact": True},
    "exact, shorter": {"stream": True, "exact": True, "seq_len": 12},
    "segments": {"stream": True, "segments": 3},
    "adapters": {"adapt": "lora"},
    "SGD": {"adapt": "sgd"},
}


@given(tokens=st.integers(LENGTH + 1, 300), bos=st.lists(st.integers(0, 299), max_size=4), way=st.sampled_from([*WAYS]))
def test_all_ways_score_the_same_targets(tokens: int, bos: list[int], way: str) -> None:
    text = np.zeros(300, np.uint16)
    text[bos] = BOS
    made = plan(EvaluationSettings(**WAYS[way]), text[:tokens], LENGTH, BOS, isolated=False)
    assert len(made.tokens) - 1 == (tokens - 1) // LENGTH * LENGTH
    scored = np.zeros(len(made.tokens) - 1, int)
    for first, stop in zip(made.windows.firsts, made.windows.stops, strict=True):
        scored[first:stop] += 1
    assert (scored == 1).all()


@pytest.mark.parametrize("way", ["sliding", "documents", "stream", "stream of documents", "exact", "segments"])
@pytest.mark.parametrize("tokens", [2, 3, LENGTH])
def test_a_text_too_short_for_a_window_is_scored_whole(file: Path, way: str, tokens: int) -> None:
    sinks = {"sinks": 4} if way == "stream" else {}
    found = evaluate(file, device="cpu", max_tokens=tokens - 1, settings=WAYS[way] | sinks)
    assert found.score.tokens == tokens - 1


@pytest.mark.parametrize("way", ["sliding", "stream", "stream of documents"])
def test_the_audit_looks_at_what_is_scored(data: Path, way: str) -> None:
    """The scorer that is probed says what the batches say; keys and values in few bits are in few bits in both."""
    text = np.random.default_rng(0).integers(2, 250, 97).astype(np.uint16)
    text[[0, 20]] = BOS
    recipe = dataclasses.replace(recipe_of(data), evaluation=EvaluationSettings(**WAYS[way]))
    model = model_of(recipe)
    found = batched_losses(model, recipe, text)[1].nats
    assert found is not None
    np.testing.assert_allclose(found, referee(scorer_of(model, recipe)(), text), atol=3e-5)
    if "stream" in way:
        few = dataclasses.replace(recipe, evaluation=dataclasses.replace(recipe.evaluation, kv_bits=2, seq_len=96))
        all_ = dataclasses.replace(recipe, evaluation=dataclasses.replace(recipe.evaluation, seq_len=96))
        coarse, fine = (batched_losses(model, each, text)[1].nats for each in (few, all_))
        assert coarse is not None
        assert fine is not None
        assert np.abs(coarse - fine)[88:].max() > 1e-3


def test_the_audit_sees_a_base_that_tells_where_a_document_ends(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(data, rope_dims=8, rope_train_seq_len=4)
    recipe = dataclasses.replace(recipe, evaluation=EvaluationSettings(adapt="sgd", documents=True))
    text = np.random.default_rng(0).integers(2, 250, 97).astype(np.uint16)

    def verdicts() -> set[str]:
        found = check_adaptation(model_of(recipe), recipe, text, "a model")
        return {each.result for each in found if each.rule == rules.CAUSAL}

    assert verdicts() == {"pass"}
    monkeypatch.setattr(Rotary, "base_for_length", lambda *_: nullcontext())
    assert verdicts() == {"fail"}


def test_parts_of_a_stream_that_pass_together_are_limited_by_memory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    cache = stream.Cache

    def counted(model: GPT, count: int, *more: Any, **named: Any) -> Any:
        rows.append(count)
        return cache(model, count, *more, **named)

    monkeypatch.setattr(stream, "Cache", counted)
    settings = {"stream": True, "chunk": 8, "segments": 9}
    free = evaluate(file, device="cpu", settings=settings).score.bpb
    assert max(rows) > 4
    rows.clear()
    asked = evaluate(file, device="cpu", settings=settings | {"batch_seqs": 4}).score.bpb
    assert max(rows) == 4
    rows.clear()
    monkeypatch.setitem(stream._ROOM, "cpu", 1)
    alone = evaluate(file, device="cpu", settings=settings).score.bpb
    assert max(rows) == 1
    assert asked == pytest.approx(free, abs=1e-6)
    assert alone == pytest.approx(free, abs=1e-6)


@pytest.mark.parametrize("wrong", ["artifact", "state", "folder", "nowhere"])
@pytest.mark.parametrize("adapt", ["sgd", "lora"])
def test_a_state_replaces_no_file_and_is_tried_before_the_work(
    file: Path, tmp_path: Path, adapt: str, wrong: str
) -> None:
    target = {
        "artifact": file,
        "state": tmp_path / "hours of work",
        "folder": tmp_path,
        "nowhere": tmp_path / "hours of work" / "state",
    }[wrong]
    (tmp_path / "hours of work").write_bytes(b"a state")
    before = file.read_bytes()
    done: list[float] = []
    with pytest.raises(OutputError if wrong in ("folder", "nowhere") else ConfigError, match=r"is there|cannot write"):
        evaluate(
            file,
            device="cpu",
            settings={"adapt": adapt},
            keeping=Keeping(target),
            progress=lambda now, _: done.append(now),
        )
    assert not done
    assert file.read_bytes() == before
    assert (tmp_path / "hours of work").read_bytes() == b"a state"


def test_a_seed_is_a_part_of_what_a_state_is_of(file: Path, tmp_path: Path) -> None:
    """However many digits it has."""
    state, ways = tmp_path / "state", {"device": "cpu", "settings": {"adapt": "lora"}}
    lora = "rank=2,chunk=8,batch_docs=1,seed="
    evaluate(file, lora=f"{lora}20260101", keeping=Keeping(state, every=1), **ways)  # type: ignore[arg-type]
    if not state.exists():
        pytest.skip("the text is one document")
    with pytest.raises(BirdieError, match="seed 20260101 and not 20260102"):
        evaluate(file, lora=f"{lora}20260102", keeping=Keeping(state, resume=True), **ways)  # type: ignore[arg-type]


def test_any_number_of_tokens_is_a_chunk(file: Path) -> None:
    whole = evaluate(file, device="cpu", settings={"adapt": "sgd"}, sgd=f"chunk_tokens={10**20}")
    assert whole.score.bpb == pytest.approx(evaluate(file, device="cpu").score.bpb, abs=1e-6)
    assert "adapt sgd learned nothing" in whole.warnings[-1]


def test_text_the_model_cannot_know_is_refused(data: Path, tmp_path: Path) -> None:
    recipe = recipe_of(data, vocab_size=100)
    about = {"model": "gpt", "recipe": recipe.to_dict(), "tokenizer": None}
    save(model_of(recipe), tmp_path / "model.birdie", lossless=True, coder="fast", metadata=about)
    with pytest.raises(DataError, match="but the model knows only 0 to 99"):
        evaluate(tmp_path / "model.birdie", device="cpu")


@pytest.mark.parametrize(
    ("held", "changes", "why"),
    [
        ({}, {"chunk": 16}, "chunk is of streams"),
        ({}, {"adapt": "lora", "stride": 8}, "leave stride out"),
        ({}, {"adapt": "phased", "documents": True, "batch_seqs": 2}, "leave documents and batch_seqs out"),
        ({"stream": True}, {"segments": 2, "documents": True}, "leave one of the two out"),
    ],
)
def test_what_would_be_in_vain_is_refused(held: dict[str, Any], changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        changed(EvaluationSettings(**held), changes)


def test_what_is_given_drops_the_other_way_and_no_more() -> None:
    streaming = EvaluationSettings(stream=True, chunk=16, sinks=4)
    assert changed(streaming, {"adapt": "none"}) == streaming
    assert changed(streaming, {"kv_bits": 3}) == dataclasses.replace(streaming, kv_bits=3)
    assert changed(streaming, {"stride": 64}) == EvaluationSettings(stride=64)
    assert changed(streaming, {"adapt": "sgd"}) == EvaluationSettings(adapt="sgd")
    assert changed(EvaluationSettings(adapt="sgd", stride=64), {"stream": True}) == EvaluationSettings(stream=True)
    assert changed(EvaluationSettings(stride=64), {"adapt": "lora"}).adapt == "lora"  # a recipe may have both


def test_the_answer_says_how(file: Path) -> None:
    found = evaluate(
        file, device="cpu", settings={"adapt": "phased", "temperature": 1.0}, lora="rank=2,chunk=8", phased="phases=2"
    )
    assert (found.dtype, found.device) == ("float32", "cpu")
    assert found.settings.adapt == "phased"
    assert found.learned_by["lora"].rank == 2
    assert found.learned_by["phased"].phases == 2
    assert "in up to 2 phases" in found.way
    assert "no phase" in found.evidence  # all documents are in one batch
    assert sum(found.seconds.values()) > 0
    warm = evaluate(file, device="cpu", settings={"temperature": 0.9})
    assert warm.way.endswith("at temperature 0.9")
    assert warm.learned_by == {}
