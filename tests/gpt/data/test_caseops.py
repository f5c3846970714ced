"""CaseOps: every text round-trips, and the rules are those of the challenge."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from birdie.gpt.data.caseops import ALLCAPS, CAPNEXT, ESCAPE, OPERATORS, TITLE, decode, encode

T, A, C, E = OPERATORS
LETTERS = st.text(st.sampled_from("abcABCXYZ"), max_size=12)
DENSE = st.text(st.sampled_from([*"aAbBhHzZ .1\n\0", *OPERATORS, "É", "ß", "ſ", "K", "Ａ", "\u0331", "\u030c", "😀"]))


def reference(text: str) -> str:
    """Return the encoding of `text` by the rules, run by run and letter by letter."""

    def run(match: re.Match[str]) -> str:
        letters = match[0]
        if len(letters) > 1 and letters.isupper():
            return ALLCAPS + letters.lower()
        marked = [(CAPNEXT if i else TITLE) + c.lower() if c.isupper() else c for i, c in enumerate(letters)]
        return "".join(marked)

    return re.sub("[A-Za-z]+", run, re.sub("([\ue001-\ue004])", rf"{ESCAPE}\1", text))


@given(st.text(st.characters()) | DENSE | st.text(st.sampled_from(OPERATORS)))
def test_every_text_round_trips(text: str) -> None:
    assert decode(encode(text)) == text


@given(st.lists(LETTERS | st.sampled_from([" ", "_", "É", "1", *OPERATORS])).map("".join))
def test_the_rules_equal_the_reference(text: str) -> None:
    assert encode(text) == reference(text)


@pytest.mark.parametrize(
    ("text", "encoded"),
    [
        ("", ""),
        ("hello", "hello"),
        ("Hello", f"{T}hello"),
        ("HELLO", f"{A}hello"),
        ("I am", f"{T}i am"),
        ("McDonald", f"{T}mc{C}donald"),
        ("iPhone", f"i{C}phone"),
        ("HTMLParser", f"{T}h{C}t{C}m{C}l{C}parser"),
        ("A1 B_C AB2CD", f"{T}a1 {T}b_{T}c {A}ab2{A}cd"),
        ("Ünder École ÀB", f"Ünder École À{T}b"),  # ASCII letters only
        ("h\u0331 H\u0331 XYH\u0331", f"h\u0331 H\u0331 {T}x{C}yH\u0331"),
        (f"{T}a{E}{E}", f"{E}{T}a{E}{E}{E}{E}"),
    ],
)
def test_pinned_encodings(text: str, encoded: str) -> None:
    assert encode(text) == encoded
    assert decode(encoded) == text


@given(DENSE)
def test_text_that_is_no_encoding_decodes_too(text: str) -> None:
    """A model may generate such text. Only operators disappear, and letters only change their case."""
    decoded = decode(text)
    assert len(decoded) <= len(text)
    kept = re.sub("[\ue001-\ue004]", "", text)
    assert re.sub("[\ue001-\ue004]", "", decoded).lower() == kept.lower()


@pytest.mark.parametrize("text", ["a" * 10**6, "A" * 10**6, "A" * 10**6 + "a", "aA" * 10**5, ESCAPE * 10**5])
def test_long_runs_take_linear_time(text: str) -> None:
    """A pattern with backtracking would exceed the time limit of the tests."""
    assert decode(encode(text)) == text
