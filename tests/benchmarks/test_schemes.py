"""The benchmark of schemes: rows are measured on decoded files, and the reference grid has ratio one to itself."""

import pytest

from benchmarks import schemes
from tests.benchmarks.small_gpt import subject


def test_rows_compare_with_the_grid_at_equal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes, "GRID", ("sigma:0.1", "sigma:0.6"))
    fine, coarse, other = schemes.rows(subject(4, dim=64), ["int4 + data"])
    assert [row["grid_error"] for row in (fine, coarse)] == [1, 1]
    assert fine["bytes"] > coarse["bytes"]
    assert fine["error"] < other["error"] < coarse["error"]
    assert 0 < fine["predicted"] < coarse["predicted"]
    assert other["bits"] == pytest.approx(8 * other["bytes"] / (8 * coarse["bytes"] / coarse["bits"]))
    keys = ["scheme", "bytes", "bits", "error", "predicted", "kl", "bpb", "encode_s", "decode_s"]
    assert list(other) == [*keys, "grid_error", "grid_kl"]
    table = schemes.markdown([fine, other]).splitlines()
    assert len(table) == 4
    assert table[3].startswith("| `int4 + data` |")
