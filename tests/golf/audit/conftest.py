"""An artifact of an untrained model, with shards of its own: shared by all modules of a worker."""

import argparse
import inspect
from pathlib import Path

import numpy as np
import pytest

from birdie.gpt.data.shards import ShardWriter, Split
from birdie.gpt.data.tokenizer import ByteTokenizer
from birdie.gpt.run.history import HistoryEntry, record
from birdie.gpt.run.recipe_settings import DataSettings
from tests.golf.audit.submissions import save_artifact


@pytest.fixture(scope="package")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of a module of the standard library, by bytes: 40 documents to train on, 4 to validate on."""
    folder = tmp_path_factory.mktemp("shards")
    texts = inspect.getsource(argparse).split("\n\n")[:44]
    tokenizer = ByteTokenizer()
    parts: dict[Split, list[str]] = {"train": texts[:40], "val": texts[40:]}
    for split, part in parts.items():
        with ShardWriter(folder, "argparse", split) as shards:
            for text in part:
                shards.write(np.insert(tokenizer.encode(text), 0, tokenizer.bos_id))
    return folder


@pytest.fixture(scope="package")
def run_folder(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A run folder with an artifact and a history."""
    folder = tmp_path_factory.mktemp("run")
    save_artifact(folder / "model.birdie", DataSettings(path=str(data), tokenizer="bytes"))
    record(folder, HistoryEntry(10, 1234.5, 3.0))
    return folder
