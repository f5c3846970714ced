"""A vocabulary that normalizes text, as the published ones of the challenge do."""

import io
from collections.abc import Sequence
from typing import Any

import sentencepiece

from birdie.gpt.data.tokenizer import SentencePieceTokenizer

_SETTINGS: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "add_dummy_prefix": False,
    "hard_vocab_limit": False,
    "pad_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "unk_id": 3,
    "minloglevel": 2,
}


def published(texts: Sequence[str], vocab_size: int, operators: Sequence[str] = ()) -> SentencePieceTokenizer:
    """Return a vocabulary with the challenge's own settings, which normalize."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=vocab_size,
        user_defined_symbols=list(operators),
        **_SETTINGS,
    )
    return SentencePieceTokenizer(model.getvalue())
