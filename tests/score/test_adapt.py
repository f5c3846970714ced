"""Score first, then learn: equal to a scorer that adapts token by token, refused where it learns first."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from birdie.errors import ConfigError, RuleError, WeightsError
from birdie.golf.audit import probes
from birdie.golf.audit.rules import CAUSAL
from birdie.model.gpt import GPT, GPTConfig
from birdie.runtime.distributed import World
from birdie.score import adapt
from birdie.score.adapt import Learner, SGDSettings, cosine, cut, learn, runs
from birdie.score.chunks import Adapted, Keeping, chunked, score_adapting
from birdie.score.lean import Lean
from birdie.score.ledger import Ledger
from birdie.score.ngram import TiltSettings
from birdie.score.scorer import Scorer, referee
from birdie.score.settings import parse_changes
from birdie.score.tally import Tally
from birdie.score.tilt import Tilted
from birdie.score.windows import Windows, blocks, documents, sliding
from birdie.train.banks import make_banks
from tests.ranks import run_in_process_group
from tests.tiny_run import EVERYTHING

BOS, VOCABULARY, LENGTH = 1, 24, 8
CPU = torch.device("cpu")
TINY: dict[str, Any] = {"vocab_size": VOCABULARY, "num_layers": 2, "model_dim": 16, "num_heads": 2, "num_kv_heads": 1}
SETTINGS = SGDSettings(lr=0.3, epochs=2, chunk_tokens=20, batch_seqs=2, grad_clip=0.5)


class Bytes:
    """Every token but BOS stands for a byte."""

    def count(self, previous: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return (targets != BOS).astype(np.int64) + 0 * previous


def model(**changes: Any) -> GPT:
    torch.manual_seed(0)
    made = GPT(GPTConfig(**(TINY | changes))).eval()
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return made


def text(length: int = 73, seed: int = 0) -> np.ndarray:
    """Documents that count up in steps of their own, so that there is something to learn from those before."""
    draw = np.random.default_rng(seed)
    tokens = (np.arange(length) * 3 + draw.integers(0, 2, length)) % (VOCABULARY - 2) + 2
    tokens[::29] = BOS
    return tokens.astype(np.uint16)


COVERS: dict[str, Callable[[np.ndarray], Windows]] = {
    "blocks": lambda tokens: blocks(len(tokens) - 1, LENGTH),
    "sliding": lambda tokens: sliding(len(tokens) - 1, LENGTH, 3),
    "documents": lambda tokens: documents(np.flatnonzero(tokens == BOS), len(tokens) - 1, LENGTH, 3),
}


def adapted(
    made: GPT, tokens: np.ndarray, windows: Windows, settings: SGDSettings = SETTINGS, **more: Any
) -> tuple[np.ndarray, Adapted, Tally]:
    tally = Tally(tokens, Bytes(), BOS, keep=True)
    told = score_adapting(
        made, tokens, windows, tally, settings, length=LENGTH, batch_tokens=64, device=CPU, **more
    )  # fmt: skip
    assert tally.nats is not None
    return tally.nats, told, tally


def weights(made: GPT) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in made.named_parameters()}


class Adapting:
    """The same under the contract: a token at a time, and chunks learned from in plain PyTorch.

    Args:
        windows: of the stream; where they lie does not depend on its tokens.
        early: learns from a chunk before it is scored, from the tokens it was given: cheating.
        told: whether the ledger hears of steps.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        windows: Windows,
        settings: SGDSettings,
        ledger: Ledger,
        *,
        early: bool = False,
        told: bool = True,
    ) -> None:
        self.model, self.windows, self.settings, self.ledger = model(), windows, settings, ledger
        self.early, self.told = early, told
        self.seen: list[int] = list(tokens) if early else []
        self.place = -1
        self.learned = 0
        self.chunks = -(-int(windows.stops.max()) // settings.chunk_tokens)
        self.velocities = [torch.zeros_like(p) for p in self.model.parameters()]

    def reveal(self, token: int) -> None:
        self.place += 1
        if not self.early:
            self.seen.append(token)

    def predict(self) -> Tensor:
        row = min(int(np.searchsorted(self.windows.stops, self.place, side="right")), len(self.windows) - 1)
        chunk = int(self.windows.firsts[row]) // self.settings.chunk_tokens
        while self.learned < min(chunk + self.early, self.chunks - 1):
            self.learn(self.learned)
            self.learned += 1
        with torch.no_grad():
            window = self.seen[int(self.windows.begins[row]) : self.place + 1]
            return self.model(torch.tensor([window]).long())[0, -1].log_softmax(0)

    def learn(self, chunk: int) -> None:
        size = self.settings.chunk_tokens
        lr = self.settings.lr * 0.5 * (1 + math.cos(math.pi * chunk / (self.chunks - 1)))
        begins = list(range(chunk * size, (chunk + 1) * size, LENGTH))
        for _ in range(self.settings.epochs):
            for i in range(0, len(begins), self.settings.batch_seqs):
                batch = [(b, min(b + LENGTH, (chunk + 1) * size)) for b in begins[i : i + self.settings.batch_seqs]]
                if self.told:
                    self.ledger.learn(*batch)
                self.model.zero_grad()
                total = torch.zeros(())
                for first, stop in batch:
                    ids, targets = (
                        torch.tensor([self.seen[first + a : stop + a]]).long() for a in (0, 1)
                    )  # fmt: skip
                    total = total + self.model.loss(ids, targets, reduction="none").sum()
                (total / sum(stop - first for first, stop in batch)).backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)
                with torch.no_grad():
                    for p, v in zip(self.model.parameters(), self.velocities, strict=True):
                        v.copy_(self.settings.momentum * v + p.grad)
                        p -= lr * v


