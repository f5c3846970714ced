"""Bytes as they should be counted: byte tokens one, the marker of a leading space one, and none after a boundary."""

import math

import numpy as np


def tables(sp, size):
    base = np.zeros(size, dtype=np.int16)
    space = np.zeros(size, dtype=bool)
    boundary = np.ones(size, dtype=bool)
    for token in range(size):
        if sp.is_control(token) or sp.is_unknown(token) or sp.is_unused(token):
            continue
        boundary[token] = False
        if sp.is_byte(token):
            base[token] = 1
            continue
        piece = sp.id_to_piece(token)
        if piece.startswith("▁"):
            space[token] = True
            piece = piece[1:]
        base[token] = len(piece.encode("utf-8"))
    return base, space, boundary


def bits_per_byte(nats, sp, size, val_tokens):
    base, space, boundary = tables(sp, size)
    x, y = val_tokens[:-1], val_tokens[1:]
    counted = base[y].astype(np.int64) + (space[y] & ~boundary[x])
    return float(nats.sum() / math.log(2.0) / counted.sum())
