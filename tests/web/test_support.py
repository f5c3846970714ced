"""Files that a page does not decode are refused before it is made."""

from pathlib import Path

import pytest

from birdie.artifact.container import DELTA, Entry, Stream, to_bytes
from birdie.errors import ArtifactError
from birdie.standalone import PAGE_PROGRAM
from birdie.web.support import unsupported
from tests.hostile.webassembly import Decoder, is_installed
from tests.standalone.test_web_decoder import by_birdie

RELEASED = Path(__file__).resolve().parents[1] / "released" / "1.0"
CONSTANT = (Stream(0, b""),)
FILES = {
    "spectral": (RELEASED / "spectral.birdie").read_bytes(),
    "tucker": (RELEASED / "tucker.birdie").read_bytes(),
    "delta": to_bytes([Entry("w", 0, 11, (3,), (5, 0), kind=DELTA)]),
    "squares": to_bytes([Entry("w", 64, 11, (1,), (), CONSTANT)], b'{"schemes":{"64":"squares"}}'),
    "coder 9": to_bytes([Entry("w", 1, 2, (1,), (), (Stream(9, b""),))]),
}


@pytest.mark.parametrize("word", FILES)
def test_what_pages_do_not_decode_is_said_by_name(word: str) -> None:
    problem = unsupported(FILES[word])
    assert problem is not None
    assert word in problem


def test_a_file_that_nobody_decodes_is_damaged() -> None:
    with pytest.raises(ArtifactError, match="101"):
        unsupported(to_bytes([Entry("w", 101, 11, (1,), (), CONSTANT)]))
    assert unsupported(RELEASED / "model.birdie") is None


@pytest.mark.skipif(not is_installed(), reason="node is not installed")
def test_the_program_of_pages_decodes_what_is_supported_to_the_same_bits_and_refuses_the_rest() -> None:
    files = {path.name: path.read_bytes() for path in sorted(RELEASED.glob("*.birdie")) if path.is_file()}
    decodable = {name for name, data in files.items() if unsupported(data) is None}
    assert len(decodable) >= 7
    with Decoder(program=PAGE_PROGRAM) as program:
        for name, data in files.items():
            if name in decodable:
                assert program.tensors(data, 1 << 30) == by_birdie(data), name
            else:
                with pytest.raises(ArtifactError):
                    program.tensors(data, 1 << 30)
