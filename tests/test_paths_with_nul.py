"""A path with NUL, which no file can have, is one sentence of birdie's at every door of its Python interface."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import birdie
from birdie.checkpoints.checkpoints import read_weights
from birdie.errors import BirdieError
from birdie.golf.audit.folder_audit import audit
from birdie.gpt.data.corpus import file_corpus
from birdie.gpt.data.dataset import open_dataset
from birdie.gpt.data.tokenizer import load_tokenizer
from birdie.gpt.run.evaluation import evaluate
from birdie.gpt.run.recipe_file import read_recipe_file
from birdie.lab.run_ledger import find_runs_and_logs, read_run

DOORS: dict[str, Callable[[Any], object]] = {
    "load": birdie.load,
    "load_object": birdie.load_object,
    "inspect": birdie.inspect,
    "from_pretrained": birdie.from_pretrained,
    "save": partial(birdie.save, {"w": torch.ones(4)}),
    "save_object": partial(birdie.save_object, {"w": torch.ones(4)}),
    "audit": audit,
    "evaluate": evaluate,
    "read_weights": lambda path: read_weights(Path(path)),
    "read_run": lambda path: read_run(Path(path)),
    "find_runs_and_logs": lambda path: find_runs_and_logs(Path(path)),
    "file_corpus": lambda path: file_corpus([path]),
    "file_corpus: glob": lambda path: file_corpus([f"{path}*"]),
    "open_dataset": lambda path: open_dataset(str(path)),
    "open_dataset: glob": lambda path: open_dataset(val=f"{path}*"),
    "load_tokenizer": lambda path: load_tokenizer(f"{path}.model"),
    "read_recipe_file": read_recipe_file,
}


@pytest.mark.parametrize("name", ["a\0b", "\0", "folder/\0/b.birdie"])
@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_path_with_nul_is_one_sentence(
    door: Callable[[Any], object], kind: Callable[[str], object], name: str
) -> None:
    with pytest.raises(BirdieError):
        door(kind(name))
