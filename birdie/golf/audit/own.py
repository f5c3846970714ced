"""Auditing a .birdie file: its model is rebuilt from its bytes, and scored under the eyes of the probes.

    model.birdie ── load_gpt ──► GPT ──► a scorer that predicts, then is told ──► probes
                        └──► recipe ──► shards and tokenizer ──► bytes, whole split, copied documents

The probed scorer says a token at a time what `birdie evaluate` scores in batches; that the two agree is a finding too.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from birdie.artifact import files as artifact
from birdie.data.byte_accounting import Tokens
from birdie.data.dataset import Dataset, check_tokenizer, open_dataset
from birdie.data.sidecar import byte_counts
from birdie.data.tokenizer import Tokenizer, load_tokenizer
from birdie.errors import ArtifactError, BirdieError, ConfigError, DataError, WeightsError
from birdie.golf.audit import rules
from birdie.golf.audit.learning import check_learning
from birdie.golf.audit.logged import CAP_S, against_cap_bytes
from birdie.golf.audit.overlap import check_overlap
from birdie.golf.audit.probes import probe
from birdie.golf.audit.rules import Finding, Verdict
from birdie.golf.audit.splits import SPLITS, whole
from birdie.golf.audit.text import check_bytes, check_table
from birdie.golf.audit.ways import batched, length_of, one_by_one, scorer_of
from birdie.model.gpt import GPT
from birdie.run.evaluation import check_same_tokenizer, evaluate, load_gpt
from birdie.run.recipe import Recipe
from birdie.runtime.callbacks import Progress
from birdie.score.reference import Scorer
from birdie.score.request import EvaluationRequest

_VOCABULARY = re.compile(r"_((?:sp|byte)\d+)(?=[_.])")  # as names of shards may spell it

Told = Callable[[str, float, float | None], None]

COMPARED = 32
"""Targets whose losses are computed both ways, a token at a time and batched."""

PROBED = 2.5
"""Predictions that a probe asks for, about, of each token: three runs, one of them not to the end."""

BEYOND = 256
"""Most tokens after the first window that probes run over: what a border can do wrong shows right behind it."""

TIMED = 65_536
"""Targets that are scored against the clock."""

AGREE = 1e-3
"""Nats by which the two may differ: kernels sum in another order for other shapes."""


@dataclass(frozen=True, slots=True)
class Given:
    """What an audit is given beside the path.

    Attributes:
        data: validation shards: a folder, a file or a glob; None: those the artifact names.
        tokenizer: a .model file or "bytes"; None: the one the artifact names.
        train: training shards to look for copies of validation documents in; none: those beside the validation shards.
        tokens: of the validation text that probes run over.
        run: whether foreign code is run, and time is measured.
        told: called with (part, done, total) as work goes on.
    """

    data: str | None = None
    tokenizer: str | None = None
    train: tuple[str, ...] = ()
    tokens: int = 4096
    run: bool = False
    told: Told | None = None

    def part(self, name: str) -> Progress | None:
        """What to call with (done, total) in the part `name`."""
        told = self.told
        return None if told is None else (lambda done, total: told(name, done, total))


def audit_artifact(path: Path, shown: str, given: Given) -> tuple[Finding, ...]:
    """All findings about the .birdie file at `path`, called `shown`.

    Raises:
        DataError: data or a tokenizer that was asked for by name is not there.
    """
    size = path.stat().st_size
    verdict, said = against_cap_bytes(size, "the artifact alone, without the code that reads it")
    found = [Finding(rules.SIZE, verdict, said, "file", shown)]
    started = time.perf_counter()
    try:
        artifact.inspect(path)
        model, recipe, metadata = load_gpt(path, torch.device("cpu"))
    except (ArtifactError, WeightsError) as error:
        return (*found, Finding(rules.RUNS, _unusable(path), f"its model cannot be rebuilt: {error}", "file", shown))
    model.compute_dtype = torch.float32
    seconds = time.perf_counter() - started
    found.append(
        Finding(rules.SELF_CONTAINED, "pass", "the model is rebuilt from the file's bytes alone", "file", shown)
    )
    found.append(_trained(recipe, metadata, shown))
    text, problems = _text(recipe, metadata, given, shown)
    found += problems
    tokens = _random(model) if text is None else np.asarray(text.tokens[: given.tokens + 1])
    found += _scored(model, recipe, tokens, seconds, shown, given)
    if text is not None:
        found += _data(text, recipe, given, shown)
    if given.run:
        found += _timed(path, shown, given)
    return tuple(found)


def _unusable(path: Path) -> Verdict:
    """A damaged file fails; one that holds something else than a GPT is no matter for this audit."""
    try:
        artifact.inspect(path)
        artifact.load(path)
    except BirdieError:
        return "fail"
    return "unknown"


def _trained(recipe: Recipe, metadata: Mapping[str, Any], shown: str) -> Finding:
    """What the file says it was made from; that is its author's word."""
    if metadata.get("model") != "gpt":
        said = "the file does not say what it was trained on"
        return Finding(rules.VALIDATION, "unknown", said, "recipe", shown)
    both = set(recipe.data.train) & set(recipe.data.val)
    if both:
        said = f"its recipe trains on what it validates on: {', '.join(sorted(both))}"
        return Finding(rules.VALIDATION, "fail", said, "recipe", shown)
    source = {"none": "nothing", "train": "its training text", "own": "text of its own"}[recipe.calibration.data]
    trains = ", ".join(recipe.data.train) or recipe.data.path
    said = f"its recipe trains on {trains} and calibrates on {source}; the file cannot show that it was so"
    return Finding(rules.VALIDATION, "unknown", said, "recipe", shown)