@pytest.mark.parametrize(
    ("cover", "chunk_tokens"), [("blocks", 20), ("sliding", 5), ("sliding", 24), ("documents", 20)]
)
def test_equals_a_scorer_that_adapts_token_by_token(cover: str, chunk_tokens: int) -> None:
    """Chunks shorter than windows, across windows, and of whole windows."""
    tokens, settings = text(), dataclasses.replace(SETTINGS, chunk_tokens=chunk_tokens)
    windows = COVERS[cover](tokens)
    nats, told, tally = adapted(model(), tokens, windows, settings)
    scored = tokens[: windows.scored + 1]
    ledger = Ledger(len(scored) - 1)
    expected = referee(Adapting(scored, windows, settings, ledger), scored, ledger=ledger)
    np.testing.assert_allclose(nats[: windows.scored], expected, rtol=0, atol=2e-4)
    assert np.isnan(nats[windows.scored :]).all()
    assert (tally.ledger.learned, tally.ledger.steps) == (ledger.learned, ledger.steps)
    assert (told.tokens, told.steps) == (ledger.learned, ledger.steps)
    plain, nothing, _ = adapted(model(), tokens, windows, dataclasses.replace(SETTINGS, chunk_tokens=1000))
    assert nothing.steps == 0
    assert np.nanmax(np.abs(plain - nats)) > 0.1, "the test must be able to tell adaptation from none"


def test_tilts_what_it_adapts() -> None:
    tokens, windows = text(), sliding(72, LENGTH, 3)
    tilt = TiltSettings(enabled=True, table_bits=8, orders=(3, 2, 1))
    lean, tally, ledger = Lean(tokens, tilt), Tally(tokens, Bytes(), BOS, keep=True), Ledger(72)
    score_adapting(model(), tokens, windows, lean, SETTINGS, length=LENGTH, batch_tokens=64, device=CPU)
    lean.close(tally, World(), CPU)
    expected = referee(Tilted(Adapting(tokens, windows, SETTINGS, ledger), tilt), tokens, ledger=ledger)
    assert tally.nats is not None
    np.testing.assert_allclose(tally.nats, expected, rtol=0, atol=1e-3)
    assert np.abs(expected - adapted(model(), tokens, windows)[0]).max() > 0.1


