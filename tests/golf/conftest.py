"""Shards of a page of text, by bytes: shared by all modules of a worker."""

from pathlib import Path

import pytest

from birdie.gpt.data.corpus import file_corpus
from birdie.gpt.data.preparation import prepare


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    list(prepare(file_corpus([Path(__file__).with_name("test_packed_script.py")]), tokenizer="bytes", root=root))
    return next((root / "datasets").iterdir())