@dataclass(frozen=True, slots=True)
class _Text:
    """The validation text: shards, what made them, their stream (N,)."""

    dataset: Dataset
    tokenizer: Tokenizer
    tokens: Tokens


def _text(recipe: Recipe, metadata: Mapping[str, Any], given: Given, shown: str) -> tuple[_Text | None, list[Finding]]:
    """The validation text, if it is there; what is missing or wrong otherwise.

    Raises:
        DataError: what was given by name is not there.
    """
    try:
        dataset = _validation(recipe, given.data)
        tokenizer = load_tokenizer(given.tokenizer or recipe.data.tokenizer)
    except (DataError, ConfigError) as error:
        if given.data is not None or given.tokenizer is not None:
            raise
        said = f"there is no text to check against: {error} (--data, --tokenizer)"
        return None, [Finding(rule, "unknown", said, "data", shown) for rule in (rules.BYTES, rules.COVERAGE)]
    try:
        check_same_tokenizer(tokenizer, metadata.get("tokenizer"), given.tokenizer or recipe.data.tokenizer)
        check_tokenizer(dataset, tokenizer)
    except DataError as error:
        return None, [Finding(rules.BYTES, "fail", str(error), "data", shown)]
    tokens = dataset.validation_tokens()
    rows, largest = recipe.model.vocab_size, int(tokens.max())
    if largest >= rows:
        said = f"the validation text holds token {largest}, and the model has {rows:,}; they do not belong together"
        return None, [Finding(rules.BYTES, "fail", said, "data", shown)]
    return _Text(dataset, tokenizer, tokens), []


def _validation(recipe: Recipe, place: str | None) -> Dataset:
    if place is None and recipe.data.val:
        return open_dataset(val=recipe.data.val)
    place = recipe.data.path if place is None else place
    return open_dataset(place, splits=["val"]) if Path(place).is_dir() else open_dataset(val=place)


def _random(model: GPT) -> Tokens:
    """Tokens without meaning, where there is no text: what must hold holds for them too."""
    return np.random.default_rng(0).integers(0, model.config.vocab_size, 257).astype(np.uint16)


class _Counted:
    """A scorer that tells how many predictions it was asked for."""

    def __init__(self, scorer: Scorer, asked: Callable[[], None]) -> None:
        self._scorer, self._asked = scorer, asked

    def predict(self) -> Tensor:
        self._asked()
        return self._scorer.predict()

    def reveal(self, token: int) -> None:
        self._scorer.reveal(token)


def _counting(make: Callable[[], Scorer], told: Progress | None, total: int) -> Callable[[], Scorer]:
    """`make`, whose scorers tell together how far they have come."""
    done = 0

    def asked() -> None:
        nonlocal done
        done += 1
        if told is not None:
            told(min(done, total), total)

    return lambda: _Counted(make(), asked)


def _scored(model: GPT, recipe: Recipe, tokens: Tokens, seconds: float, shown: str, given: Given) -> list[Finding]:
    """What probes find of the scorer, and whether the score that is told is its."""
    length = length_of(recipe)
    further = min(2 * (recipe.evaluation.stride or length), BEYOND)
    tokens = tokens[: length + further + 1]
    make, before = scorer_of(model, recipe), _weights(model)
    counting = _counting(make, given.part("probing"), int(PROBED * len(tokens)))
    with _one_thread():
        found = [replace(each, path=shown) for each in probe(counting, model.config.vocab_size, tokens)]
    way, tally = batched(model, recipe, tokens, given.part("scoring"))
    targets = np.flatnonzero(tally.ledger.scored_mask)
    said = f"{len(targets):,} targets entered a ledger, each once ({way})"
    found.append(Finding(rules.ONE_PASS, "pass", said, "ledger", shown))
    places = np.unique(np.linspace(0, len(targets) - 1, COMPARED).astype(int))
    assert tally.losses is not None  # it was told to keep them
    with _one_thread():
        apart = max(abs(one - float(tally.losses[place])) for place, one in one_by_one(make(), tokens, targets[places]))
    said = f"{len(places)} losses, batched and predicted a token at a time, differ by {apart:.1e} nats at most ({way})"
    found.append(Finding(rules.CAUSAL, "pass" if apart <= AGREE else "fail", said, "batch", shown))
    trains = recipe.evaluation.scoring_mode.trains
    if trains:
        found += check_learning(model, recipe, tokens, shown)
    same = torch.equal(before, _weights(model))
    said = "weights are the same after scoring as before" if same else "scoring changed the weights"
    if not same or not trains:
        found.append(Finding(rules.SCORE_FIRST, "pass" if same else "fail", said, "ledger", shown))
    said = f"decoded in {seconds:.1f} s on a CPU; {model.config.vocab_size:,} log-probabilities for each token"
    found.append(Finding(rules.RUNS, "pass", said, "file", shown))
    return found


