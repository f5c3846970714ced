"""Training logs: every style is read, and no text breaks the reader or takes it long."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from birdie.golf.audit.log_checks import check_log
from birdie.lab.logs import Figure, ScoreLine, TrainingLog, parse_log, read_log
from tests.golf.audit.audited_logs import baseline


def value(figure: Figure | None) -> float:
    assert figure is not None
    return figure.value


def final(log: TrainingLog) -> ScoreLine:
    assert log.final is not None
    return log.final


def test_the_log_of_the_baseline_is_read() -> None:
    log = parse_log(baseline(), "train.log")
    assert (value(log.seed), value(log.val_tokens)) == (1337, 62_021_632)
    assert (value(log.train_ms), log.mean_step_ms, log.capped) == (600_038, 43.54, True)
    assert (value(log.code), value(log.model)) == (47_642, 15_815_847)
    assert value(log.total) == 15_863_489  # not that of the raw model
    assert value(log.eval_s) == 1.401
    assert [score.bpb for score in log.validations] == [4.1077, 1.2172]
    assert (final(log).name, final(log).digits) == ("final_int8_zlib_roundtrip_exact", 8)
    assert baseline().splitlines()[final(log).line - 1].startswith("final_int8_zlib_roundtrip_exact")


@pytest.mark.parametrize(
    ("line", "name", "bpb", "ms"),
    [
        ("final_sliding_window_eval stride:64 val_loss:2.0100 val_bpb:1.1900 eval_time:691000ms",
         "final_sliding_window_eval", 1.19, 691_000),
        ("final_birdie_roundtrip_exact val_loss:2.06000000 val_bpb:1.22000000",
         "final_birdie_roundtrip_exact", 1.22, None),
    ],
)  # fmt: skip
def test_scores_are_read_with_their_names(line: str, name: str, bpb: float, ms: float | None) -> None:
    (score,) = parse_log(line, "log").scores
    assert (score.name, score.bpb, score.ms) == (name, bpb, ms)


def test_a_file_of_something_else_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("torch\nnumpy==2.0\n")
    assert read_log(tmp_path / "requirements.txt") is None


@given(st.text(max_size=300))
def test_any_text_is_read_without_an_error(text: str) -> None:
    assert isinstance(check_log(parse_log(text, "log")), tuple)


def test_no_line_takes_long() -> None:
    """The processor time is limited: a pattern that backtracks would take minutes."""
    result = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, check=False)
    assert result.returncode == 0, result.stderr


HOSTILE = """
import resource
resource.setrlimit(resource.RLIMIT_CPU, (15, 15))
from birdie.golf.audit.log_checks import check_log
from birdie.lab.logs import parse_log
for piece in ("Total submission size: ", "Code size (", "a ", "a.", "1,", "step:", "a:1 ", "=", "val_bpb:", "e", "  ",
              "9/"):
    for text in (piece * 800, piece + " " * 16000 + "x", "Total submission size" + piece * 800, piece * 2**15):
        check_log(parse_log(text, "log"))
check_log(parse_log("import os" + chr(10) * 2**20 + "Running Python 3" + chr(10), "log"))
"""
