"""Odd metadata: values of wrong kinds, repeated keys, numbers and text that not all parsers of JSON take alike."""

import json
import random
from collections.abc import Callable
from typing import Any

from tests.hostile.mutate import slots

KEYS = (
    *("budget", "metadata", "tree", "schemes", "files", "copies", "state", "base", "order", "link"),
    *("of", "names", "inside", "versions", "extra", "unknown", "__proto__", ""),
)
TOKENS = (
    *("null", "true", "false", "0", "-0", "1", "-1", "2", "1.0", "0.0", "-0.0", "1e0", "1E2", "0.5", "1e400", "-1e400"),
    *("NaN", "Infinity", "-Infinity", "01", "+1", ".5", "1.", "0x1", "1e", "9007199254740993", "18446744073709551616"),
    *("1" + "0" * 400, "9" * 4300, "9" * 4301, "-" + "9" * 4300, "1e-400"),
    *('""', '"x"', '"."', '"123456789"', '"\\ud800"', '"\\ud83d\\ude00"', '"\\u0000"', '"\t"', '"\\x"', "'x'"),
    *("\ufeff1", "{\ufeff}"),
    *("[]", "[0]", "[1]", "[0,1]", "[1,0]", "[0,0]", "[-1]", "[0.0]", "[true]", '["0"]', "[null]", "[,]", "[0,]"),
    *('["."]', '[".",[0]]', '[".",[1.0]]', '[".",0]', '["view"]', '["tensor"]', '{"a":["view"]}', '["x",["view",1]]'),
    *("{}", '{"128":"x"}', '{"128":5}', '{"a":1}', '{"a":-1}', '{"a":1.5}', '{"a":1,"a":1}', '{"a":1,"\\u0061":2}'),
    *('{"inside":true}', '{"inside":1}', '{"of":5}', '{"names":{"a":1}}', '{"versions":{"a":1}}', '{"versions":[]}'),
    *('{"versions":{"a":1.0}}', '{"extra":{"x":1}}', '{"extra":[]}', '{"versions":{"":["dict",[],[]]}}'),
    *("[" * 400 + "]" * 400, "[" * 501 + "]" * 501, '{"a":' * 499 + "1" + "}" * 499, '"' + "[" * 600 + '"'),
)
"""JSON, or what some readers take for it."""
BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    lambda text, _: b"\xef\xbb\xbf" + text,
    lambda text, _: text.decode().encode("utf-16"),
    lambda text, _: text.decode().encode("utf-16-le"),
    lambda text, _: text.decode().encode("utf-32-be"),
    lambda text, _: text + b"\0",
    lambda text, _: text + b" \n\t\r",
    lambda text, _: b" \n" + text,
    lambda text, _: text + b"\x0c",
    lambda text, _: text + text,
    lambda text, rng: text[: rng.randrange(len(text) + 1)],
    lambda text, _: text.replace(b'"', b'"\xed\xa0\x80', 1),
    lambda text, _: text.replace(b'"', b'"\xff', 1),
    lambda text, _: text.replace(b'"', b'"\xc0\x80', 1),
    lambda text, _: text.replace(b":", b" :\n", 1),
    lambda text, _: b"[" + text + b"]",
)
"""Other bytes of a text."""


def odd(fields: dict[str, Any], rng: random.Random) -> bytes:
    """Return metadata with one or two odd values, a repeated key, or other bytes."""
    fields, tokens = json.loads(json.dumps(fields)), list[str]()

    def mark(token: str) -> str:
        tokens.append(token)
        return f"\1{len(tokens) - 1}\1"

    for _ in range(rng.choice((1, 1, 2))):
        inside = list(slots(fields))
        if inside and rng.random() < 0.5:
            holder, key = rng.choice(inside)
            holder[key] = mark(rng.choice(TOKENS))
        else:
            fields[rng.choice(KEYS)] = mark(rng.choice(TOKENS))
    if rng.random() < 0.1:  # a key once more, behind the others
        fields[mark(json.dumps(rng.choice(list(fields))))] = mark(rng.choice(TOKENS))
    text = json.dumps(fields)
    for index, token in enumerate(tokens):
        text = text.replace(f'"\\u0001{index}\\u0001"', token)
    data = text.encode()
    return rng.choice(BYTES)(data, rng) if rng.random() < 0.15 else data
