"""A tokenizer in plain JSON, as birdie/web/tokenizer.js reads it.

A SentencePiece model of the challenge is 254 kB, of which 240 kB are the table of its normalization: 225,000 sequences
of characters and what becomes of them. Nearly all of it follows from Unicode, which every browser knows, and what the
browser says about a character never changes (Unicode's stability policy). So these parts describe the table:

    ranges       characters that become their NFKC form; exceptions: those that become something else
    sequences    characters, each already mapped by itself, that together become their NFKC form, and exceptions
    hasHangul    of the syllables of Hangul all three, or two, of their letters do

Source: the trie is a double array of Darts-clone (github.com/s-yata/darts-clone), as SentencePiece stores it.
"""

import itertools
import math
import struct
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from birdie.errors import ConfigError
from birdie.gpt.data.tokenizer import Tokenizer

_HANGUL = range(0xAC00, 0xD7A4)
_BPE = 2  # of TrainerSpec.ModelType
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # of SentencePiece.Type
_LONGEST, _MOST = 64, 1_000_000  # bytes of a sequence, and sequences of a table; SentencePiece's own has 225,276
_Fields = dict[int, Any]


def tokenizer_description(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the description of a tokenizer.

    Raises:
        ConfigError: it has a part that birdie/web/tokenizer.js does not know.
    """
    if tokenizer.kind == "bytes":
        return {"kind": "bytes"}
    trainer: _Fields = {}
    normalizer: _Fields = {}
    rows: list[_Fields] = []
    for number, value in _fields(tokenizer.model_bytes):
        if number == 1:
            rows.append(dict(_fields(value)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    kinds = [row.get(3, _NORMAL) for row in rows]
    scores = [row.get(2, 0.0) for row, kind in zip(rows, kinds, strict=True) if kind == _NORMAL]
    if trainer.get(3, 1) != _BPE or any(a <= b for a, b in itertools.pairwise(scores)):
        raise _refusal(tokenizer, "is not of the type bpe")
    if trainer.get(24, 0) or not normalizer.get(5, 1):
        raise _refusal(tokenizer, "puts spaces at the end of words, or does not mark them")
    if unknown := {*kinds} - {_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE}:
        raise _refusal(tokenizer, f"has pieces of type {min(unknown)}")
    try:
        normalization = _normalization(_table(normalizer.get(2, b"")))
    except (ValueError, IndexError, struct.error) as error:
        raise _refusal(tokenizer, "has a damaged table of normalization") from error
    if normalization is None:
        raise _refusal(tokenizer, f"has the normalization rule {normalizer.get(1, b'').decode(errors='replace')!r}")
    return {
        "kind": tokenizer.kind,
        "pieces": [_piece(row.get(1, b"").decode(), kind) for row, kind in zip(rows, kinds, strict=True)],
        "unknown": kinds.index(_UNKNOWN),
        "symbols": [i for i, kind in enumerate(kinds) if kind == _USER_DEFINED],
        "hasBytes": bool(trainer.get(35, 0)),
        "addsSpace": bool(normalizer.get(3, 1)),
        "joinsSpaces": bool(normalizer.get(4, 1)),
        "keepsText": tokenizer.keeps_text,
        "normalization": normalization,
    }


def _refusal(tokenizer: Tokenizer, reason: str) -> ConfigError:
    return ConfigError(
        f"the tokenizer {tokenizer.name} {reason}, which has no JavaScript; train the model with a tokenizer of "
        "`birdie prepare`"
    )


def _piece(text: str, kind: int) -> str | int | None:
    if kind == _BYTE:
        return int(text[1:-1], 16)  # its text is "<0xNN>"
    return text if kind in (_NORMAL, _USER_DEFINED) else None


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of the fields of a Protocol Buffers message that SentencePiece has accepted."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        match key & 7:
            case 0:
                yield key >> 3, varint()
            case 2:
                length = varint()
                yield key >> 3, message[at : at + length]
                at += length
            case 5:
                yield key >> 3, struct.unpack_from("<f", message, at)[0]
                at += 4
            case _:
                at += 8


def _table(charsmap: bytes) -> dict[str, str]:
    """Return the table of a precompiled normalization: sequences of characters and what becomes of them."""
    if not charsmap:
        return {}
    size = struct.unpack_from("<I", charsmap)[0]
    units: tuple[int, ...] = struct.unpack_from(f"<{size // 4}I", charsmap, 4)
    texts = charsmap[4 + size :]

    def below(position: int) -> int:
        """Return the node below a unit, which is at the node XOR its label in turn."""
        unit = units[position]
        return position ^ (unit >> 10) << ((unit & 1 << 9) >> 6)

    children: dict[int, list[tuple[int, bytes]]] = {}
    for position, unit in enumerate(units):
        if 0 < (label := unit & (1 << 31 | 0xFF)) < 256:  # else it is unused, or holds the value of a key
            children.setdefault(position ^ label, []).append((position, bytes([label])))
    table: dict[str, str] = {}
    queue = [(below(0), b"")]
    while queue:
        node, prefix = queue.pop()
        if len(prefix) > _LONGEST or len(table) > _MOST:
            raise ValueError("the trie has a cycle, or is larger than any")
        for position, label_byte in children.get(node, ()):
            key = prefix + label_byte
            queue.append((below(position), key))
            if units[position] >> 8 & 1:
                start = units[below(position)] & ((1 << 31) - 1)
                table[key.decode()] = texts[start : texts.index(b"\0", start)].decode()
    return table


def _normalization(table: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the description of a table, or None if its sequences do not follow from their characters."""
    singles = {key: value for key, value in table.items() if len(key) == 1}
    sequences: dict[str, str] = {}
    preimages: dict[str, list[str]] = {}
    for key, value in singles.items():
        preimages.setdefault(value, []).append(key)
    count = 0
    for key, value in table.items():
        if len(key) > 1:
            count += 1
            mapped = [singles.get(c, c) for c in key]
            if {*map(len, mapped)} != {1} or sequences.setdefault("".join(mapped), value) != value:
                return None
    # a sequence is in the table exactly if that of its mapped characters is: then it has as many as there are products
    numbers = {c: len(preimages.get(c, ())) + (c not in singles) for key in sequences for c in key}
    if count != sum(math.prod(numbers[c] for c in key) for key in sequences):
        return None
    syllables = {chr(code) for code in _HANGUL}
    letters = {unicodedata.normalize("NFD", syllable): syllable for syllable in syllables}
    has_hangul = letters.items() <= sequences.items()
    rest = {key: value for key, value in sequences.items() if not (has_hangul and key in letters)}
    return {
        "ranges": _ranges(sorted(ord(c) for c, value in singles.items() if unicodedata.normalize("NFKC", c) == value)),
        "exceptions": {c: v for c, v in sorted(singles.items()) if unicodedata.normalize("NFKC", c) != v},
        "sequences": sorted(key for key, value in rest.items() if unicodedata.normalize("NFKC", key) == value),
        "sequenceExceptions": {k: v for k, v in sorted(rest.items()) if unicodedata.normalize("NFKC", k) != v},
        "hasHangul": has_hangul,
        "longest": max(map(len, table), default=1),
    }


def _ranges(codes: list[int]) -> list[tuple[int, int]]:
    """Return (first, last) of each run of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for code in codes:
        if runs and runs[-1][1] == code - 1:
            runs[-1] = runs[-1][0], code
        else:
            runs.append((code, code))
    return runs