def test_what_comes_before_helps() -> None:
    tokens = text(401)
    windows = blocks(400, LENGTH)
    settings = dataclasses.replace(SETTINGS, lr=0.1, grad_clip=1.0, chunk_tokens=40)
    without = adapted(model(), tokens, windows, dataclasses.replace(settings, lr=0.0))[0]
    assert adapted(model(), tokens, windows, settings)[0].mean() < 0.8 * without.mean()


def test_learning_first_is_refused() -> None:
    tokens = text()
    windows = blocks(72, LENGTH)
    ledger = Ledger(72)
    cheat = Adapting(tokens, windows, SETTINGS, ledger, early=True)
    with pytest.raises(RuleError, match="learn from target 0 before it is scored"):
        referee(cheat, tokens, ledger=ledger)
    made, before = model(), weights(model())
    half = Ledger(72)
    half.score(0, 20)
    with pytest.raises(RuleError, match="learn from target 20 before it is scored"):
        learn(made, tokens, [(0, 40)], dataclasses.replace(SETTINGS, chunk_tokens=40), half, length=LENGTH)
    learned = Ledger(72)
    learned.score(0, 16)
    with pytest.raises(RuleError, match="learn from target 16"):
        Learner(made, dataclasses.replace(SETTINGS, batch_seqs=100)).learn(
            tokens, [(0, 17)], learned, length=LENGTH
        )  # fmt: skip
    assert learned.steps == 0
    assert made.training is False
    assert any(not torch.equal(p, before[name]) for name, p in made.named_parameters())  # by the first, allowed steps


def reacts_to_the_future(make: Callable[[np.ndarray], Scorer], tokens: np.ndarray, place: int) -> bool:
    """Whether losses up to `place` change with what is revealed after it, or its distribution with its own target."""
    other = tokens.copy()
    other[place + 1 :] = (other[place + 1 :] + 7) % (VOCABULARY - 2) + 2
    one, two = make(tokens), make(other)
    for i in range(place + 1):
        one.reveal(int(tokens[i]))
        two.reveal(int(other[i]))
        if not torch.equal(one.predict(), two.predict()):
            return True
    return False


@pytest.mark.parametrize("place", [10, 45])
def test_who_does_not_tell_the_ledger_is_betrayed_by_the_future(place: int) -> None:
    tokens = text()
    windows = blocks(72, LENGTH)

    def make(early: bool) -> Callable[[np.ndarray], Scorer]:
        return lambda stream: Adapting(stream, windows, SETTINGS, Ledger(72), early=early, told=False)

    assert reacts_to_the_future(make(True), tokens, place)
    assert not reacts_to_the_future(make(False), tokens, place)


QUICK = dataclasses.replace(SETTINGS, epochs=1, chunk_tokens=8)


def learning_first(stream: np.ndarray) -> np.ndarray:
    """A cheat whose ledger hears a lie: the text counts as scored, is learned from, and only then scored."""
    made, tokens = model(), stream.astype(np.uint16)
    lie = Ledger(len(tokens) - 1)
    lie.score(0, len(lie))
    learn(made, tokens, [(0, len(lie))], QUICK, lie, length=LENGTH)
    return adapted(made, tokens, blocks(len(lie), LENGTH), dataclasses.replace(QUICK, chunk_tokens=1000))[0]


def learning_after(stream: np.ndarray) -> np.ndarray:
    return adapted(model(), stream.astype(np.uint16), blocks(len(stream) - 1, LENGTH), QUICK)[0]


@pytest.mark.parametrize(("score", "legal"), [(learning_after, True), (learning_first, False)])
def test_our_own_audit_passes_it_and_catches_who_learns_first(
    score: Callable[[np.ndarray], np.ndarray], legal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "BORDERS", ())
    found = probes.probe_losses(score, VOCABULARY, text(25), positions=2)
    verdicts = {(each.rule, each.result) for each in found}
    assert ({verdict for _, verdict in verdicts} == {"pass"}) == legal, found
    assert ((CAUSAL, "fail") in verdicts) != legal


