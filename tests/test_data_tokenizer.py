"""Tokenizers and their byte accounting: text comes back, and the byte table counts its true UTF-8 length.

The table is held against decoded text on random Unicode, for raw bytes and for a BPE vocabulary trained here, and on
the challenge's own shards.
"""

import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.data.byte_accounting import check_bytes, split_documents
from birdie.data.shards import read_shard
from birdie.data.tokenizer import (
    ByteTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    _sample_lines,
    load_tokenizer,
    train_sentencepiece,
)
from birdie.errors import ConfigError, DataError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def words(count: int, seed: int = 0) -> list[str]:
    """Documents of made-up words, with digits, accents and punctuation."""
    draw = random.Random(seed)
    lexicon = ["".join(draw.choices("abcdeéiou stnrl", k=draw.randint(1, 8))) for _ in range(400)]
    lines = [" ".join(draw.choices(lexicon, k=9)) + f", {draw.random()}." for _ in range(9 * count)]
    return ["\n".join(lines[9 * i : 9 * i + 9]) for i in range(count)]


@cache
def small_bpe() -> SentencePieceTokenizer:
    return train_sentencepiece(words(60), 400)


TOKENIZERS = pytest.mark.parametrize("make", [ByteTokenizer, small_bpe], ids=["bytes", "bpe"])


