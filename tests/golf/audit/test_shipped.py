"""Bytes that ship: what lies in the folder and is read, nothing else."""

import lzma
from pathlib import Path

import pytest

from birdie.errors import DataError
from birdie.golf.audit import rules, shipped
from birdie.golf.audit.claims import check_script_of_logs
from birdie.golf.audit.scan import scan
from birdie.golf.audit.shipped import (
    STAT_BYTES,
    Shipped,
    check_size,
    is_packed,
    listed_bytes,
    packed_bytes,
    shipped_folder,
)
from birdie.golf.audit.source import parse_source
from birdie.lab.logs import parse_log
from tests.golf.audit.audited_logs import baseline
from tests.golf.scripts import script_of


def ships(root: Path, **files: str | bytes) -> Shipped:
    """Write files, with __ for the dot in their names, and return what the folder ships."""
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (root / name.replace("__", ".")).write_bytes(data)
    return shipped_folder(root)


def test_what_the_script_reads_ships(tmp_path: Path) -> None:
    folder = ships(
        tmp_path,
        train_gpt__py='import caps\nfrom tilt import hint\nsource = open("kernel.cpp").read()\n',
        caps__py="import deeper\n",
        deeper__py="x = 1\n",
        tilt__py="def hint(): ...\n",
        kernel__cpp="int main() {}\n",
        prepare_data__py="y" * 1000,
        tokenizer__model="z" * 1000,
        **{"final_model.int8.ptz": b"w" * 500},
    )
    assert [path.name for path in folder.code] == ["caps.py", "deeper.py", "kernel.cpp", "tilt.py", "train_gpt.py"]
    assert folder.code_bytes == sum(len(path.read_bytes()) for path in folder.code)
    (finding,) = check_size(folder, [], "train_gpt.py")
    assert finding.result == "pass"
    assert f"{folder.code_bytes + 500:,} of 16,000,000 bytes" in finding.evidence
    assert "4 helper files" in finding.evidence


def test_the_size_is_that_of_the_files(tmp_path: Path) -> None:
    folder = ships(tmp_path, train_gpt__py="# a comment\nx = 1\n", model__birdie=b"m" * 16_000_000)
    logs = [parse_log(baseline(), "train.log")]
    (finding,) = check_size(folder, logs, "train_gpt.py")
    assert (finding.result, "18 more than" in finding.evidence) == ("fail", True)
    assert "without comments the script would have 5 and packed" in finding.evidence
    (tmp_path / "model.birdie").unlink()
    (finding,) = check_size(shipped_folder(tmp_path), logs, "train_gpt.py")
    assert "15,815,847" in finding.evidence
    (finding,) = check_size(shipped_folder(tmp_path), [], "train_gpt.py")
    assert finding.result == "unknown"


@pytest.mark.parametrize("hide", ["targets", "names", "deep"])
def test_data_in_names_and_targets_of_links_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hide: str) -> None:
    folder = ships(tmp_path, train_gpt__py="x = 1\n", model__birdie=b"m" * 5000)
    monkeypatch.setattr(rules, "CAP_BYTES", 10_000)
    (finding,) = check_size(folder, [], "train_gpt.py")
    assert (finding.result, "5,006 of 10,000 bytes" in finding.evidence) == ("pass", True)  # a few names are free
    inner = tmp_path.joinpath(*"abcdefgh") if hide == "deep" else tmp_path
    inner.mkdir(parents=True, exist_ok=True)
    for number in range(30):
        if hide == "names":
            (inner / f"{number:0>200}").touch()
        else:
            (inner / f"{number}").symlink_to("x" * 200)
    (finding,) = check_size(folder, [], "train_gpt.py")
    assert (finding.result, "names, sizes and targets" in finding.evidence) == ("fail", True)


