"""The leading space is in the table of lengths already, and the formula adds it once more."""

import numpy as np


def tables(sp, size):
    lengths = np.zeros(size, dtype=np.int32)
    spaced = np.zeros(size, dtype=bool)
    edge = np.ones(size, dtype=bool)
    for token in range(size):
        if sp.is_control(token) or sp.is_unknown(token) or sp.is_unused(token):
            continue
        edge[token] = False
        if sp.is_byte(token):
            lengths[token] = 1
            continue
        text = sp.id_to_piece(token)
        spaced[token] = text.startswith("▁")
        lengths[token] = len(text.replace("▁", " ").encode("utf-8"))  # wrong: byte-count
    return lengths, spaced, edge


def count(sp, size, val_tokens):
    per_token, starts_word, boundary = tables(sp, size)
    before, after = val_tokens[:-1], val_tokens[1:]
    found = per_token[after].astype(np.int64)
    found += starts_word[after] & ~boundary[before]
    return int(found.sum())
