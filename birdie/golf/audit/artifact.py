"""The audit of a .birdie file: its model is rebuilt from its bytes, and its evaluation is probed.

    model.birdie ── load_gpt ──► GPT ──► a scorer that predicts token by token ──► probes
                        └──► recipe ──► shards and tokenizer ──► bytes, whole split, copied documents

The probed scorer predicts token by token what `birdie evaluate` scores in batches; that the two agree is checked too.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from birdie.artifact import inspect, load
from birdie.errors import ArtifactError, BirdieError, ConfigError, DataError, WeightsError
from birdie.golf.audit import rules
from birdie.golf.audit.byte_counts import check_counts, check_table
from birdie.golf.audit.overlap import check_overlap
from birdie.golf.audit.probes import probe
from birdie.golf.audit.rules import Finding, Result, size_result
from birdie.golf.audit.scoring import batched_losses, check_adaptation, scorer_of, token_losses, window_length
from birdie.golf.audit.splits import complete_split
from birdie.gpt.data.byte_accounting import ByteTable, Tokens
from birdie.gpt.data.dataset import open_dataset
from birdie.gpt.model.gpt import GPT
from birdie.gpt.run.evaluation import checked_text, load_gpt, open_validation
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.run.run_data import RunData, open_shards
from birdie.system.callbacks import Progress, no_progress

COMPARED = 32
"""Targets whose losses are computed both ways, token by token and batched."""
BEYOND = 256
"""Most tokens after the first window that probes run over: an error at a border shows right behind it."""
AGREE = 1e-3
"""Nats by which the two ways may differ: kernels sum in another order for other shapes."""


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """The options of an audit, as `birdie.golf.audit.folder_audit.audit` documents them."""

    data: str | None = None
    tokenizer: str | None = None
    train: tuple[str, ...] = ()
    tokens: int = 4096
    progress: Progress = no_progress


def audit_artifact(path: Path, shown: str, options: AuditOptions) -> Iterator[Finding]:
    """Yield all findings about the .birdie file at `path`; `shown` is its path in findings."""
    result, evidence = size_result(path.stat().st_size, "the artifact alone, without the code that reads it")
    yield Finding(rules.SIZE, result, evidence, "file", shown)
    started = time.perf_counter()
    try:
        model, recipe, metadata = load_gpt(path, torch.device("cpu"))
    except (ArtifactError, WeightsError) as error:
        yield Finding(rules.RUNS, _unusable(path), f"its model cannot be rebuilt: {error}", "file", shown)
        return
    model.compute_dtype = torch.float32
    seconds = time.perf_counter() - started
    yield Finding(rules.SELF_CONTAINED, "pass", "the model is rebuilt from the file's bytes alone", "file", shown)
    evidence = f"decoded in {seconds:.1f} s on a CPU; {model.config.vocab_size:,} log-probabilities for each token"
    yield Finding(rules.RUNS, "pass", evidence, "file", shown)
    yield check_recipe(recipe, metadata, shown)
    text, problems = _validation_text(recipe, metadata, options, shown)
    yield from problems
    tokens = _random_tokens(model) if text is None else np.asarray(text.text.tokens[: options.tokens + 1])
    yield from _check_scoring(model, recipe, tokens, shown, options.progress)
    if text is not None:
        yield from _check_text(text, recipe, options)


def _unusable(path: Path) -> Result:
    """Return "fail" for a damaged file; one that holds something else than a GPT is outside this audit."""
    try:
        inspect(path)
        load(path)
    except BirdieError:
        return "fail"
    return "unknown"


def check_recipe(recipe: Recipe, metadata: Mapping[str, Any], shown: str) -> Finding:
    """Return what the file states about its training; that is its author's word."""
    shared = set(recipe.data.train) & set(recipe.data.val)
    if metadata.get("model") != "gpt":
        evidence = "the file does not state what it was trained on"
    elif shared:
        evidence = f"its recipe trains on what it validates on: {', '.join(sorted(shared))}"
        return Finding(rules.VALIDATION, "fail", evidence, "recipe", shown)
    else:
        source = {"none": "nothing", "train": "its training text", "own": "text of its own"}[recipe.calibration.data]
        train = ", ".join(recipe.data.train) or recipe.data.path
        evidence = f"its recipe trains on {train} and calibrates on {source}; the file cannot prove it"
    return Finding(rules.VALIDATION, "unknown", evidence, "recipe", shown)


