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
