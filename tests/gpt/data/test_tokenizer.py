"""Tokenizers: text round-trips, and the byte table counts the UTF-8 length of the decoded text.

Both are checked on random Unicode, for raw bytes and for BPE vocabularies with and without CaseOps.
"""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.errors import ConfigError, DataError
from birdie.gpt.data import caseops
from birdie.gpt.data.byte_accounting import check_bytes
from birdie.gpt.data.caseops import ALLCAPS, ESCAPE, OPERATORS, TITLE
from birdie.gpt.data.tokenizer import (
    ByteTokenizer,
    CaseOpsTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
    train_caseops,
    train_sentencepiece,
)
from tests.gpt.data.published_vocabulary import published

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def documents(count: int, seed: int = 0) -> list[str]:
    """Return `count` documents of random words with digits, accents and punctuation."""
    draw = random.Random(seed)
    lexicon = ["".join(draw.choices("abcdeéiou stnrl", k=draw.randint(1, 8))) for _ in range(400)]
    lines = [" ".join(draw.choices(lexicon, k=9)) + f", {draw.random()}." for _ in range(9 * count)]
    return ["\n".join(lines[9 * i : 9 * i + 9]) for i in range(count)]


@cache
def small_bpe() -> SentencePieceTokenizer:
    return train_sentencepiece(documents(60), 400)


@cache
def small_caseops() -> CaseOpsTokenizer:
    return train_caseops([text.title() for text in documents(60)], 420)


@cache
def published_bpe() -> SentencePieceTokenizer:
    return published(documents(60), 400)


@cache
def published_caseops() -> CaseOpsTokenizer:
    return CaseOpsTokenizer(published([caseops.encode(text) for text in documents(60)], 420, OPERATORS))


TOKENIZERS = pytest.mark.parametrize("make", [ByteTokenizer, small_bpe, small_caseops], ids=["bytes", "bpe", "caseops"])
NORMALIZING = pytest.mark.parametrize("make", [published_bpe, published_caseops], ids=["bpe", "caseops"])
CAPITALS = st.text(
    st.sampled_from([*"aABhHzZ .1\0\t", *OPERATORS, *"ÉßKＡﬁⅧ", "\u0331", "\u030c", "\u0301", "\u200b", "😀"])
)


