"""Findings about a submission that its recipe settles before anything is trained, by the rules of the audit."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

from birdie.compress import parse_size
from birdie.errors import DataError
from birdie.golf.audit import rules
from birdie.golf.audit.artifact import check_recipe
from birdie.golf.audit.log_checks import check_log, seeds_result
from birdie.golf.audit.rules import Finding, size_result
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.run.run_data import open_shards
from birdie.lab.logs import Figure, TrainingLog


def foreseen(recipe: Recipe, seeds: Sequence[int], code: int, cap: int) -> list[Finding]:
    """Return what an audit of the finished folder will fail on, or not pass because of the recipe or the seeds.

    Args:
        code: bytes of the script.
        cap: bytes of code and model that the runs keep.
    """
    return [finding for finding in _findings(recipe, seeds, code, cap) if finding.result != "pass"]


def _findings(recipe: Recipe, seeds: Sequence[int], code: int, cap: int) -> Iterator[Finding]:
    log = TrainingLog("the recipe", capped=True)
    if (cap_ms := recipe.train.cap_ms) is not None:
        log.train_ms = Figure(cap_ms, 0)
    with suppress(DataError):  # the first run says what is wrong with the shards
        limit, tokens = recipe.validation.max_tokens, open_shards(recipe.data).val_tokens
        log.val_tokens = Figure(min(limit or tokens, tokens - 1), 0)
    yield from check_log(log)
    yield Finding(rules.SEEDS, *seeds_result(seeds), "recipe")
    budget = recipe.export.budget
    most = cap if budget is None else min(cap, code + parse_size(budget))
    yield Finding(rules.SIZE, *size_result(most, "code and model at most"), "recipe")
    stated = check_recipe(recipe, {"model": "gpt"}, "the recipe")
    if stated.result == "fail":  # what it does not prove, it never does
        yield stated