def test_the_fast_way_does_not_see_the_future() -> None:
    """Chunk by chunk: what comes after a chunk changes nothing in it, to the bit."""
    tokens, windows = text(), sliding(72, LENGTH, 3)
    nats = adapted(model(), tokens, windows)[0]
    for place in (19, 20, 50):
        other = tokens.copy()
        other[place + 1 :] = (other[place + 1 :] + 5) % (VOCABULARY - 2) + 2
        changed = adapted(model(), other, windows)[0]
        assert np.array_equal(changed[:place], nats[:place])
        assert not np.array_equal(changed, nats)


@given(st.integers(1, 300), st.integers(1, 40).flatmap(lambda t: st.tuples(st.just(t), st.integers(1, t))), st.data())
def test_chunks_hold_every_window_once_and_are_scored_when_they_end(
    targets: int, size: tuple[int, int], data: st.DataObject
) -> None:
    begins = np.array(sorted(data.draw(st.sets(st.integers(0, targets)))), dtype=np.int64)
    cover = data.draw(st.sampled_from(["blocks", "sliding", "documents"]))
    windows = {
        "blocks": lambda: blocks(targets, size[0]),
        "sliding": lambda: sliding(targets, *size),
        "documents": lambda: documents(begins, targets, *size),
    }[cover]()
    tokens = data.draw(st.integers(1, 100))
    ledger, end = Ledger(targets), 0
    for (first, stop), part in chunked(windows, tokens):
        assert first == end
        assert stop - first == tokens or stop == windows.stops.max()
        for window in range(len(part)):
            assert first <= part.firsts[window] < stop
            ledger.score(int(part.firsts[window]), int(part.stops[window]))
        ledger.learn((first, stop))
        end = stop
    assert ledger.scored == windows.scored


def test_blocks_that_are_frozen_stay_to_the_bit_in_banks_too() -> None:
    tokens, windows = text(), blocks(72, LENGTH)
    settings = dataclasses.replace(SETTINGS, freeze_blocks=1)
    results = []
    for banking in (False, True):
        made = model()
        before = weights(made)
        banks = []
        if banking:
            matrices = {name: p for name, p in made.named_parameters() if name.startswith("blocks.") and p.ndim == 2}
            banks = make_banks({name: p for name, p in matrices.items() if "resid_mix" not in name})
            assert len(banks) > 2
        nats, told, _ = adapted(made, tokens, windows, settings, restore=False)
        results.append(nats)
        moved = 0
        for name, p in made.named_parameters():
            frozen = name.startswith("blocks.0.")
            assert torch.equal(p, before[name]) == frozen, name
            moved += int((p != before[name]).sum())
        for bank in banks:
            for name, part in bank.split(bank.parameter):
                assert torch.equal(part, dict(made.named_parameters())[name])
        held = sum(p.numel() for name, p in before.items() if name.startswith("blocks.0."))
        stayed = sum(p.numel() for p in before.values()) - moved
        assert f"{moved:,} weights moved, by " in told.evidence
        assert f"and {stayed:,} stayed ({held:,} of them frozen in the first 1 blocks)" in told.evidence
        assert all(p.requires_grad for p in made.parameters())
    np.testing.assert_allclose(*results, rtol=0, atol=1e-4)
    assert not np.array_equal(results[0], adapted(model(), tokens, windows)[0])


def test_there_must_be_as_many_blocks_as_are_frozen() -> None:
    with pytest.raises(ConfigError, match="freeze_blocks is 3, but the model has no parameter of block 2"):
        Learner(model(), dataclasses.replace(SETTINGS, freeze_blocks=3))
    with pytest.raises(ConfigError, match=r"is torch\.bfloat16, in which small steps are lost"):
        Learner(model().to(torch.bfloat16), SETTINGS)


def test_every_technique_adapts_and_gets_its_weights_back() -> None:
    made = model(**EVERYTHING, num_layers=5, model_dim=32, num_heads=4, num_kv_heads=2)
    before, tokens = weights(made), text()
    plain = adapted(made, tokens, blocks(72, LENGTH), dataclasses.replace(SETTINGS, chunk_tokens=1000))[0]
    nats, told, _ = adapted(made, tokens, blocks(72, LENGTH), dataclasses.replace(SETTINGS, lr=0.02))
    assert np.array_equal(nats[:16], plain[:16])
    assert not np.array_equal(nats[24:32], plain[24:32])
    assert "0 weights moved" not in told.evidence
    assert all(torch.equal(p, before[name]) for name, p in made.named_parameters())
    assert not made.training
    assert made.loss_backend == "eager"


