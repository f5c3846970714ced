"""The mixing's tables are those of the format on every machine: by hash, by definition, and by their laws."""

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from birdie.entropy import logistic
from tests.reference import pinned

FORMAT = Path(__file__).parents[2] / "docs" / "format.md"
PRIORS = {"Gaussian": logistic.GAUSSIAN, "logistic": logistic.LOGISTIC, "Laplace": logistic.LAPLACE}
TABLES = {**logistic.tables()._asdict(), **{name: logistic.prior(kind) for name, kind in PRIORS.items()}}


def sha256(table: NDArray[np.integer]) -> str:
    return hashlib.sha256(table.astype("<i4").tobytes()).hexdigest()


def test_the_tables_are_those_the_format_pins() -> None:
    listed = re.findall(r"^\| (?:F, )?(\w+) \| `([0-9a-f]{64})` \|$", FORMAT.read_text(), re.MULTILINE)
    assert dict(listed) == {name: sha256(table) for name, table in TABLES.items()}


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_are_what_the_format_defines(name: str) -> None:
    assert TABLES[name].tolist() == pinned.tables()[name]


def test_squash_and_stretch_undo_each_other() -> None:
    """As far as their steps allow: stretch answers for a cell of 16, squash moves by up to 97 a logit."""
    squash, stretch = TABLES["squash"], TABLES["stretch"]
    assert (np.diff(squash) >= 0).all()
    assert (np.diff(stretch) >= 0).all()
    assert (np.abs(squash[1:] + squash[:0:-1] - 65536) <= 1).all()
    assert (stretch == -stretch[::-1]).all()
    assert np.abs(stretch).max() <= logistic.LIMIT
    cells = np.arange(4096) * 16 + 8
    assert np.abs(squash[stretch + 2048] - cells).max() <= np.diff(squash).max()


@pytest.mark.parametrize("name", PRIORS)
def test_priors_are_symmetric_distributions_of_unit_mean_magnitude(name: str) -> None:
    cells = TABLES[name]
    assert cells[0] == 0
    assert (np.diff(cells) >= 1).all()
    assert (np.abs(cells + cells[::-1] - cells[-1]) <= 1).all()
    masses, middles = np.diff(cells) - 1, np.abs(np.arange(4096) - 2047.5) / 256
    assert float(masses @ middles) / masses.sum() == pytest.approx(1, abs=0.01)
