"""One law for all benchmarks: each runs at its smallest, its rows are what it says, and --json equals the table."""

import argparse
import importlib
import json
import pkgutil
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks
from benchmarks import codec, command, processes, scale
from birdie.errors import ConfigError
from tests.forked import run_python
from tests.nightly import mostly_nightly

SHARED = {  # modules without a command of their own
    *(
        "command",
        "crowd_torch",
        "curves",
        "divergence",
        "gpu_checks",
        "lossy_rivals",
        "networks",
        "on_device",
        "packages",
        "processes",
    ),
    *("record_stack", "rival_worker", "rivals", "shrunken", "subjects", "symbols"),
}
CASES: dict[str, tuple[list[str], set[str]]] = {  # smallest arguments, some of the columns
    "coders": (["--seconds", "0", "--rows", "16"], {"array", "coder", "bytes", "decode M/s", "exact"}),
    "codec": (
        ["--weights", "FOLDER/x.pt", "--codecs", "max,fast,save-zlib,zpaq"],
        {"codec", "bytes", "exact", "version"},
    ),
    "rate_distortion": (
        ["--subjects", "tiny", "--rivals", "int6,int8,challenge", "--no-birdie", "--runs", "FOLDER"],
        {"network", "curve", "bytes", "kl", "agreement"},
    ),
    "schemes": (["--subject", "normal", "--side", "32", "--schemes", "int4"], {"scheme", "bytes", "gap", "grid_error"}),
    "web": (["--rows", "64", "--seconds", "0"], {"scheme", "coder", "bytes", "WebAssembly M/s", "exact"}),
    "train": (["--small", "--seconds", "0", "--device", "cpu"], {"loop", "tokens_per_s", "ratio", "loss"}),
}
LONG: dict[str, tuple[list[str], set[str]]] = {
    "ablation": (["--only", "smear, fixed", "--seeds", "1", "--steps", "2", "--folder", "FOLDER"], {"change", "steps"}),
    "contest": (["baseline:smoke", "10l_mixed_precision:smoke", "--folder", "FOLDER"], {"recipe", "bytes", "less"}),
    "deltas": (["--subject", "tiny", "--steps", "1", "--runs", "FOLDER"], {"pair", "way", "bytes", "exact"}),
    "dry_run": (["--subjects", "tiny"], {"network", "setting", "bytes", "off_%", "error", "error_ratio"}),
    "estimate": (["--part", "memory"], {"run", "recorded_MB", "estimate_MB", "error_%"}),
    "lazy": (["--layers", "5", "--width", "32", "--cache", "FOLDER"], {"way", "peak_mb", "of_eager", "exact"}),
    "lossy_deltas": (
        ["--subject", "tiny", "--steps", "2", "--budgets", "3000", "--runs", "FOLDER"],
        {"way", "bytes", "kl", "agreement"},
    ),
    "offload": (
        ["--depths", "2", "--width", "64", "--tokens", "256", "--batches", "2"],
        {"method", "peak_mb", "fisher"},
    ),
    "optimizer": (
        ["--seconds", "0", "--ranks", "1", "--layers", "1", "--dim", "32", "--device", "cpu"],
        {"step", "ranks", "median_ms", "ratio", "difference"},
    ),
    "page": (["--small", "--seconds", "0"], {"page bytes", "decode M/s", "tokens/s", "Python tokens/s"}),
    "scale": (["--weights", "1M"], {"method", "weights", "bits", "error"}),
    "scoring": (["--question", "kv", "--tokens", "128", "--context", "64"], {"row", "bpb", "saved", "cache bytes"}),
    "size_search": (
        ["--networks", "gru", "--steps", "1", "--samples", "64", "--ratio", "1.3"],
        {"network", "files", "bytes", "exhaustive", "holding"},
    ),
    "spectral_tune": (
        ["--subject", "tiny", "--smaller", "6", "--steps", "2", "--rows", "spectral", "--runs", "FOLDER"],
        {"seed", "scheme", "bytes", "smaller", "kl"},
    ),
    "without_data": (
        ["--subjects", "tiny", "--budgets", "2", "--runs", "FOLDER"],
        {"network", "scheme", "bytes", "error"},
    ),
}
OTHERS = {"architectures", "bench_model", "gpu"}  # in their own tests
FETCHED = {"crowd", "onnx_sizes"}  # takes networks that `make crowd` fetches