@contextmanager
def _one_thread() -> Iterator[None]:
    """Single tokens are too little work to share: threads that wait for each other take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _weights(model: GPT) -> Tensor:
    """A number for every tensor that changes when the tensor does."""
    return torch.stack([each.detach().double().flatten().sum() for each in model.state_dict().values()])


def _data(text: _Text, recipe: Recipe, given: Given, shown: str) -> list[Finding]:
    """Bytes, coverage and copies."""
    found = [*_counted(text, recipe, given), *check_table_of(text.tokenizer)]
    targets = len(text.tokens) - 1
    split = whole(targets)
    if split is not None:
        said = f"{targets:,} targets are the challenge's whole split of vocabulary {split.vocabulary}"
        found.append(Finding(rules.COVERAGE, "pass", said, "data", shown))
    else:
        said = f"{targets:,} targets are not the challenge's whole split; a score on them compares with nothing there"
        found.append(Finding(rules.COVERAGE, "unknown", said, "data", shown))
    return [*found, *_copied(text, recipe, given)]


def _copied(text: _Text, recipe: Recipe, given: Given) -> tuple[Finding, ...]:
    """Whether validation documents are in the training shards there are; a pass needs those of the recipe."""
    train, whose = _training(text.dataset, recipe, given)
    if not train:
        said = "there are no training shards beside the validation shards to look for copies in (--train)"
        return (Finding(rules.OVERLAP, "unknown", said, "documents"),)
    found = check_overlap(train, text.tokens, text.tokenizer.bos_id, progress=given.part("copied documents"))
    if whose:
        return found
    doubt = "; whether the model was trained on these is not known"
    return tuple(
        replace(each, verdict="unknown", evidence=each.evidence + doubt) if each.verdict == "pass" else each
        for each in found
    )


def _counted(text: _Text, recipe: Recipe, given: Given) -> tuple[Finding, ...]:
    """What the score divides by, against the decoded text."""
    name = str(text.dataset.val[0])
    try:
        counts = byte_counts(text.dataset.val, text.tokenizer, text.tokens, recipe.model.vocab_size)
    except DataError as error:
        found = check_bytes(text.tokenizer, text.tokens, path=name, progress=given.part("bytes"))
        return (*found, Finding(rules.BYTES, "fail", str(error), "data", name))
    return check_bytes(text.tokenizer, text.tokens, counts, path=name, progress=given.part("bytes"))


def check_table_of(tokenizer: Tokenizer) -> tuple[Finding, ...]:
    """The tokenizer's own table; one that it refuses to make is judged by the text."""
    try:
        return check_table(tokenizer.byte_table(), tokenizer)
    except DataError:
        return ()


def _training(dataset: Dataset, recipe: Recipe, given: Given) -> tuple[Sequence[Path], bool]:
    """Training shards as given, those of the recipe, or those in the folder of the validation shards.

    And whether they are what the model was trained on, by somebody's word.
    """
    if given.train:
        return open_dataset(train=given.train).train, True
    if recipe.data.train and given.data is None:
        try:
            return open_dataset(train=recipe.data.train).train, True
        except DataError:  # they are not on this machine
            return (), False
    val = dataset.val[0]
    named = _VOCABULARY.findall(val.name)
    beside = [path for path in sorted(val.parent.glob("*_train_*.bin")) if _VOCABULARY.findall(path.name) == named]
    return beside, val.parent.resolve() == Path(recipe.data.path).resolve()


def _timed(path: Path, shown: str, given: Given) -> list[Finding]:
    """Seconds that an evaluation takes here: more than the cap proves nothing on slower hardware than eight H100."""
    started = time.perf_counter()
    try:
        request = EvaluationRequest(data=given.data, tokenizer=given.tokenizer, max_tokens=TIMED)
        done = evaluate(path, request, progress=given.part("scoring"))
    except (DataError, ConfigError) as error:
        return [Finding(rules.EVAL_TIME, "unknown", f"nothing was scored: {error}", "clock", shown)]
    seconds, tokens = time.perf_counter() - started, done.score.tokens
    said = f"decoding and scoring {tokens:,} targets took {seconds:.1f} s here"
    longest = max(split.targets for split in SPLITS)
    all_ = seconds + done.score.seconds * max(0, longest - tokens) / tokens
    said += f", which makes about {all_:,.0f} s for {longest:,}, the most a split has; the cap is {CAP_S:g}"
    return [Finding(rules.EVAL_TIME, "pass" if all_ <= CAP_S else "unknown", said, "clock", shown)]