def stream(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """BOS + tokens for each text, as in a shard."""
    documents = [np.insert(ids, 0, tokenizer.bos_id) for ids in tokenizer.encode_batch(texts)]
    return np.concatenate([np.zeros(0, np.uint16), *documents])


@settings(deadline=None)
@given(TEXTS)
def test_bytes_give_any_text_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert tokenizer.decode(ids) == text
    assert list(ids) == [byte + 4 for byte in text.encode()]


@settings(deadline=None)
@given(TEXTS)
def test_bpe_gives_normalised_text_back(text: str) -> None:
    normalised = small_bpe().decode(small_bpe().encode(text))
    assert small_bpe().decode(small_bpe().encode(normalised)) == normalised


@TOKENIZERS
@settings(deadline=None)
@given(texts=st.lists(TEXTS, max_size=5))
def test_the_byte_table_counts_utf8(make: type[Tokenizer], texts: list[str]) -> None:
    tokenizer = make()
    tokens = stream(tokenizer, texts)
    check = check_bytes(tokenizer, tokens)
    assert check.exact
    assert check.documents == len(texts)
    counted = tokenizer.byte_table().count(tokens[:-1], tokens[1:]).sum() if texts else 0
    assert counted == check.table_bytes == check.text_bytes


@TOKENIZERS
def test_batches_encode_as_single_texts_do(make: type[Tokenizer]) -> None:
    texts = ["", "one two", "é\u2581ü 😀", *words(3)]
    for alone, batched in zip(map(make().encode, texts), make().encode_batch(texts, threads=2), strict=True):
        assert np.array_equal(alone, batched)
        assert batched.dtype == np.uint16


def test_the_table_by_piece_type() -> None:
    tokenizer = small_bpe()
    table = tokenizer.byte_table()
    ids = {piece: tokenizer._processor.piece_to_id(piece) for piece in ("▁", "<0xE2>", "e", "▁e", "é")}
    bos, e = tokenizer.bos_id, ids["e"]
    for control in range(4):  # pad, bos, eos, unk
        assert table.base_bytes[control] == 0
        assert table.is_boundary[control]
    assert table.base_bytes[ids["<0xE2>"]] == 1  # not the 6 bytes of its name
    assert table.base_bytes[ids["▁"]] == 0  # its one byte is the leading space
    assert table.base_bytes[ids["é"]] == 2
    previous, targets = np.array([bos, e, bos, e, e]), np.array([ids["▁"], ids["▁"], ids["▁e"], ids["▁e"], e])
    assert table.count(previous, targets).tolist() == [0, 1, 1, 2, 1]


def test_rows_beyond_the_vocabulary_are_unused() -> None:
    for tokenizer in (ByteTokenizer(), small_bpe()):
        table = tokenizer.byte_table(512)
        assert len(table) == 512
        assert not table.base_bytes[tokenizer.vocab_size :].any()
        assert table.is_boundary[tokenizer.vocab_size :].all()
        assert len(tokenizer.byte_table(8)) == tokenizer.vocab_size


def test_a_vocabulary_without_a_lone_space_is_refused() -> None:
    with pytest.raises(DataError, match="no piece for a lone space"):
        train_sentencepiece(["abcdefgh" * 9, "abab", "efef", "ghab"] * 9, 270).byte_table()


def test_documents_are_split_at_bos() -> None:
    def split(*ids: int) -> list[list[int]]:
        return [part.tolist() for part in split_documents(np.array(ids, np.uint16), 1)]

    assert split() == []
    assert split(1, 5, 6, 1, 1, 7) == [[5, 6], [], [7]]
    assert split(5, 1, 6) == [[5], [6]]
    assert split(5, 6) == [[5, 6]]


def test_a_wrong_table_is_noticed() -> None:
    class Literal6(ByteTokenizer):
        def byte_table(self, vocab_size: int | None = None):  # type: ignore[no-untyped-def]
            table = super().byte_table(vocab_size)
            table.base_bytes[4:] = 6
            return table

    check = check_bytes(Literal6(), np.array([1, 70, 71, 1, 72], np.uint16))
    assert (check.documents, check.mismatched, check.table_bytes, check.text_bytes) == (2, 2, 18, 3)


@TOKENIZERS
def test_control_ids_decode_to_nothing_and_foreign_ids_are_refused(make: type[Tokenizer]) -> None:
    tokenizer = make()
    assert tokenizer.decode([1, *tokenizer.encode("a"), 2, 0]) == "a"
    assert tokenizer.decode([]) == ""
    with pytest.raises(DataError, match="use the tokenizer the tokens were made with"):
        tokenizer.decode([tokenizer.vocab_size])
    with pytest.raises(DataError, match="outside the vocabulary"):
        tokenizer.byte_table().count(np.array([1]), np.array([9999]))
    with pytest.raises(DataError, match=r"lone surrogate \(U\+D800\) at character 1"):
        tokenizer.encode("a\ud800")


def test_training_is_repeatable_quiet_and_atomic(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = train_sentencepiece(words(60), 400, tmp_path / "a.model")
    assert first.digest == small_bpe().digest
    assert load_tokenizer(tmp_path / "a.model").digest == first.digest
    assert [path.name for path in tmp_path.iterdir()] == ["a.model"]
    assert capfd.readouterr() == ("", "")


def test_training_uses_the_challenges_settings() -> None:
    processor = sentencepiece.SentencePieceProcessor(model_proto=small_bpe().model_bytes)
    assert [processor.id_to_piece(i) for i in range(5)] == ["<pad>", "<s>", "</s>", "<unk>", "<0x00>"]
    assert processor.encode("12", out_type=str) == ["1", "2"]  # split digits
    assert processor.encode("ﬁ", out_type=str)[0] in ("fi", "f", "<0x66>")  # NFKC
    assert not processor.encode("e", out_type=str)[0].startswith("▁")  # no dummy prefix


def test_impossible_vocabularies_are_refused() -> None:
    for size in (0, 260, 65_537):
        with pytest.raises(ConfigError, match=f"a vocabulary of {size:,} is not possible"):
            train_sentencepiece(words(1), size)
    with pytest.raises(ConfigError, match="does not fit this text"):
        train_sentencepiece(words(60), 261)
    with pytest.raises(DataError, match=r"pieces only, not 4,000; give more text"):
        train_sentencepiece(["a few words only"], 4000)
    with pytest.raises(DataError, match="no text"):
        train_sentencepiece([" ", "\n"], 300)


def test_a_sample_of_lines_is_even_and_bounded() -> None:
    lines = [f"line {i:05}" for i in range(4000)]
    sample = _sample_lines(["\n".join(lines[:1000]), *lines[1000:], " \n\0"], 10_000)
    assert 4_000 < sum(map(len, sample)) <= 10_000
    assert sample == sorted(sample)
    assert 0.4 < sum(line < "line 02000" for line in sample) / len(sample) < 0.6
    assert _sample_lines(lines, 10**6) == lines


def test_missing_and_damaged_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        load_tokenizer(tmp_path / "none.model")
    for size in (0, 10, len(small_bpe().model_bytes) - 3):
        (tmp_path / "cut.model").write_bytes(small_bpe().model_bytes[:size])
        with pytest.raises(DataError, match=r"cut.model is (empty|not a SentencePiece model)"):
            load_tokenizer(tmp_path / "cut.model")


def test_names() -> None:
    assert (load_tokenizer("bytes").name, load_tokenizer("byte260").vocab_size) == ("byte260", 260)
    assert (small_bpe().name, small_bpe().vocab_size, small_bpe().kind) == ("sp400", 400, "sentencepiece")


def test_byte_accounting_of_the_challenges_shards(shared_data: Path) -> None:
    tokenizer = load_tokenizer(shared_data / "tokenizers/fineweb_1024_bpe.model")
    tokens = read_shard(shared_data / "text/fineweb/fineweb_val_head_sp1024.bin")
    whole = tokens[: np.flatnonzero(tokens == 1)[-1]]  # the last document is cut within a character
    check = check_bytes(tokenizer, whole)
    assert check.exact
    assert check.documents == 233
    assert 2.43 < check.table_bytes / check.tokens < 2.45
    assert check_bytes(tokenizer, tokens).mismatched == 1
