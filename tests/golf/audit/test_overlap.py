"""Copies of validation documents among training documents, wherever shards are cut."""

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.golf.audit.overlap import MIN_TOKENS, check_overlap, copies
from birdie.gpt.data.shards import write_shard

BOS = 1
DOCUMENTS = st.lists(st.lists(st.integers(2, 9), min_size=0, max_size=40), min_size=1, max_size=12)


def shards(folder: Path, name: str, documents: list[list[int]], size: int) -> list[Path]:
    """Write `documents` with BOS as shards of `size` tokens, in order."""
    tokens = np.concatenate([np.array([BOS, *document]) for document in documents])
    paths = []
    for start in range(0, len(tokens), size):
        paths.append(folder / f"x_{name}_{start // size:06d}.bin")
        write_shard(paths[-1], tokens[start : start + size])
    return paths


@settings(deadline=None, max_examples=25)
@given(DOCUMENTS, DOCUMENTS, st.sets(st.integers(0, 11)), st.integers(5, 90))
def test_copies_are_found_wherever_shards_are_cut(
    tmp_path_factory: pytest.TempPathFactory, val: list[list[int]], train: list[list[int]], copied: set[int], size: int
) -> None:
    folder = tmp_path_factory.mktemp("overlap")
    train = [*train, *(val[i] for i in copied if i < len(val))]
    long_val = {tuple(document) for document in val if len(document) >= MIN_TOKENS}
    result = copies(shards(folder, "train", train, size), shards(folder, "val", val, size + 3), BOS)
    assert result.val == len(long_val)
    assert result.copied == len(long_val & {tuple(document) for document in train})
    assert result.train == sum(bool(document) for document in train)


def test_one_copy_among_few_documents_fails_and_among_many_is_unknown(tmp_path: Path) -> None:
    draw = random.Random(0)
    many = [[draw.randrange(2, 60_000) for _ in range(MIN_TOKENS)] for _ in range(1100)]
    train = shards(tmp_path, "train", [many[7], [5] * 30], 1000)
    assert check_overlap(train, shards(tmp_path, "few", many[:20], 1000), BOS).result == "fail"
    assert check_overlap(train, shards(tmp_path, "val", many, 1000), BOS).result == "unknown"
    clean = check_overlap(train, shards(tmp_path, "other", many[8:20], 1000), BOS)
    assert clean.result == "pass"
    assert "none of 12 validation documents is among 2 training documents in 1 shard" in clean.evidence
    stream = check_overlap(train, np.array([BOS, *many[7]], np.uint16), BOS)
    assert "document 1 of the training text, in x_train_000000.bin" in stream.evidence


def test_shards_without_bos_are_unknown(tmp_path: Path) -> None:
    write_shard(tmp_path / "a_train_0.bin", np.full(100, 7))
    assert check_overlap([tmp_path / "a_train_0.bin"], np.array([BOS], np.uint16), BOS).result == "unknown"


def test_real_splits_do_not_overlap(shared_data: Path) -> None:
    text = shared_data / "text" / "fineweb"
    train, val = text / "fineweb_train_000000_smoke_sp1024.bin", text / "fineweb_val_head_sp1024.bin"
    assert check_overlap([train], [val], BOS).result == "pass"
    assert check_overlap([train, val], [val], BOS).result == "fail"