def shard_tokens(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Return BOS + tokens of each text, as in a shard."""
    parts = [np.insert(ids, 0, tokenizer.bos_id) for ids in tokenizer.encode_batch(texts)]
    return np.concatenate([np.zeros(0, np.uint16), *parts])


@TOKENIZERS
@settings(deadline=None, max_examples=300)
@given(text=TEXTS | CAPITALS | st.text(st.sampled_from("ab  ▁\n\r\t\0\x85\u2028\ufeff\ufffd<>")))
def test_every_text_decodes_to_itself_and_each_byte_counts_once(make: type[Tokenizer], text: str) -> None:
    tokenizer = make()
    assert tokenizer.keeps_text
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_table().count_document(ids, tokenizer.bos_id).sum() == len(text.encode())


def test_raw_bytes_are_their_values_after_four_controls() -> None:
    assert ByteTokenizer().encode("aé\n").tolist() == [byte + 4 for byte in "aé\n".encode()]


@NORMALIZING
@settings(deadline=None)
@given(text=TEXTS)
def test_a_normalizing_vocabulary_round_trips_normalized_text(make: type[Tokenizer], text: str) -> None:
    tokenizer = make()
    assert not tokenizer.keeps_text
    normalized = tokenizer.decode(tokenizer.encode(text))
    assert tokenizer.decode(tokenizer.encode(normalized)) == normalized


@settings(deadline=None, max_examples=300)
@given(TEXTS | CAPITALS)
def test_caseops_decodes_to_the_text_that_its_model_normalizes_to(text: str) -> None:
    """Text is normalized before CaseOps. Where one pass of the model's normalization is not enough, after two."""
    model = SentencePieceTokenizer(published_caseops().model_bytes)
    once = model.decode(model.encode(text))
    twice = model.decode(model.encode(once))
    assert published_caseops().decode(published_caseops().encode(text)) == twice
    assert model.normalize(once) == twice


@pytest.mark.parametrize("make", [*TOKENIZERS.args[1], *NORMALIZING.args[1]])
@settings(deadline=None)
@given(texts=st.lists(TEXTS | CAPITALS, max_size=5))
def test_the_byte_table_counts_utf8(make: type[Tokenizer], texts: list[str]) -> None:
    tokenizer = make()
    tokens = shard_tokens(tokenizer, texts)
    check = check_bytes(tokenizer, tokens)
    assert check.exact
    assert check.documents == len(texts)
    total = tokenizer.byte_table().count_document(tokens, tokenizer.bos_id).sum()
    assert total == check.table_bytes == check.text_bytes


@pytest.mark.parametrize("make", [small_bpe, published_bpe], ids=["keeps text", "normalizes"])
def test_the_byte_table_by_piece_type(make: Callable[[], SentencePieceTokenizer]) -> None:
    tokenizer = make()
    table = tokenizer.byte_table()
    ids = {piece: tokenizer._processor.piece_to_id(piece) for piece in ("▁", "<0xE2>", "e", "▁e", "é")}
    bos, e = tokenizer.bos_id, ids["e"]
    for control in range(4):  # pad, bos, eos, unk
        assert table.base_bytes[control] == 0
        assert table.is_boundary[control]
    assert table.base_bytes[ids["<0xE2>"]] == 1  # not the 6 bytes of its name
    assert table.base_bytes[ids["é"]] == 2
    previous, targets = np.array([bos, e, bos, e, e]), np.array([ids["▁"], ids["▁"], ids["▁e"], ids["▁e"], e])
    at_start = int(tokenizer.keeps_text)  # of a document, where a text that was normalized has no space
    assert table.count(previous, targets).tolist() == [at_start, 1, 1 + at_start, 2, 1]


def test_an_indentation_is_one_token_and_counts_its_spaces() -> None:
    tokenizer = train_sentencepiece(["def f():\n    return 1\n"] * 40, 290)
    (indentation,) = tokenizer.encode("    ").tolist()
    assert tokenizer.byte_table().base_bytes[indentation] == 4


def test_operators_count_no_bytes_unless_escaped() -> None:
    tokenizer = small_caseops()
    title, escape = (tokenizer._operators[operator] for operator in (TITLE, ESCAPE))
    a = int(tokenizer.encode("a")[0])
    table = tokenizer.byte_table()

    def count(*ids: int) -> list[int]:
        counts: list[int] = table.count_document(np.array(ids, np.uint16), tokenizer.bos_id).tolist()
        return counts

    assert count(title, a) == [0, 1]
    assert count(escape, title, title, a) == [0, 3, 0, 1]
    assert count(escape, escape, title, a) == [0, 3, 0, 1]
    assert count(escape, escape, escape, title) == [0, 3, 0, 3]
    assert count(a, escape, tokenizer.bos_id, title, escape) == [1, 0, 0, 0, 0]
    assert count(escape, a) == [0, 1]
    assert table.count(np.array([escape, a]), np.array([title, title])).tolist() == [3, 0]


@settings(deadline=None)
@given(st.lists(st.integers(4, 7) | st.sampled_from([300, 301, 302]), max_size=12))
def test_bytes_are_exact_for_every_sequence_of_operators(ids: list[int]) -> None:
    assert check_bytes(small_caseops(), np.array([1, *ids], np.uint16)).exact


def test_caseops_reserves_its_ids_and_is_recognized_by_them(tmp_path: Path) -> None:
    tokenizer = train_caseops([text.title() for text in documents(60)], 420, tmp_path / "a.model")
    assert tokenizer.digest == small_caseops().digest
    assert (tokenizer.kind, tokenizer.name, tokenizer.vocab_size) == ("caseops", "sp420_caseops", 420)
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model_bytes)
    assert [processor.id_to_piece(i) for i in range(9)] == ["<pad>", "<s>", "</s>", "<unk>", *OPERATORS, "<0x00>"]
    assert not any(set(processor.id_to_piece(i)) & set(OPERATORS) for i in range(8, 420))
    loaded = load_tokenizer(tmp_path / "a.model")
    assert isinstance(loaded, CaseOpsTokenizer)
    assert loaded.encode(f"NASA {TITLE}x").tolist()[:1] == [processor.piece_to_id(ALLCAPS)]
    (tmp_path / "b.model").write_bytes(small_bpe().model_bytes)
    assert isinstance(load_tokenizer(tmp_path / "b.model"), SentencePieceTokenizer)
    with pytest.raises(DataError, match="sp400 does not reserve ids 4 to 7"):
        CaseOpsTokenizer(small_bpe())


def test_training_is_deterministic_silent_and_atomic(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = train_sentencepiece(documents(60), 400, tmp_path / "a.model")
    assert first.digest == small_bpe().digest
    assert load_tokenizer(tmp_path / "a.model").digest == first.digest
    assert [path.name for path in tmp_path.iterdir()] == ["a.model"]
    assert capfd.readouterr() == ("", "")


def test_impossible_vocabularies_are_refused() -> None:
    for size in (0, 260, 65_537):
        with pytest.raises(ConfigError, match=f"vocabulary of {size:,}"):
            train_sentencepiece(documents(1), size)
    with pytest.raises(ConfigError, match="vocabulary of 261"):
        train_sentencepiece(documents(60), 261)
    with pytest.raises(DataError, match="not 4,000"):
        train_sentencepiece(["a few words only"], 4000)
    with pytest.raises(DataError, match="no text"):
        train_sentencepiece([" ", "\n"], 300)
    with pytest.raises(ConfigError, match=r"264 .* 265 to 65,536"):
        train_caseops(documents(1), 264)
