"""Text sources: the same documents in the same order, and a held-out split that never changes."""

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from birdie.errors import ConfigError, DataError
from birdie.gpt.data.corpus import Corpus, Overlap, _parts, file_corpus, stdlib_corpus
from tests.deep_folders import deep_folder


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def both(corpus: Corpus) -> tuple[list[str], list[str]]:
    return list(corpus.train()), list(corpus.validation())


def test_the_standard_library_is_split_by_file_and_ordered() -> None:
    corpus = stdlib_corpus()
    train, held_out = ([file.key for file in files] for files in (corpus.train_files, corpus.validation_files))
    assert train == sorted(train)
    assert held_out == sorted(held_out)
    assert set(train).isdisjoint(held_out)
    assert 0.02 < len(held_out) / len(train + held_out) < 0.10
    assert "dataclasses.py" in train + held_out
    parts = {part for key in train + held_out for part in key.split("/")}
    assert parts.isdisjoint({"site-packages", "test", "tests", "idle_test", "__pycache__"})
    assert corpus == stdlib_corpus()


def test_documents_in_both_splits_are_counted_and_the_first_is_located(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "one", "b.jsonl": '{"text": "two"}\n\n{"text": "val"}\n', "c.txt": "val", "v.txt": "val"})
    overlap = file_corpus([tmp_path / "[abc]*"], validation=[tmp_path / "v.txt"], documents="file").overlap()
    assert overlap == Overlap(2, f"document 2 of {tmp_path / 'b.jsonl'}")
    overlap = file_corpus([tmp_path / "c.txt"], validation=[tmp_path / "v.txt"], documents="file").overlap()
    assert overlap == Overlap(1, str(tmp_path / "c.txt"))
    assert file_corpus([tmp_path / "a.txt"], validation=[tmp_path / "v.txt"]).overlap() == Overlap()


def test_a_split_by_document_keeps_copies_in_one_split(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "\n".join(f"line {i % 50}" for i in range(500))})
    corpus = file_corpus([tmp_path / "a.txt"], documents="line")
    train, held_out = both(corpus)
    assert set(train).isdisjoint(held_out)
    assert len(train) + len(held_out) == 500
    assert corpus.overlap() == Overlap()


def test_the_held_out_files_are_pinned(tmp_path: Path) -> None:
    """The split hashes file names with SHA-256, so these are held out on every machine and Python."""
    write(tmp_path, {f"{i:02}.txt": f"text {i}" for i in range(40)})
    corpus = file_corpus([tmp_path], validation_fraction=0.1)
    numbers = [6, 8, 18, 20, 27, 39]
    assert [file.key for file in corpus.validation_files] == [f"{i:02}.txt" for i in numbers]
    train, held_out = both(corpus)
    assert len(train) == 34
    assert held_out == [f"text {i}" for i in numbers]


def test_files_folders_and_globs_give_the_same_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"in/a.txt": "a", "in/sub/b.txt": "b", "in/.hidden": "no", "val.txt": "v"})
    monkeypatch.chdir(tmp_path)
    choices: list[list[str | Path]] = [
        ["in"],
        [tmp_path / "in"],
        ["in/**/*.txt"],
        ["in/a.txt", "in/sub/*"],
        ["in", "in"],
    ]
    for patterns in choices:
        assert both(file_corpus(patterns, validation=["val.txt"], documents="file")) == (["a", "b"], ["v"])


def test_folders_may_be_nested_deeper_than_python_recurses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with deep_folder(tmp_path / "deep") as folder:
        write(folder, {"a.txt": "A.\nB.\n"})
        assert both(file_corpus([folder])) == both(file_corpus([folder / "a.txt"]))

        def recursing(*_: object, **__: object) -> None:
            raise RecursionError

        monkeypatch.setattr("birdie.gpt.data.corpus.glob", recursing)  # that of some Pythons does
        with pytest.raises(DataError, match="nested too deeply"):
            file_corpus([f"{folder}/**/*.txt"])


@given(st.text(st.sampled_from("ab \n\r\t\u2028é"), max_size=300), st.integers(1, 150))
def test_the_parts_of_a_file_are_all_of_its_text(text: str, times: int) -> None:
    text = f"{text * times}end"
    parts = list(_parts(io.StringIO(text, newline="\n")))
    assert "".join(parts) == text
    assert not any(part.isspace() for part in parts)


NAMES = {
    "my notes.txt": "my-notes",
    "wiki.en.jsonl.gz": "wiki.en",
    "a_val_b/": "a-val-b",
    "texts/*.txt": "texts",
    "日本/": "日本",
}


@pytest.mark.parametrize(("pattern", "name"), NAMES.items(), ids=NAMES.values())
def test_a_corpus_has_the_name_of_its_text(tmp_path: Path, pattern: str, name: str) -> None:
    path = f"{pattern}a.txt" if pattern.endswith("/") else pattern.replace("*", "a")
    write(tmp_path, {path: "text"})
    assert file_corpus([tmp_path / pattern]).name == name


