"""Preparation: a corpus becomes the challenge's folder layout, atomically, and its totals are exact."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from birdie.errors import ConfigError, DataError, OutputError
from birdie.gpt.data import preparation as prepare_module
from birdie.gpt.data.byte_accounting import ByteCheck, split_documents
from birdie.gpt.data.byte_sidecar import read_sidecar
from birdie.gpt.data.caseops import OPERATORS
from birdie.gpt.data.corpus import Corpus, file_corpus
from birdie.gpt.data.dataset import check_tokenizer, open_dataset
from birdie.gpt.data.preparation import PreparedDataset, PrepareProgress, prepare
from birdie.gpt.data.tokenizer import load_tokenizer
from tests.gpt.data.random_text import random_lines


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """300 lines of random words, about 1 in 10 held out."""
    text = tmp_path / "text.txt"
    text.write_text(random_lines(300), encoding="utf-8")
    return file_corpus([text], validation_fraction=0.1)


def run(*args: object, **settings: object) -> PreparedDataset:
    last = list(prepare(*args, **settings))[-1]  # type: ignore[arg-type]
    assert isinstance(last, PreparedDataset)
    return last


def files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_folders_and_files_have_the_name_of_the_text(corpus: Corpus, tmp_path: Path) -> None:
    root = tmp_path / "data"
    prepared = run(corpus, 400, root, shard_tokens=12_000)
    assert set(files(root)) == {
        "datasets/text_sp400/dataset.json",
        "datasets/text_sp400/text_train_000000.bin",
        "datasets/text_sp400/text_train_000001.bin",
        "datasets/text_sp400/text_val_000000.bin",
        "tokenizers/text_sp400.model",
    }
    data, tokenizer = open_dataset(prepared.folder), load_tokenizer(prepared.tokenizer)
    assert data.info == prepared.info
    assert check_tokenizer(data, tokenizer) == []
    assert data.val_tokens == prepared.info.val.tokens == prepared.check.tokens


@pytest.mark.parametrize("tokenizer", [400, "bytes"])
def test_shards_are_bos_and_text_and_totals_are_exact(corpus: Corpus, tmp_path: Path, tokenizer: int | str) -> None:
    prepared = run(corpus, tokenizer, tmp_path / "data")
    held_out = list(corpus.validation())
    tokens = open_dataset(prepared.folder).validation_tokens()
    encoder = load_tokenizer(prepared.tokenizer)
    assert np.array_equal(tokens, np.concatenate([[1, *encoder.encode(text)] for text in held_out]))
    assert [encoder.decode(document) for document in split_documents(tokens, 1)] == held_out
    size = sum(len(text.encode()) for text in held_out)
    val = prepared.info.val
    assert (val.documents, val.tokens, val.bytes, val.source_bytes) == (len(held_out), len(tokens), size, size)
    assert prepared.check == ByteCheck(len(held_out), len(tokens), size, size)


@pytest.mark.parametrize("caseops", [False, True])
def test_the_same_corpus_gives_the_same_bytes(corpus: Corpus, tmp_path: Path, caseops: bool) -> None:
    run(corpus, 400, tmp_path / "a", threads=1, caseops=caseops)
    run(corpus, 400, tmp_path / "b", threads=3, caseops=caseops)
    assert files(tmp_path / "a") == files(tmp_path / "b")


@pytest.fixture
def capitals(tmp_path: Path) -> Corpus:
    """Documents with capitals of every kind, extra spaces, and the operators themselves."""
    draw = random.Random(1)
    kinds = [
        str.lower,
        str.title,
        str.upper,
        str.swapcase,
        lambda word: f"mac{word.title()}",
        lambda word: f"  {word} ",
    ]
    lexicon = ["".join(draw.choices("abcdeéstnrl", k=draw.randint(1, 8))) for _ in range(200)] + list(OPERATORS)
    text = tmp_path / "capitals.txt"
    lines = (" ".join(draw.choice(kinds)(word) for word in draw.choices(lexicon, k=30)) for _ in range(300))
    text.write_text("\n".join(lines), encoding="utf-8")
    return file_corpus([text], validation_fraction=0.2)


def test_caseops_data_have_sidecars(capitals: Corpus, tmp_path: Path) -> None:
    root = tmp_path / "data"
    prepared = run(capitals, 400, root, caseops=True, shard_tokens=5_000)
    assert {name for name in files(root) if "train" not in name} == {
        "datasets/capitals_sp400_caseops/dataset.json",
        "datasets/capitals_sp400_caseops/capitals_val_000000.bin",
        "datasets/capitals_sp400_caseops/capitals_val_000001.bin",
        "datasets/capitals_sp400_caseops/capitals_val_bytes_000000.bin",
        "datasets/capitals_sp400_caseops/capitals_val_bytes_000001.bin",
        "tokenizers/capitals_sp400_caseops.model",
    }
    data, tokenizer = open_dataset(prepared.folder), load_tokenizer(prepared.tokenizer)
    assert data.info == prepared.info
    assert (prepared.info.tokenizer_kind, tokenizer.name) == ("caseops", "sp400_caseops")
    assert check_tokenizer(data, tokenizer) == []
    assert len(data.val) == 2
    run(capitals, 400, root, caseops=True)  # an earlier result is replaced, including its sidecars
    assert len(list(prepared.folder.glob("*_val_*"))) == 2


def test_the_sidecar_sums_to_the_text_and_documents_begin_with_bos(capitals: Corpus, tmp_path: Path) -> None:
    prepared = run(capitals, 400, tmp_path / "data", caseops=True, shard_tokens=3_000)
    held_out = list(capitals.validation())
    data, tokenizer = open_dataset(prepared.folder), load_tokenizer(prepared.tokenizer)
    tokens, counts = data.validation_tokens(), np.concatenate([read_sidecar(path) for path in data.val])
    assert np.array_equal(tokens, np.concatenate([[1, *tokenizer.encode(text)] for text in held_out]))
    assert [tokenizer.decode(document) for document in split_documents(tokens, 1)] == held_out
    starts = np.flatnonzero(tokens == 1)
    assert np.add.reduceat(counts, starts).tolist() == [len(text.encode()) for text in held_out]
    assert not counts[starts].any()
    assert counts.sum() == prepared.info.val.bytes == prepared.check.text_bytes
    assert prepared.check.exact


@pytest.mark.parametrize("plain", ["bytes", 400])
def test_caseops_with_a_tokenizer_without_operators_is_refused(
    corpus: Corpus, tmp_path: Path, plain: str | int
) -> None:
    model = run(corpus, plain, tmp_path / "a").tokenizer
    with pytest.raises(ConfigError, match="CaseOps needs a tokenizer"):
        run(corpus, model, tmp_path / "b", caseops=True)
    assert files(tmp_path / "b") == {}


def test_a_document_in_both_splits_is_refused_and_located(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(f'{{"text": "text {i % 7}"}}\n' for i in range(20)))
    (tmp_path / "val.jsonl").write_text('{"text": "text 8"}\n{"text": "text 2"}\n{"text": "text 8"}\n')
    corpus = file_corpus([tmp_path / "train.jsonl"], validation=[tmp_path / "val.jsonl"])
    with pytest.raises(DataError, match=r"^3 training document\(s\) .* document 3 of .*train.jsonl;"):
        run(corpus, "bytes", tmp_path / "data")
    assert files(tmp_path / "data") == {}


def test_copies_of_held_out_files_are_excluded_if_birdie_chose_the_split(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text("one text in many files" if i % 2 else f"a text in one file: {i}")
    corpus = file_corpus([tmp_path / "*.txt"])
    prepared = run(corpus, "bytes", tmp_path / "data")
    assert prepared.excluded > 0
    assert prepared.info.train.documents + prepared.info.val.documents + prepared.excluded == 30
    assert not set(corpus.train()) & set(corpus.validation())


def test_an_interrupted_run_leaves_nothing(corpus: Corpus, tmp_path: Path) -> None:
    running = prepare(corpus, "bytes", tmp_path / "data")
    assert isinstance(next(running), PrepareProgress)
    running.close()  # type: ignore[attr-defined]
    assert files(tmp_path / "data") == {}


def test_an_earlier_result_is_replaced_as_a_unit(corpus: Corpus, tmp_path: Path) -> None:
    root = tmp_path / "data"
    run(corpus, 400, root, shard_tokens=3_000)
    run(corpus, 400, root)
    assert len(open_dataset(root / "datasets/text_sp400").train) == 1
    assert not list(root.rglob(".*"))


def test_data_of_another_source_are_not_replaced(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "text.txt").write_text(random_lines(300), encoding="utf-8")
    other = file_corpus([tmp_path / "other" / "text.txt"])
    root = tmp_path / "data"
    prepared = run(corpus, "bytes", root)
    with pytest.raises(OutputError, match="text_byte260 was prepared from another source"):
        run(other, "bytes", root)
    assert open_dataset(prepared.folder).info == prepared.info
    assert run(replace(other, name="other"), "bytes", root).folder != prepared.folder


@pytest.mark.parametrize("name", ["text_train_000000.bin", "notes.txt"])
def test_other_data_are_never_replaced(corpus: Corpus, tmp_path: Path, name: str) -> None:
    other = tmp_path / "data/datasets/text_byte260" / name
    other.parent.mkdir(parents=True)
    other.write_text("mine")
    with pytest.raises(OutputError, match="has files that birdie did not prepare"):
        run(corpus, "bytes", tmp_path / "data")
    assert files(tmp_path / "data") == {f"datasets/text_byte260/{name}": b"mine"}


def test_a_byte_table_that_is_wrong_for_the_text_stops_the_run(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "check_bytes", lambda *_: ByteCheck(1, 9, 1020, 1000))
    with pytest.raises(DataError, match=r"byte260 counts 1,020 bytes .* 1,000"):
        run(corpus, "bytes", tmp_path / "data")
    assert files(tmp_path / "data") == {}
