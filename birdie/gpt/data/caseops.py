"""CaseOps: capitals become operators before lowercase letters, so "hello", "Hello" and "HELLO" share their pieces.

    "The NASA of McX"  ── encode ──►  "{TITLE}the {ALLCAPS}nasa of {TITLE}mc{CAPNEXT}x"  ── decode ──►  the same text

Text is divided into maximal runs of ASCII letters:

    run                             becomes
    lowercase letters only          itself
    two or more capitals only       ALLCAPS, lowercase letters
    any other                       TITLE before a capital first letter, CAPNEXT before each later capital

An operator in the text itself gets ESCAPE before it; everything else is unchanged. Operators are characters of
Unicode's private use area. The rules are those of parameter-golf#1729 (github.com/openai/parameter-golf/pull/1729) with
one exception: a capital before a combining mark is unchanged. Its lowercase letter may compose with the mark to a
character that has no capital (H̱ and ẖ), so a tokenizer that normalizes would lose the capital.
"""

import re

TITLE, ALLCAPS, CAPNEXT, ESCAPE = OPERATORS = "\ue001", "\ue002", "\ue003", "\ue004"
OPERATOR_BYTES = 3
"""UTF-8 bytes of an operator in the text itself."""

# The pattern begins with one character class, so the engine skips quickly to the next capital or operator. The empty
# groups `()` mark which case matched: `match.lastindex` is its number.
_CAPITALS = re.compile(
    r"""[A-Z\ue001-\ue004](?:
        (?<=[\ue001-\ue004])                                                ()  # 1: an operator in the text itself
      | (?<![A-Za-z][A-Z]) [A-Z]++ (?![A-Za-z\u0300-\u036f])                ()  # 2: a run of capitals only
      | (?<![A-Za-z][A-Z]) (?![\u0300-\u036f])                              ()  # 3: the first letter of a run
      | (?![\u0300-\u036f])                                                 ()  # 4: a later letter
    )""",
    re.VERBOSE,
)
_PREFIX = "", ESCAPE, ALLCAPS, TITLE, CAPNEXT  # by the number of the case
_OPERATORS = re.compile(r"(?=[\ue001-\ue004])(?:\ue002[a-z]*|[\ue001\ue003][a-z]?|\ue004.?)", re.DOTALL)


def encode(text: str) -> str:
    """Return `text` with operators for its capitals; `decode` restores every text exactly."""
    return _CAPITALS.sub(_with_operator, text)


def decode(text: str) -> str:
    """Return the text that encodes to `text`. Other text decodes too: an operator without letters is dropped."""
    return _OPERATORS.sub(_without_operator, text)


def _with_operator(match: re.Match[str]) -> str:
    return _PREFIX[match.lastindex or 0] + match[0].lower()


def _without_operator(match: re.Match[str]) -> str:
    operator, letters = match[0][0], match[0][1:]
    return letters if operator == ESCAPE else letters.upper()
