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
from birdie.data.caseops import ALLCAPS, ESCAPE, OPERATORS, TITLE
from birdie.data.shards import read_shard
from birdie.data.tokenizer import (
    ByteTokenizer,
    CaseOpsTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    _sample_lines,
    has_operators,
    load_tokenizer,
    train_caseops,
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


@cache
def small_caseops() -> CaseOpsTokenizer:
    return train_caseops([text.title() for text in words(60)], 420)


TOKENIZERS = pytest.mark.parametrize("make", [ByteTokenizer, small_bpe, small_caseops], ids=["bytes", "bpe", "caseops"])
CAPITALS = st.text(
    st.sampled_from([*"aABhHzZ .1\0\t", *OPERATORS, *"ÉßKＡﬁⅧ", "\u0331", "\u030c", "\u0301", "\u200b", "😀"])
)


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


@settings(deadline=None, max_examples=300)
@given(TEXTS | CAPITALS)
def test_caseops_gives_back_what_its_model_gives_back_without_it(text: str) -> None:
    """Normal forms are settled before capitals go; where the model's own takes two passes, after both."""
    model = SentencePieceTokenizer(small_caseops().model_bytes)
    passed = model.decode(model.encode(text))
    again = model.decode(model.encode(passed))
    assert small_caseops().decode(small_caseops().encode(text)) == again
    assert model.normalize(passed) == again


@TOKENIZERS
@settings(deadline=None)
@given(texts=st.lists(TEXTS | CAPITALS, max_size=5))
def test_the_byte_table_counts_utf8(make: type[Tokenizer], texts: list[str]) -> None:
    tokenizer = make()
    tokens = stream(tokenizer, texts)
    check = check_bytes(tokenizer, tokens)
    assert check.exact
    assert check.documents == len(texts)
    counted = tokenizer.byte_table().count_document(tokens, tokenizer.bos_id).sum()
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


def test_operators_stand_for_no_bytes_unless_escaped() -> None:
    tokenizer = small_caseops()
    title, escape = (tokenizer._operators[operator] for operator in (TITLE, ESCAPE))
    a = int(tokenizer.encode("a")[0])
    table = tokenizer.byte_table()

    def counted(*ids: int) -> list[int]:
        return table.count_document(np.array(ids, np.uint16), tokenizer.bos_id).tolist()

    assert counted(title, a) == [0, 1]
    assert counted(escape, title, title, a) == [0, 3, 0, 1]
    assert counted(escape, escape, title, a) == [0, 3, 0, 1]
    assert counted(escape, escape, escape, title) == [0, 3, 0, 3]
    assert counted(a, escape, tokenizer.bos_id, title, escape) == [1, 0, 0, 0, 0]
    assert counted(escape, a) == [0, 1]
    assert table.count(np.array([escape, a]), np.array([title, title])).tolist() == [3, 0]


@settings(deadline=None)
@given(st.lists(st.integers(4, 7) | st.sampled_from([300, 301, 302]), max_size=12))
def test_bytes_are_true_for_whatever_a_model_writes_with_operators(ids: list[int]) -> None:
    assert check_bytes(small_caseops(), np.array([1, *ids], np.uint16)).exact


def test_caseops_reserves_its_ids_and_is_known_by_them(tmp_path: Path) -> None:
    tokenizer = train_caseops([text.title() for text in words(60)], 420, tmp_path / "a.model")
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


def test_a_text_full_of_operators_does_not_make_a_caseops_model() -> None:
    """Pieces that were learned come after the bytes."""
    texts = [f"{text} {' '.join(OPERATORS)}" for text in words(60)]
    assert not has_operators(train_sentencepiece(texts, 420))


def test_one_piece_serves_a_word_in_every_case() -> None:
    lower, title, capitals = (small_caseops().encode(text).tolist() for text in ("stone", "Stone", "STONE"))
    assert title == [small_caseops()._operators[TITLE], *lower]
    assert capitals == [small_caseops()._operators[ALLCAPS], *lower]


def test_rows_beyond_the_vocabulary_are_unused() -> None:
    for tokenizer in (ByteTokenizer(), small_bpe(), small_caseops()):
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
    with pytest.raises(ConfigError, match=r"a vocabulary of 264 is not possible; choose 265 to 65,536"):
        train_caseops(words(1), 264)


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
