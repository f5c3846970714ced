"""A packed script is read without running it, within limits."""

import hashlib
import lzma
from collections.abc import Callable
from functools import partial

import pytest

from birdie.errors import DataError
from birdie.golf import text_coder
from birdie.golf.audit.scan import scan
from birdie.golf.audit.shipped import is_packed as is_mostly_packed
from birdie.golf.audit.source import parse_source
from birdie.golf.packed import Packed, letters, pack
from birdie.golf.standalone.pack import literal
from birdie.golf.unpacked import FIRST, MAX_MODULES, is_packed, modules_of
from birdie.run.registry import find


def script(data: bytes, first: str = "", **values: object) -> bytes:
    """Return a packed script with modules `data`, and what its first stage states about them."""
    stated = {"SIZE": len(data), "DIGEST": hashlib.sha256(data).hexdigest()} | values
    text = "".join(f"{name} = {value!r}\n" for name, value in stated.items()) + first
    start = literal(lzma.compress(text.encode(), lzma.FORMAT_ALONE))
    return f"#birdie 0 coding:L1\nMODULES='{letters(text_coder.encode(data))}';FIRST={start}\n".encode("latin-1")


@pytest.fixture(scope="module")
def baseline() -> Packed:
    return pack(find("baseline").recipe())


def test_a_script_has_the_modules_that_were_packed(baseline: Packed) -> None:
    modules = modules_of(baseline.script)
    assert is_packed(baseline.script)
    assert "def unpack(" in modules.pop(FIRST)
    assert modules == baseline.sources
    source = parse_source(baseline.script)
    assert source.modules["birdie/cli/challenge.py"] == baseline.sources["birdie/cli/challenge.py"]
    assert is_mostly_packed(source)


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (b"#birdie 0\nprint(1)\n", "cannot be unpacked"),
        (b"#birdie 0\nFIRST=7;MODULES='x'\n", "cannot be unpacked"),
        (b"#birdie 0\nFIRST='x';MODULES='x'\n", "cannot be unpacked"),
        (b"#birdie 0\n(\n", "cannot be unpacked"),
        (partial(script, b"a.py\0x = 1", SIZE=MAX_MODULES + 1), "more than 2,000,000"),
        (partial(script, b"a.py\0x = 1", SIZE=-1), "cannot be unpacked"),
        (partial(script, b"a.py\0x = 1", SIZE="many"), "cannot be unpacked"),
        (partial(script, b"a.py\0x = 1", DIGEST="0"), "digest"),
        (partial(script, b"a.py"), "cannot be unpacked"),
        (partial(script, b"\xff\0\xff"), "cannot be unpacked"),
        (partial(script, b"a.py\0x = 1", first="y = 1\n" * 50_000), "longer than 200,000"),
        (b"#birdie 0\n" + b"#" * 500_000, "500,010 bytes"),
    ],
)
def test_damaged_and_oversized_scripts_are_refused(packed: bytes | Callable[[], bytes], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        modules_of(packed if isinstance(packed, bytes) else packed())


def test_the_scan_says_that_a_damaged_script_was_not_read() -> None:
    (finding,) = scan(script(b"a.py\0x = 1", DIGEST="0"), "train_gpt.py")
    assert finding.result == "unknown"
    assert "damaged" in finding.evidence
