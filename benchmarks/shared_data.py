"""The shared data (folder BIRDIE_DATA): its texts, and the challenge export of 7.6 M weights that scores them."""

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.artifact.checkpoints import read_state_dict
from birdie.compress.filling import fill
from birdie.data.shards import read_shard
from birdie.data.tokenizer import Tokenizer, load_tokenizer
from birdie.errors import ConfigError
from birdie.model.gpt import GPT
from birdie.model.infer_config import infer_config

TEXTS = {
    "fineweb": "text/fineweb/fineweb_val_head_sp1024.bin",
    "book": "text/books/Jane_Austen_Emma.md",
    "shakespeare": "text/tinyshakespeare/input.txt",
}
"""Texts whose scores are reported, by name."""
TUNING_TEXTS = {
    "train": "text/fineweb/fineweb_train_000000_smoke_sp1024.bin",
    "walden": "text/books/Henry_David_Thoreau_Walden.md",
}
"""Texts on which settings were chosen; none of them is in `TEXTS`."""
EXPORT = "weights/parameter_golf/samtruss_7L384_valbpb1.99.int8.ptz"

Tokens = NDArray[np.uint16]


def shared_data() -> Path:
    """Return the folder of the shared data.

    Raises:
        ConfigError: BIRDIE_DATA is unset.
    """
    if not os.environ.get("BIRDIE_DATA"):
        raise ConfigError("this benchmark needs the shared data; set BIRDIE_DATA to its folder")
    return Path(os.environ["BIRDIE_DATA"])


def add_scoring_flags(parser: argparse.ArgumentParser, *, tokens: int, texts: Mapping[str, str] = TEXTS) -> None:
    """Add the flags of a benchmark that scores texts with the challenge export.

    Args:
        parser: parser of the command.
        tokens: default number of tokens.
        texts: texts of the default, by name.
    """
    parser.add_argument("--weights", type=Path, help="a challenge export (default: the shared data's)")
    parser.add_argument("--tokens", type=int, default=tokens, help=f"tokens of each text (default: {tokens:,})")
    parser.add_argument("--context", type=int, default=512, help="tokens of context (default: 512)")
    parser.add_argument("--texts", default=",".join(texts), help=f"names, comma-separated (default: {','.join(texts)})")


def scored_texts(options: argparse.Namespace, skip: int = 0) -> tuple[GPT, Tokenizer, Iterator[tuple[str, Tokens]]]:
    """Return the model, its tokenizer, and the name and tokens of each text that the flags name.

    Args:
        options: parsed flags of `add_scoring_flags`.
        skip: tokens at the beginning of each text that are left out.
    """
    torch.set_num_threads(1)
    data = shared_data()
    tokenizer = load_tokenizer(data / "tokenizers" / "fineweb_1024_bpe.model")
    model, paths = load_export(options.weights or data / EXPORT), TUNING_TEXTS | TEXTS
    texts = (
        (name, text_tokens(data / paths[name], tokenizer, skip + options.tokens)[skip:])
        for name in options.texts.split(",")
    )
    return model, tokenizer, texts


def load_export(path: Path) -> GPT:
    """Return the GPT of a challenge export, in float32 and evaluation mode."""
    state = read_state_dict(path)
    model = GPT(infer_config(state))
    fill(model, state, str(path))
    model.compute_dtype = torch.float32
    return model.eval()


def text_tokens(path: Path, tokenizer: Tokenizer, count: int) -> Tokens:
    """Return the first `count` + 1 tokens of a shard, or of a text file as one document."""
    if path.suffix == ".bin":
        return np.asarray(read_shard(path)[: count + 1])
    text = path.read_text(encoding="utf-8")
    return np.concatenate(([tokenizer.bos_id], tokenizer.encode(text)))[: count + 1].astype(np.uint16)
