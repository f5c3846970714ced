"""The lossless benchmark: rows have the pinned keys and count the entire file."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import birdie_rows, codec, rivals
from tests.benchmarks.small_checkpoint import symbol_set


def test_a_coder_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(rivals, "RIVALS", Path("nowhere"))
    lines = {line["codec"]: line for line in codec.rows(symbol_set(integers=True), ["zpaq", "nncodec"])}
    assert lines["zpaq -m5"]["version"] == "not installed: apt install zpaq"
    assert lines["NNCodec"]["version"] == "not installed: make rivals"
    assert all(line["bytes"] is None and line["exact"] is None for line in lines.values())


def test_rows_have_the_pinned_keys_and_count_the_entire_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(birdie_rows, "_decode_peak", lambda _path: 1.5)  # takes a process: see the nightly test
    symbols = symbol_set(integers=True)
    lines = list(codec.rows(symbols, ["max", "fast", "zstd"]))
    for line in lines:
        assert {"codec", "bytes", "symbol_bytes", "encode_s", "decode_s", "exact", "version"} <= line.keys()
        assert line["exact"] is True
        assert line["symbol_bytes"] == symbols.bytes
    names = sum(len(name) for name in symbols.tensors)
    assert [line["codec"] for line in lines] == ["birdie max", "birdie fast", "zstd -22"]
    assert lines[0]["bytes"] > names
    json.dumps(lines)


def test_unknown_codecs_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["codec", "--codecs", "zpaq, max"])
    assert codec.parse().codecs == ["zpaq", "max"]
    monkeypatch.setattr("sys.argv", ["codec", "--codecs", "max,zpack"])
    with pytest.raises(SystemExit):
        codec.parse()
    assert "zpack" in capsys.readouterr().err


@pytest.mark.nightly  # a process whose memory is measured, for each effort
@pytest.mark.parametrize("effort", ["max", "fast"])
def test_decoding_memory_is_measured_in_a_new_process(effort: str) -> None:
    symbols = symbol_set(integers=True)
    (line,) = codec.rows(symbols, [effort])
    assert line["decode_mb"] is None or line["decode_mb"] >= 0
