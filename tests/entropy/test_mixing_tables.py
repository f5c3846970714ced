"""The tables of context mixing are those of the format on every machine: by hash, by definition, and by their laws."""

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from birdie.entropy import mixing_tables
from tests.reference import mixing_tables as reference

FORMAT = Path(__file__).parents[2] / "docs" / "coders.md"
PRIORS = {"Gaussian": mixing_tables.GAUSSIAN, "logistic": mixing_tables.LOGISTIC, "Laplace": mixing_tables.LAPLACE}
TABLES = {**mixing_tables.tables()._asdict(), **{name: mixing_tables.prior_cdf(kind) for name, kind in PRIORS.items()}}


def sha256(table: NDArray[np.integer]) -> str:
    return hashlib.sha256(table.astype("<i4").tobytes()).hexdigest()


def test_the_tables_have_the_hashes_of_the_format() -> None:
    listed = re.findall(r"^\| (?:F, )?(\w+) \| `([0-9a-f]{64})` \|$", FORMAT.read_text(), re.MULTILINE)
    assert dict(listed) == {name: sha256(table) for name, table in TABLES.items()}


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_follow_the_definitions_of_the_format(name: str) -> None:
    assert TABLES[name].tolist() == reference.tables()[name]


def test_squash_and_stretch_undo_each_other() -> None:
    """As far as their steps allow: an entry of stretch covers 16 probabilities, squash moves by up to 97 per logit."""
    squash, stretch = TABLES["squash"], TABLES["stretch"]
    assert (np.diff(squash) >= 0).all()
    assert (np.diff(stretch) >= 0).all()
    assert (np.abs(squash[1:] + squash[:0:-1] - 65536) <= 1).all()
    assert (stretch == -stretch[::-1]).all()
    assert np.abs(stretch).max() <= mixing_tables.LIMIT
    middles = np.arange(4096) * 16 + 8
    assert np.abs(squash[stretch + 2048] - middles).max() <= np.diff(squash).max()


@pytest.mark.parametrize("name", PRIORS)
def test_priors_are_symmetric_distributions_of_unit_mean_magnitude(name: str) -> None:
    cdf = TABLES[name]
    assert cdf[0] == 0
    assert (np.diff(cdf) >= 1).all()
    assert (np.abs(cdf + cdf[::-1] - cdf[-1]) <= 1).all()
    masses, middles = np.diff(cdf) - 1, np.abs(np.arange(4096) - 2047.5) / 256
    assert float(masses @ middles) / masses.sum() == pytest.approx(1, abs=0.01)
