"""Unpacking of general-purpose compressors: round trip, a bound on the output, damage as ArtifactError."""

import pytest

from benchmarks.rivals import COMPRESSORS
from birdie.errors import ArtifactError

DATA = bytes(range(256)) * 300


@pytest.mark.parametrize("name", COMPRESSORS)
def test_round_trip_bound_and_damage(name: str) -> None:
    compressor = COMPRESSORS[name]
    if not compressor.installed:
        pytest.skip(f"{compressor.package} is not installed")
    packed = compressor.compress(DATA)
    assert compressor.version
    assert compressor.decompress(packed, len(DATA)) == DATA
    for damaged, limit in ((packed, len(DATA) - 1), (packed[:-4], len(DATA)), (b"no", 10), (b"", 10)):
        with pytest.raises(ArtifactError):
            compressor.decompress(damaged, limit)
