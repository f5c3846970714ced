"""Bounds are rows, documents and forced splits, padded to few shapes; packed rows begin with a document."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.errors import ConfigError, DataError
from birdie.gpt.data.batches import Batches
from birdie.gpt.data.shards import write_shard
from birdie.gpt.model.documents import segment_offsets
from birdie.gpt.run.recipe_settings import Recipe
from tests.gpt.model.packed_text import BOS, document_text


def plain_loop(rows: list[list[int]], longest: int) -> list[int]:
    offsets, position, begin = [], 0, 0
    for row in rows:
        for column, token in enumerate(row):
            if column == 0 or token == BOS or position - begin == longest:
                offsets.append(position)
                begin = position
            position += 1
    return [*offsets, position]


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 12).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 4), min_size=n, max_size=n), min_size=1, max_size=4)
    ),
    st.integers(1, 9),
)
def test_bounds_are_rows_documents_and_forced_splits(rows: list[list[int]], longest: int) -> None:
    assert segment_offsets(np.array(rows), BOS, longest).tolist() == plain_loop(rows, longest)


def test_packed_rows_begin_with_a_document_and_continue_without_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "a_train_0.bin"
    ids = document_text(1, 3000, seed=4)[0].numpy().astype(np.uint16)
    ids[:5] = 7  # the end of a document that began in another shard
    ids[5] = BOS
    write_shard(path, ids)
    batches = Batches([path], batch_tokens=128, seq_len=16, accumulation=2, order="packed", bos_id=BOS)
    stream = np.memmap(path, np.uint16, offset=1024)
    for index in range(60):  # beyond the end of the shard
        x, y = batches.next()
        chunk = np.take(stream, range(5 + 65 * index, 5 + 65 * (index + 1)), mode="wrap")
        assert np.array_equal(x, chunk[None, :-1])
        assert np.array_equal(y, chunk[None, 1:])
    batches.close()


def test_packing_needs_documents_and_their_isolation(tmp_path: Path) -> None:
    write_shard(tmp_path / "a_train_0.bin", np.full(500, 7, np.uint16))
    with pytest.raises(DataError, match="token 1"):
        Batches([tmp_path / "a_train_0.bin"], batch_tokens=128, seq_len=16, accumulation=2, order="packed")
    with pytest.raises(ConfigError, match=r"model\.isolate_documents"):
        Recipe.from_dict({"data": {"order": "packed"}})
