"""CaseOps: capitals become operators before small letters, so that "hello", "Hello" and "HELLO" share their pieces.

    "The NASA of McX"  ── encode ──►  "{TITLE}the {ALLCAPS}nasa of {TITLE}mc{CAPNEXT}x"  ── decode ──►  the same text

Text is read in runs of ASCII letters, as long as they go:

    run                             becomes
    small letters only              itself
    two or more capitals only       ALLCAPS, small letters
    any other                       TITLE before its first letter if that is a capital, CAPNEXT before each later one

An operator that the text itself holds gets ESCAPE before it; all else is left alone. Operators are characters of
Unicode's private use area. The rules are those of openai/parameter-golf #1729, but for one: a capital before a
combining mark is left alone, because a small letter may compose with the mark to one that has no capital (H̱ and ẖ),
and a tokenizer that normalises would then lose it.
"""

import re

TITLE, ALLCAPS, CAPNEXT, ESCAPE = OPERATORS = "\ue001", "\ue002", "\ue003", "\ue004"
OPERATOR_BYTES = 3
"""UTF-8 bytes of an operator that stands for itself."""

# One character class first: the engine then skips to the next capital or operator. `()` only marks which case it was.
_CAPITALS = re.compile(
    r"""[A-Z\ue001-\ue004](?:
        (?<=[\ue001-\ue004])                                                ()  # 1: an operator of the text's own
      | (?<![A-Za-z][A-Z]) [A-Z]++ (?![A-Za-z\u0300-\u036f])                ()  # 2: a whole run of capitals
      | (?<![A-Za-z][A-Z]) (?![\u0300-\u036f])                              ()  # 3: the first letter of a run
      | (?![\u0300-\u036f])                                                 ()  # 4: a later one
    )""",
    re.VERBOSE,
)
_BEFORE = "", ESCAPE, ALLCAPS, TITLE, CAPNEXT  # by the number of the case
_OPERATORS = re.compile(r"(?=[\ue001-\ue004])(?:\ue002[a-z]*|[\ue001\ue003][a-z]?|\ue004.?)", re.DOTALL)


def encode(text: str) -> str:
    """`text` with operators for its capitals; `decode` gives it back, whatever it holds."""
    return _CAPITALS.sub(_with_operator, text)


def decode(text: str) -> str:
    """The text whose encoding `text` is. Text that is none decodes as well: an operator without letters is dropped."""
    return _OPERATORS.sub(_without_operator, text)


def _with_operator(match: re.Match[str]) -> str:
    return _BEFORE[match.lastindex or 0] + match[0].lower()


def _without_operator(match: re.Match[str]) -> str:
    operator, letters = match[0][0], match[0][1:]
    return letters if operator == ESCAPE else letters.upper()
