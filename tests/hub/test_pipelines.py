"""All that a file of a folder holds comes from the file: kept files, tokenizer, pipeline."""

from pathlib import Path
from typing import Any

import pytest

import birdie
from birdie.errors import ConfigError
from tests.hub.models import write
from tests.hub.test_pretrained import compress

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries
WORDS = ["[UNK]", "once", "upon", "a", "time"]


def with_tokenizer(folder: Path) -> Any:
    """Write a tokenizer of whole words into a folder, and return it."""
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[UNK]")
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "model"
    write("gpt2", folder)
    with_tokenizer(folder)
    return compress(folder, "--bits", "6", "--calibrate", "none")


def test_kept_files_come_back(file: Path) -> None:
    kept = birdie.files(file)
    assert {"config.json", "tokenizer.json"} <= kept.keys()
    folder = file.with_suffix("")
    assert all(content == (folder / name).read_bytes() for name, content in kept.items())
    assert birdie.files(file.read_bytes()) == kept


def test_the_tokenizer_comes_from_the_file(file: Path) -> None:
    tokenizer = birdie.tokenizer(file)
    assert tokenizer("once upon a time").input_ids == [1, 2, 3, 4]


def test_a_pipeline_goes_from_text_to_text(file: Path) -> None:
    tell = birdie.pipeline(file)
    assert tell.task == "text-generation"
    (answer,) = tell("once upon", max_new_tokens=2, do_sample=False)
    assert answer["generated_text"].startswith("once upon")


def test_what_is_not_in_a_file_is_named(tmp_path: Path, file: Path) -> None:
    write("t5", tmp_path / "model")
    other = compress(tmp_path / "model", "--bits", "6", "--calibrate", "none")
    with pytest.raises(ConfigError, match="keeps no tokenizer"):
        birdie.tokenizer(other)
    with pytest.raises(ConfigError, match="name the task"):
        birdie.pipeline(other)
    with pytest.raises(ConfigError, match="transformers makes no pipeline"):
        birdie.pipeline(file, "no such task")
