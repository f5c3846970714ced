"""`birdie prepare` refuses settings that no text can have."""

from pathlib import Path

import pytest

from birdie.cli import build_app
from birdie.cli.console import run


@pytest.mark.parametrize("pieces", ["0", "-5", "260", "65537"])
def test_a_vocabulary_of_an_impossible_size_is_refused(
    pieces: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one line\nand another\n" * 9)
    assert run(build_app, ["prepare", str(text), "--vocab-size", pieces, "-o", str(tmp_path / "data"), "--json"]) == 1
    assert f"a vocabulary of {int(pieces):,} is not possible" in capsys.readouterr().out
