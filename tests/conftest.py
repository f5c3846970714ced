"""Fixtures for all tests: an environment without the challenge's variables, two threads, the real data."""

import dataclasses
import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from hypothesis import settings

from birdie.chain import settled
from birdie.gpt.run.environment import CHOICES, DEAD, RULES
from birdie.gpt.run.recipe_settings import Recipe

settings.register_profile("birdie", deadline=None)  # a busy machine is no fault of birdie
settings.load_profile("birdie")

TORCHRUN_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "RUN_ID"}

gc.disable()  # until tests are collected: modules, functions and parameters stay, and looking at them takes a quarter


def challenge_variables(kind: type) -> Iterator[str]:
    """Yield the environment variables that set fields of a recipe dataclass."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from challenge_variables(hint)
        for parameter in getattr(hint, "__metadata__", ()):
            assert isinstance(parameter.env_var, tuple), name
            yield from parameter.env_var


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let every second worker begin at the end: each then rewrites the assertions of half of the files.

    To rewrite those of all files takes a quarter of a minute; the next process reads the bytecode.
    """
    report = yield
    if isinstance(collector, pytest.Dir) and os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "13579":
        report.result = [*(report.result or ())][::-1]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring tests into one order, which all workers must have."""
    items.sort(key=lambda item: item.path)


def pytest_collection_finish() -> None:
    """Look for garbage again, but not among what was imported and collected: close to a million objects that stay."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _clean_environment() -> Iterator[None]:
    """Remove the variables of the challenge, so that those in the developer's shell change no test and no fixture."""
    patch = pytest.MonkeyPatch()
    joint = {name for rule in RULES for name in rule.variables}
    dead = {name for row in DEAD for name in row.names}
    for name in {*challenge_variables(Recipe), *joint, *dead, *CHOICES, *TORCHRUN_VARIABLES}:
        patch.delenv(name, raising=False)
    yield
    patch.undo()


@pytest.fixture(autouse=True, scope="session")
def _at_once() -> Iterator[None]:
    """Take a checkpoint that a test has just written for one that nobody writes to."""
    patch = pytest.MonkeyPatch()
    patch.setattr(settled, "QUIET", 0.0)
    yield
    patch.undo()


@pytest.fixture(autouse=True, scope="session")
def _two_threads() -> None:
    """Use two threads in total: more threads than cores in parallel workers would wait for one another.

    The variable is for the processes that tests start.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = max(1, min(2, os.cpu_count() or 1) // workers)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder named by BIRDIE_DATA; tests that use it are skipped if the variable is not set."""
    folder = os.environ.get("BIRDIE_DATA")
    if not folder:
        pytest.skip("BIRDIE_DATA is not set: no real data")
    return Path(folder)