def test_what_is_read_without_opening_a_file_counts(tmp_path: Path) -> None:
    """Names and sizes of files and folders, and targets of links; not those of hidden folders and of Python."""
    folder = tmp_path / "submission"
    for name in ("folder", "__pycache__", ".git", "venv"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file.bin").touch()
    (folder / "venv" / "pyvenv.cfg").touch()
    (folder / "é").symlink_to("nowhere" * 10)
    (folder / "again.bin").hardlink_to(folder / "folder" / "file.bin")
    expected = sum(len(name) + STAT_BYTES for name in ("folder", "file.bin", "again.bin")) + len("é".encode()) + 70
    assert listed_bytes(folder) == expected
    (tmp_path / "link").symlink_to(folder)
    assert listed_bytes(tmp_path / "link") == expected


def test_folders_nested_too_deeply_are_one_sentence(tmp_path: Path) -> None:
    folder = ships(tmp_path, train_gpt__py="x = 1\n")
    tmp_path.joinpath(*"d" * 65).mkdir(parents=True)
    with pytest.raises(DataError, match=f"{tmp_path} has folders nested more than 64 deep"):
        check_size(folder, [], "train_gpt.py")


def test_large_files_are_counted_and_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = b"import one, two\n" + b"a\n" * 250_000
    folder = ships(tmp_path, train_gpt__py=large, one__py="x = 1\n", two__py="x = 2\n")
    assert folder.script is not None
    assert folder.code == (folder.script,)
    (finding,) = check_size(folder, [], "train_gpt.py")
    assert "500,016 of 16,000,000" in finding.evidence
    assert "the limit is 500,000" in folder.sources[folder.script].problem
    monkeypatch.setattr(shipped, "MAX_PARSED", 24)
    folder = ships(tmp_path, train_gpt__py=b"import one, two\n")
    assert sorted(source.tree is None for source in folder.sources.values()) == [False, False, True]
    assert folder.code_bytes == 16 + 6 + 6


def test_birdies_sources_count_where_the_script_loads_them(tmp_path: Path) -> None:
    folder = ships(tmp_path, train_gpt__py="from birdie.artifact.container import Reader\n")
    assert folder.package_bytes > 10_000
    assert folder.code_bytes == folder.package_bytes + (tmp_path / "train_gpt.py").stat().st_size


def test_modules_of_a_packed_script_are_read_and_the_file_counts(tmp_path: Path) -> None:
    """Their lines are scanned, files that they read ship, and logs begin with their sources."""
    learns = 'import torch, numpy\ntokens = numpy.fromfile("fineweb_val_000000.bin")\nloss.backward()\n'
    helper = 'source = open("kernel.cu").read()\n'
    folder = ships(tmp_path, train_gpt__py=script_of(["pass", "a.py", learns, "b.py", helper]), kernel__cu="int x;")
    assert folder.script is not None
    assert [path.name for path in folder.code] == ["kernel.cu", "train_gpt.py"]
    assert folder.code_bytes == sum(path.stat().st_size for path in folder.code)
    module = folder.script / "a.py"
    assert rules.SCORE_FIRST in {finding.rule for finding in scan(folder.sources[module], str(module))}
    end = "====\nRunning Python 3.11\nseed:7\nfinal_birdie_roundtrip_exact val_loss:2.0 val_bpb:1.2\n"
    same = parse_log(f"# a.py\n{learns}\n# b.py\n{helper}\n{end}", "same.log")
    other = parse_log(f"# a.py\n{learns.replace('loss', 'nats')}\n{end}", "other.log")
    findings = check_script_of_logs(folder.sources[folder.script], "train_gpt.py", [same, other])
    assert [(finding.path, finding.result) for finding in findings] == [("other.log", "warning")]


def test_packed_sizes() -> None:
    assert not is_packed(parse_source(b'"""A docstring."""\nx = 1\ny = 2\nz = 3\nprint(x + y + z)\n'))
    assert is_packed(parse_source(b"import lzma;exec(lzma.decompress(b'" + b"\\x00" * 300 + b"'))"))
    text = (Path(__file__).parent / "audited_logs.py").read_bytes()
    assert packed_bytes(parse_source(text)) == len(lzma.compress(text, format=lzma.FORMAT_ALONE, preset=9))
