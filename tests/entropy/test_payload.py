"""A payload falls apart into what it was joined from, on any number of threads, and false lengths are refused."""

import numpy as np
import pytest

from birdie.entropy import payload
from birdie.errors import ArtifactError

SIDE = np.arange(300, dtype=np.uint16)
CHUNKS = [np.arange(5, dtype=np.uint32), np.zeros(0, np.uint32), np.arange(7, 9, dtype=np.uint32)]
LENGTHS = np.array([chunk.size for chunk in CHUNKS])


def test_chunks_longer_than_the_payload_are_refused() -> None:
    with pytest.raises(ArtifactError):
        payload.decode_chunks(memoryview(bytes(27)), LENGTHS, 4, lambda *_: None, 1)
    with pytest.raises(ArtifactError):
        payload.decode_chunks(memoryview(bytes(27)), np.array([1 << 62, 1 << 62]), 4, lambda *_: None, 1)
