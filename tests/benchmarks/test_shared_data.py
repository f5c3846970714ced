"""The shared data: a missing folder is one clear sentence, and texts are tokens of shards or of text files."""

import argparse
from pathlib import Path

import numpy as np
import pytest

from benchmarks import shared_data as data
from birdie.data.shards import write_shard
from birdie.errors import ConfigError
from tests.benchmarks.byte_gpt import TOKENIZER


def test_a_missing_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BIRDIE_DATA", raising=False)
    with pytest.raises(ConfigError, match="BIRDIE_DATA"):
        data.shared_data()


def test_a_text_is_the_head_of_a_shard_or_of_one_document(tmp_path: Path) -> None:
    write_shard(tmp_path / "x.bin", np.arange(1, 50))
    assert data.text_tokens(tmp_path / "x.bin", TOKENIZER, 3).tolist() == [1, 2, 3, 4]
    (tmp_path / "x.txt").write_text("abcdef")
    assert data.text_tokens(tmp_path / "x.txt", TOKENIZER, 3).tolist() == [1, *(4 + byte for byte in b"abc")]


def test_texts_are_scored_by_the_export_and_skip_their_beginning(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIRDIE_DATA", str(shared_data))
    parser = argparse.ArgumentParser()
    data.add_scoring_flags(parser, tokens=7, texts={"book": data.TEXTS["book"]})
    model, tokenizer, texts = data.scored_texts(parser.parse_args([]), skip=2)
    assert model.config.vocab_size == tokenizer.vocab_size == 1024
    ((name, tokens),) = texts
    assert (name, len(tokens)) == ("book", 8)
    assert tokenizer.bos_id not in tokens
