"""Preparing: a corpus becomes the challenge's folders, whole or not at all, and its totals are true."""

import random
from pathlib import Path

import numpy as np
import pytest

from birdie.data import prepare as preparing
from birdie.data.byte_accounting import ByteCheck
from birdie.data.corpus import Corpus, file_corpus
from birdie.data.dataset import check_tokenizer, open_dataset
from birdie.data.prepare import Prepared, Progress, prepare
from birdie.data.tokenizer import load_tokenizer
from birdie.errors import DataError, OutputError


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """300 lines of made-up words, about 1 in 10 held out."""
    draw = random.Random(0)
    lexicon = ["".join(draw.choices("abcdeéstnrl", k=draw.randint(1, 8))) for _ in range(300)]
    text = tmp_path / "text.txt"
    text.write_text("\n".join(" ".join(draw.choices(lexicon, k=30)) for _ in range(300)), encoding="utf-8")
    return file_corpus([text], validation_fraction=0.1)


def run(*args: object, **settings: object) -> Prepared:
    last = list(prepare(*args, **settings))[-1]  # type: ignore[arg-type]
    assert isinstance(last, Prepared)
    return last


def files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_the_layout_is_the_challenges(corpus: Corpus, tmp_path: Path) -> None:
    root = tmp_path / "data"
    prepared = run(corpus, 400, root, shard_tokens=12_000)
    assert set(files(root)) == {
        "datasets/fineweb10B_sp400/dataset.json",
        "datasets/fineweb10B_sp400/fineweb_train_000000.bin",
        "datasets/fineweb10B_sp400/fineweb_train_000001.bin",
        "datasets/fineweb10B_sp400/fineweb_val_000000.bin",
        "tokenizers/fineweb_400_bpe.model",
    }
    data, tokenizer = open_dataset(prepared.folder), load_tokenizer(prepared.tokenizer)
    assert data.info == prepared.info
    assert check_tokenizer(data, tokenizer) == []
    assert data.val_tokens == prepared.info.val.tokens == prepared.check.tokens


@pytest.mark.parametrize("tokenizer", [400, "bytes"])
def test_shards_hold_bos_and_the_text_and_totals_are_true(corpus: Corpus, tmp_path: Path, tokenizer: int | str) -> None:
    prepared = run(corpus, tokenizer, tmp_path / "data")
    held_out = list(corpus.validation())
    tokens = open_dataset(prepared.folder).validation_tokens()
    encoder = load_tokenizer(prepared.tokenizer)
    assert np.array_equal(tokens, np.concatenate([[1, *encoder.encode(text)] for text in held_out]))
    size = sum(len(text.encode()) for text in held_out)  # these texts are in normal form already
    val = prepared.info.val
    assert (val.documents, val.tokens, val.bytes, val.source_bytes) == (len(held_out), len(tokens), size, size)
    assert prepared.check == ByteCheck(len(held_out), len(tokens), size, size, 0)


def test_the_same_corpus_gives_the_same_bytes(corpus: Corpus, tmp_path: Path) -> None:
    run(corpus, 400, tmp_path / "a", threads=1)
    run(corpus, 400, tmp_path / "b", threads=3)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_progress_is_reported(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "_BATCH_BYTES", 10_000)
    *progress, prepared = prepare(corpus, 400, tmp_path / "data")
    assert isinstance(prepared, Prepared)
    records = [record for record in progress if isinstance(record, Progress)]
    assert list(dict.fromkeys(record.stage for record in records)) == ["vocabulary", "train", "val", "check"]
    train = [record for record in records if record.stage == "train"]
    assert len(train) > 2
    last, totals = train[-1], prepared.info.train
    assert (last.documents, last.tokens, last.bytes) == (totals.documents, totals.tokens, totals.bytes)


def test_a_given_tokenizer_is_copied_beside(corpus: Corpus, tmp_path: Path) -> None:
    model = Path(run(corpus, 400, tmp_path / "a").tokenizer)
    prepared = run(corpus, model, tmp_path / "b")
    assert Path(prepared.tokenizer).read_bytes() == model.read_bytes()
    run(corpus, prepared.tokenizer, tmp_path / "b")  # again, with its own


def test_an_interrupted_run_leaves_nothing(corpus: Corpus, tmp_path: Path) -> None:
    running = prepare(corpus, "bytes", tmp_path / "data")
    assert isinstance(next(running), Progress)
    running.close()  # type: ignore[attr-defined]
    assert files(tmp_path / "data") == {}


def test_an_earlier_result_is_replaced_whole(corpus: Corpus, tmp_path: Path) -> None:
    root = tmp_path / "data"
    run(corpus, 400, root, shard_tokens=3_000)
    run(corpus, 400, root)
    assert len(open_dataset(root / "datasets/fineweb10B_sp400").train) == 1
    assert not list(root.rglob(".*"))


@pytest.mark.parametrize("name", ["fineweb_train_000000.bin", "notes.txt"])
def test_foreign_data_is_never_replaced(corpus: Corpus, tmp_path: Path, name: str) -> None:
    foreign = tmp_path / "data/datasets/fineweb10B_byte260" / name
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine")
    with pytest.raises(OutputError, match="holds files that birdie did not prepare"):
        run(corpus, "bytes", tmp_path / "data")
    assert files(tmp_path / "data") == {f"datasets/fineweb10B_byte260/{name}": b"mine"}


def test_another_tokenizer_of_the_same_name_is_never_replaced(corpus: Corpus, tmp_path: Path) -> None:
    model = tmp_path / "data/tokenizers/fineweb_400_bpe.model"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"another")
    with pytest.raises(OutputError, match="is another tokenizer"):
        run(corpus, 400, tmp_path / "data")
    assert model.read_bytes() == b"another"


def test_a_byte_table_that_is_wrong_for_the_text_stops_the_run(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "check_bytes", lambda *_: ByteCheck(1, 9, 1020, 1000, 1))
    with pytest.raises(DataError, match="byte260 counts 1,020 bytes of validation text, which has 1,000"):
        run(corpus, "bytes", tmp_path / "data")
    assert files(tmp_path / "data") == {}


def test_an_unusable_root_is_refused_before_any_work(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write into"):
        next(iter(prepare(corpus, "bytes", tmp_path / "file")))


def test_no_held_out_documents_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one line")
    with pytest.raises(DataError, match="no validation documents"):
        run(file_corpus([tmp_path / "a.txt"], validation_fraction=1e-9), "bytes", tmp_path / "data")