def test_several_files_have_the_name_of_their_folder_or_one_that_files_can_have(tmp_path: Path) -> None:
    paths = [
        write(tmp_path, {"in/a.txt": "text", "in/sub/b.txt": "text"}) / f"in/{name}" for name in ("a.txt", "sub/*")
    ]
    assert file_corpus(paths).name == "in"
    assert file_corpus(paths, name="mine").name == "mine"
    with pytest.raises(ConfigError, match=r"'a_val_/b' .* try 'a-val--b'"):
        file_corpus(paths, name="a_val_/b")


def test_a_document_is_a_file_a_line_or_a_json_line(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "one\r\n\n \ntwo\u2028still\n", "b.txt": "three\n", "c.jsonl": '{"text": "x\\ny"}\n\n'})
    val = [tmp_path / "b.txt"]

    def train(*names: str, **settings: str) -> list[str]:
        return list(file_corpus([tmp_path / n for n in names], validation=val, **settings).train())  # type: ignore[arg-type]

    assert train("a.txt", documents="line") == ["one", "two\u2028still"]
    assert train("a.txt", documents="part") == train("a.txt") == ["one\r\n", "\n \ntwo\u2028still\n"]
    assert train("a.txt", documents="file") == ["one\r\n\n \ntwo\u2028still\n"]
    assert train("a.txt", "c.jsonl", documents="line")[-1] == "x\ny"


@pytest.mark.parametrize(
    "line", ["{", "[]", '"text"', "{}", '{"text": 3}', '{"text": null}', '{"text": "\\ud800"}', "[" * 100_000]
)
def test_malformed_json_lines_are_located(tmp_path: Path, line: str) -> None:
    write(tmp_path, {"a.jsonl": json.dumps({"text": "ok"}) + "\n" + line})
    with pytest.raises(DataError, match=r"a.jsonl, line 2"):
        both(file_corpus([tmp_path / "a.jsonl"]))


TEXTS = "".join(json.dumps({"text": f"document {number} é"}) + "\n" for number in range(30))
COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_compressed_text_is_read_as_what_it_holds(tmp_path: Path, suffix: str, name: str) -> None:
    data = COMPRESS[suffix](TEXTS.encode())
    plain = both(file_corpus([write(tmp_path / "plain", {name: TEXTS}) / name]))
    assert both(file_corpus([write(tmp_path / "packed", {f"{name}.{suffix}": data}) / f"{name}.{suffix}"])) == plain
    assert both(file_corpus([write(tmp_path / "other", {name: data}) / name])) == plain, "by content, whatever its name"


@pytest.mark.parametrize("suffix", COMPRESS)
def test_damaged_compressed_text_is_one_sentence(tmp_path: Path, suffix: str) -> None:
    data = COMPRESS[suffix](TEXTS.encode())
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 0xFF
    for content in (data[: len(data) // 2], bytes(damaged)):
        path = write(tmp_path, {"a.txt": content}) / "a.txt"
        with pytest.raises(DataError, match=r"a\.txt") as error:
            both(file_corpus([path]))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"\x28\xb5\x2f\xfd" + bytes(range(1, 99)), "zstd"),
        (b"PK\x03\x04" + bytes(range(1, 99)), "zip archive"),
        (b"PAR1" + bytes(99), "Parquet"),
        ("text é".encode("utf-16"), "UTF-16"),
        (b"\xfe\xff" + "text é".encode("utf-16-be"), "UTF-16"),
        ("plain text".encode("utf-16-le"), "UTF-16"),
        (b"\x7fELF" + bytes(99), "binary"),
    ],
)
def test_what_is_no_text_is_refused_by_its_kind(tmp_path: Path, content: bytes, kind: str) -> None:
    path = write(tmp_path, {"a.txt": content}) / "a.txt"
    with pytest.raises(DataError, match=rf"a\.txt is .*{kind}"):
        both(file_corpus([path]))


def test_text_that_is_not_utf8_is_located(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"caf\xe9 \xff"})
    with pytest.raises(DataError, match=r"a.txt is not UTF-8"):
        list(file_corpus([tmp_path / "a.txt"]).train())


def test_empty_corpora_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": " \n", "b.txt": "one line"})
    with pytest.raises(DataError, match="matches no file"):
        file_corpus([tmp_path / "*.md"])
    with pytest.raises(DataError, match="matches no file"):
        file_corpus([write(tmp_path / "empty", {".hidden": ""})])
    with pytest.raises(DataError, match="no training documents"):
        both(file_corpus([tmp_path / "a.txt"]))
    with pytest.raises(DataError, match=r"no validation documents.*--validation.*--documents line"):
        both(file_corpus([tmp_path / "b.txt"], validation_fraction=1e-9))