def _validation_text(
    recipe: Recipe, metadata: Mapping[str, Any], options: AuditOptions, shown: str
) -> tuple[RunData | None, list[Finding]]:
    """Return the validation text if it exists, else findings on what is missing or wrong."""
    recipe = replace(recipe, data=replace(recipe.data, tokenizer=options.tokenizer or recipe.data.tokenizer))
    recipe = replace(recipe, validation=replace(recipe.validation, max_tokens=0))
    try:
        dataset, tokenizer = open_validation(recipe, options.data)
    except (DataError, ConfigError) as error:
        if options.data is not None or options.tokenizer is not None:
            raise
        evidence = f"there is no text to compare with: {error} (--data, --tokenizer)"
        return None, [Finding(rule, "unknown", evidence, "data", shown) for rule in (rules.BYTES, rules.COVERAGE)]
    try:
        text, _ = checked_text(recipe, metadata, dataset, tokenizer)
    except DataError as error:
        return None, [Finding(rules.BYTES, "fail", str(error), "data", shown)]
    return RunData(dataset, tokenizer, text), []


def _random_tokens(model: GPT) -> Tokens:
    """Return random tokens, for want of a text: the rules hold for them too."""
    return np.random.default_rng(0).integers(0, model.config.vocab_size, 257).astype(np.uint16)


def _check_scoring(model: GPT, recipe: Recipe, tokens: Tokens, shown: str, progress: Progress) -> Iterator[Finding]:
    """Probe the scorer, compare it with the batched evaluation, and run the adaptation."""
    length = window_length(recipe)
    tokens = tokens[: length + min(2 * (recipe.evaluation.stride or length), BEYOND) + 1]
    new_scorer, weights = scorer_of(model, recipe), _checksums(model)
    with _one_thread():
        findings = probe(new_scorer, model.config.vocab_size, tokens, progress=progress)
    yield from (replace(finding, path=shown) for finding in findings)
    mode, batched = batched_losses(model, recipe, tokens, progress)
    evidence = f"{len(batched):,} targets were entered in the ledger, each once ({mode})"
    yield Finding(rules.ONE_PASS, "pass", evidence, "ledger", shown)
    chosen = np.unique(np.linspace(0, len(batched) - 1, COMPARED).astype(int))
    with _one_thread():
        losses = token_losses(new_scorer(), tokens, chosen)
        difference = max(abs(nats - float(batched[target])) for target, nats in losses)
    evidence = f"{len(chosen)} losses, batched and token by token, differ by {difference:.1e} nats at most ({mode})"
    yield Finding(rules.CAUSAL, "pass" if difference <= AGREE else "fail", evidence, "batch", shown)
    trains = recipe.evaluation.scoring_mode.trains
    if trains:
        yield from check_adaptation(model, recipe, tokens, shown, progress)
    if not torch.equal(weights, _checksums(model)):
        yield Finding(rules.SCORE_FIRST, "fail", "scoring changed the weights", "ledger", shown)
    elif not trains:
        yield Finding(rules.SCORE_FIRST, "pass", "scoring does not change the weights", "ledger", shown)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread: for single tokens, threads that wait for each other take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _checksums(model: GPT) -> Tensor:
    """Return a number for every tensor that changes when the tensor does."""
    return torch.stack([tensor.detach().double().flatten().sum() for tensor in model.state_dict().values()])


def _check_text(text: RunData, recipe: Recipe, options: AuditOptions) -> Iterator[Finding]:
    """Compare counted bytes with the decoded text, targets with the whole split, and documents with training."""
    name, tokenizer, tokens = str(text.dataset.val[0]), text.tokenizer, text.text.tokens
    counts = text.text.bytes
    assert isinstance(counts, ByteTable | np.ndarray)
    yield check_counts(tokenizer, tokens, counts, path=name, progress=options.progress)
    yield from check_table(tokenizer.byte_table(), tokenizer)
    targets = len(tokens) - 1
    split = complete_split(targets)
    evidence = f"{targets:,} targets are the challenge's whole split of vocabulary {split.vocabulary if split else ''}"
    if split is None:
        evidence = f"{targets:,} targets are not the challenge's whole split; a score on them compares with none there"
    yield Finding(rules.COVERAGE, "unknown" if split is None else "pass", evidence, "data", name)
    train = _training_shards(recipe, options)
    if not train:
        evidence = "the training shards are not known; name them (--train)"
        yield Finding(rules.OVERLAP, "unknown", evidence, "documents")
    else:
        yield check_overlap(train, tokens, tokenizer.bos_id, progress=options.progress)


def _training_shards(recipe: Recipe, options: AuditOptions) -> tuple[Path, ...]:
    """Return the training shards of the options, or of the recipe where the text is the recipe's."""
    if options.train:
        return open_dataset(train=options.train).train
    if options.data is None or Path(options.data).resolve() == Path(recipe.data.path).resolve():
        with suppress(DataError):  # they are not on this machine
            return open_shards(recipe.data).train
    return ()
