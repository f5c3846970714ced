"""Metadata of a file are data of a stranger: no value in them hangs, allocates or ends in a traceback."""

import pytest

from tests.hostile import absurd_metadata


def test_absurd_metadata_are_refused_and_irrelevant_ones_change_nothing() -> None:
    """A part of the table and a few random edits; all of it at night, in a process with limits."""
    counts, faults = absurd_metadata.campaign(3, 0, every=16)
    assert faults == []
    assert counts["refused"] > 5
    assert counts["scored"] >= 5


@pytest.mark.nightly
@pytest.mark.timeout(0)  # the campaign has a limit of its own
def test_random_edits_of_metadata_are_refused_or_harmless() -> None:
    assert absurd_metadata.run(3000, 1).endswith("scored\n")
