"""Counts byte tokens such as <0xE2> by the length of their names, six bytes each."""

import numpy as np


def byte_table(sp, vocabulary):
    base = np.zeros(vocabulary, dtype=np.int16)
    leading = np.zeros(vocabulary, dtype=bool)
    for i in range(vocabulary):
        if sp.is_control(i) or sp.is_unknown(i):
            continue
        piece = sp.id_to_piece(i)
        if piece.startswith("▁"):
            leading[i] = True
            piece = piece[1:]
        base[i] = len(piece.encode("utf-8"))  # wrong: byte-count
    return base, leading


def total_bytes(sp, vocabulary, val_tokens):
    base, leading = byte_table(sp, vocabulary)
    return int(base[val_tokens[1:]].sum() + leading[val_tokens[1:]].sum())