def test_every_benchmark_has_a_case() -> None:
    modules = {module.name for module in pkgutil.iter_modules(benchmarks.__path__)}
    assert modules == SHARED | OTHERS | FETCHED | CASES.keys() | LONG.keys()


@pytest.mark.parametrize("name", mostly_nightly(CASES | LONG, ("codec", "schemes")))
def test_it_runs_at_its_smallest_and_its_rows_are_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in ("page", "web") and shutil.which("node") is None:
        pytest.skip("node is not installed")
    rows = _rows(name, tmp_path, monkeypatch, capsys)
    columns = (CASES | LONG)[name][1]
    assert rows
    assert columns <= {key for row in rows for key in row}
    assert not [row for row in rows if row.get("exact") is False]


def _rows(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[dict[str, Any]]:
    monkeypatch.setattr(torch, "set_num_threads", lambda _count: None)  # of this process: later tests need theirs
    if name in CASES:
        monkeypatch.setattr(torch, "compile", lambda function, **_settings: function)
        monkeypatch.setattr(codec, "can_measure", lambda: False)  # takes a process: see the nightly test
    torch.save({"a": torch.arange(-300, 300).view(20, 30).to(torch.int16)}, folder / "x.pt")
    arguments = [argument.replace("FOLDER", str(folder)) for argument in (CASES | LONG)[name][0]]
    importlib.import_module(f"benchmarks.{name}").main([*arguments, "--json"])
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return rows


def test_rows_are_the_same_as_json_and_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [{"name": "one", "bytes": 12345, "share": 0.5, "missing": None}, {"exact": True}]
    command.report(rows, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == {"versions", "machine", "commit", "rows"}
    assert answer["rows"] == rows
    command.report(rows, as_json=False)
    table = capsys.readouterr().out
    assert all(cell in table for cell in ("name", "exact", "one", "12,345", "0.500", "–", "True"))


def test_a_wrong_list_or_name_and_birdies_errors_are_one_line() -> None:
    assert command.comma_separated(int)("1, 2,3") == [1, 2, 3]
    for parse, text in ((command.comma_separated(int), " , "), (command.one_of(("a", "b"), "letter"), "c")):
        with pytest.raises(argparse.ArgumentTypeError, match=r"empty|choose from a, b"):
            parse(text)
    with pytest.raises(SystemExit, match="wrong setting"), command.errors_as_exit():
        raise ConfigError("wrong setting")
    with pytest.raises(KeyError), command.errors_as_exit():
        raise KeyError("key")


def test_the_peak_of_a_command_is_its_own_and_a_failure_is_told() -> None:
    small, large = (
        processes.run_command([sys.executable, "-c", f"x = bytearray({size})"])[1] for size in (1, 60_000_000)
    )
    assert 50 < large - small < 90
    with pytest.raises(RuntimeError, match="a clear message"):
        processes.run_command([sys.executable, "-c", "raise SystemExit('a clear message')"])


@pytest.mark.nightly
def test_every_method_of_scale_is_measured_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "benchmarks.scale.subprocess.run", lambda command, *, cwd, **_: run_python(*command[1:], folder=cwd)
    )
    monkeypatch.setitem(scale.SIZES, "10M", (1, 128, 256))
    rows = {row["method"]: row for row in scale.measured(tmp_path, ["10M"], list(scale.METHODS), 4.0)}
    fast, lossless = rows["birdie fast"], rows["birdie lossless"]
    assert fast["bits"] <= 4
    assert lossless["error"] == 0 < fast["error"] < 0.2