def test_two_runs_do_the_same_and_micro_batches_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, windows = text(), sliding(72, LENGTH, 3)
    one, two = (adapted(model(), tokens, windows)[0] for _ in range(2))
    assert one.tobytes() == two.tobytes()
    monkeypatch.setattr(adapt, "_AT_ONCE", {"cpu": LENGTH})
    np.testing.assert_allclose(adapted(model(), tokens, windows)[0], one, rtol=0, atol=1e-4)


class Stopped:
    """Says stop after so many chunks."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self) -> bool:
        self.left -= 1
        return self.left == 0


@pytest.mark.parametrize("after", [1, 3])
def test_what_was_stopped_goes_on_to_the_same_result(after: int, tmp_path: Path) -> None:
    tokens, windows, file = text(), sliding(72, LENGTH, 3), tmp_path / "state"
    whole, told, whole_tally = adapted(model(), tokens, windows)
    made = model()
    with pytest.raises(KeyboardInterrupt):
        adapted(made, tokens, windows, keeping=Keeping(file, every=0), stop=Stopped(after))
    assert all(torch.equal(p, weights(model())[name]) for name, p in made.named_parameters())
    nats, again, tally = adapted(made, tokens, windows, keeping=Keeping(file, every=0, resume=True))
    assert nats.tobytes() == whole.tobytes()
    assert (again.steps, again.tokens, again.evidence) == (told.steps, told.tokens, told.evidence)
    one, two = (each.score(windows.scored, 1.0) for each in (tally, whole_tally))
    assert one == two
    tally.ledger.close()


def test_states_are_kept_now_and_then_and_only_their_own_scoring_goes_on(tmp_path: Path) -> None:
    tokens, windows, file = text(), sliding(72, LENGTH, 3), tmp_path / "state"
    adapted(model(), tokens, windows, keeping=Keeping(file, every=2))
    whole = adapted(model(), tokens, windows)[0]
    resuming = Keeping(file, resume=True)
    assert adapted(model(), tokens, windows, keeping=resuming)[0].tobytes() == whole.tobytes()
    other = tokens.copy()
    other[50] += 1
    changed = model()
    with torch.no_grad():
        changed.skip_weights[0, 0] += 1
    for wrong, words in (
        (lambda: adapted(model(), tokens, windows, dataclasses.replace(SETTINGS, lr=0.2), keeping=resuming), "lr 0.3 "),
        (lambda: adapted(model(), other, windows, keeping=resuming), "text "),
        (lambda: adapted(model(), tokens, sliding(72, LENGTH, 2), keeping=resuming), "windows "),
        (lambda: adapted(changed, tokens, windows, keeping=resuming), "weights "),
        (lambda: adapted(model(), tokens, windows, keeping=Keeping(tmp_path / "no", resume=True)), "there is no "),
    ):
        with pytest.raises(WeightsError, match=words):
            wrong()
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="cannot be read"):
        adapted(model(), tokens, windows, keeping=resuming)


def test_a_round_over_documents_learns_what_it_says() -> None:
    """The pass between two phases: documents in any order, as one text, each target with the input before it."""
    tokens, ledger, made = text(), Ledger(72), model()
    ledger.score(0, 72)
    ranges = [(43, 72), (0, 29)]
    before = weights(made)
    learner = learn(made, tokens, ranges, SETTINGS, ledger, length=LENGTH)
    assert (learner.tokens, ledger.learned) == (2 * 40, 2 * 40)  # two of three chunks, twice
    assert any(not torch.equal(p, before[name]) for name, p in made.named_parameters())
    learner.restore()
    assert all(torch.equal(p, before[name]) for name, p in made.named_parameters())


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=6), st.integers(1, 30))
def test_cut_and_runs_keep_places_and_order(pairs: list[tuple[int, int]], tokens: int) -> None:
    ranges = [(first, first + count) for first, count in pairs]
    places = [i for each in ranges for i in range(*each)]
    chunks = list(cut(ranges, tokens))
    assert [i for chunk in chunks for each in chunk for i in range(*each)] == places
    sizes = [sum(stop - first for first, stop in chunk) for chunk in chunks]
    assert all(size == tokens for size in sizes[:-1])
    assert [i for each in runs(np.array(places, dtype=np.int64)) for i in range(*each)] == places


def test_the_rate_falls_from_one_to_nothing() -> None:
    assert [cosine(i, 5) for i in range(5)] == pytest.approx([1, 0.8535534, 0.5, 0.1464466, 0])
    assert cosine(0, 1) == 1


@pytest.mark.parametrize(
    "wrong",
    [{"lr": -1.0}, {"lr": math.nan}, {"epochs": 0}, {"chunk_tokens": 0}, {"momentum": 1.0}, {"freeze_blocks": -1}],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"adaptation {next(iter(wrong))} is "):
        SGDSettings(**wrong)


def test_settings_are_read_from_words() -> None:
    assert parse_changes("lr=0.5,chunk-tokens=64", SETTINGS, "sgd") == dataclasses.replace(
        SETTINGS, lr=0.5, chunk_tokens=64
    )
    for words, why in (("lr", "lr is ''"), ("epochs=1.5", "epochs is '1.5'"), ("steps=1", "choose from lr, epochs")):
        with pytest.raises(ConfigError, match=why):
            parse_changes(words, SETTINGS, "sgd")


def test_a_gradient_that_is_not_finite_stops_it() -> None:
    made = model()
    with torch.no_grad():
        made.tok_emb.weight[5, 0] = math.inf
    with pytest.raises(ConfigError, match="adaptation step 1 has norm nan; lower its learning rate"):
        adapted(made, text(), blocks(72, LENGTH))


def score_as_rank(world: World, folder: Path) -> None:
    """Two ranks score and learn; then they stop, and go on."""
    tokens, windows = text(), sliding(72, LENGTH, 3)
    made = model()
    _, told, tally = adapted(made, tokens, windows, world=world, restore=False)
    score = tally.score(windows.scored, 1.0, world)
    tally.ledger.close()
    keeping = Keeping(folder / "state", every=0)
    with pytest.raises(KeyboardInterrupt):
        adapted(model(), tokens, windows, world=world, keeping=keeping, stop=Stopped(2))
    resuming = dataclasses.replace(keeping, resume=True)
    _, _, later = adapted(model(), tokens, windows, world=world, keeping=resuming)
    again = later.score(windows.scored, 1.0, world)
    torch.save({"weights": weights(made), "bpb": [score.bpb, again.bpb]}, folder / f"{world.rank}.pt")
    assert told.steps == tally.ledger.steps == later.ledger.steps
    try:
        tally.ledger.agree(0, 72, world, CPU)
        if world.is_main:
            tally.ledger.score(72, 72)
        twice = Ledger(4)
        twice.score(1, 2)
        twice.agree(0, 4, world, CPU)
    except RuleError as error:
        (folder / f"{world.rank}.txt").write_text(str(error))


@pytest.mark.slow
def test_two_ranks_do_what_one_does(tmp_path: Path) -> None:
    run_in_process_group(score_as_rank, 2, tmp_path / "run")
    made, tokens, windows = model(), text(), sliding(72, LENGTH, 3)
    _, _, tally = adapted(made, tokens, windows, restore=False)
    alone = tally.score(windows.scored, 1.0).bpb
    one, two = (torch.load(tmp_path / "run" / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert one["bpb"] == two["bpb"]
    assert one["bpb"] == pytest.approx([alone, alone], rel=1e-6)
    for name, p in made.named_parameters():
        assert torch.equal(one["weights"][name], two["weights"][name])
        torch.testing.assert_close(one["weights"][name], p, rtol=0, atol=1e-4)
    for rank in range(2):
        assert (tmp_path / "run" / f"{rank}.txt").read_text() == (
            "target 1 is scored on two ranks; a target is scored once (C4)"
        )
