"""The transcripts in the documentation: each command prints the lines that its page shows, with about these figures.

A block of the language `console` has commands behind `$`, each followed by lines that it prints; `…` stands for lines
that the page leaves out, and what follows `#` behind a command is the time that it took. Daily the commands up to the
first that takes longer than a quarter of a minute are run, nightly all.
"""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import run_python

ROOT = Path(__file__).resolve().parents[1]
PAGES = [path for path in sorted(ROOT.glob("docs/*.md")) if "```console" in path.read_text(encoding="utf-8")]
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
SIZE_DIGITS = 4  # a figure of so many digits is a size, which another machine hardly changes
TOLERANCE = 0.15
QUICK = 15.0  # seconds


def transcript(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of a page, each with the lines behind it."""
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            command, *lines = part.splitlines()
            yield command, [line for line in lines if line.strip() not in ("", "…")]


def seconds(command: str) -> float:
    """Return the time that a command took, by its page."""
    match = re.search(r"# ([\d.]+) (s|min)$", command)
    assert match is not None, command
    return float(match[1]) * (60 if match[2] == "min" else 1)


def shape(line: str) -> str:
    """Return a line without its figures, units of time, and widths of a table."""
    line = re.sub(r"# (?:ms|s|min|h)\b", "# s", NUMBER.sub("#", line))
    return re.sub(r"[─━]+", "─", " ".join(line.split()))


def agree(shown: str, printed: str) -> bool:
    """Return whether a line is the one that the page shows, up to figures that another machine changes."""
    if shape(shown) != shape(printed):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    integers = [(a.replace(",", ""), b.replace(",", "")) for a, b in pairs if "." not in a + b and "e" not in a + b]
    return all(abs(int(a) - int(b)) <= TOLERANCE * int(a) for a, b in integers if len(a) >= SIZE_DIGITS)


def advanced(stream: list[str], line: str) -> bool:
    """Drop the lines of a stream up to one that agrees with this one; return whether there is such a line."""
    index = next((index for index, other in enumerate(stream) if agree(line, other)), None)
    if index is not None:
        del stream[: index + 1]
    return index is not None


@pytest.mark.timeout(1800)  # a training of three minutes
@pytest.mark.parametrize(
    "most", [pytest.param(QUICK, id="quick"), pytest.param(float("inf"), id="all", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_prints_what_its_page_shows(page: Path, most: float, tmp_path: Path) -> None:
    for example in ("patterns.py", "gpt2_folder.py"):
        shutil.copy(ROOT / "examples" / example, tmp_path)
    for command, lines in transcript(page):
        if seconds(command) > most:
            break
        program, *arguments = shlex.split(command, comments=True)
        module = ("-m", "birdie") if program == "birdie" else ()
        result = run_python(*module, *arguments, folder=tmp_path)
        assert result.returncode in (0, "diff" in command), (command, result.stderr)
        streams = [result.stdout.splitlines(), result.stderr.splitlines()]
        for line in lines:
            assert any(advanced(stream, line) for stream in streams), (command, line, result.stdout + result.stderr)
